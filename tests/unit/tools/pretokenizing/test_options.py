"""Options of `pretokenize`: their help and their errors."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from support.commands import call

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.tools import pretokenize, report, shards, train
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.records import FieldKind, Fields
from tokenfeed.tools.encoding.tasks import TASK_CLASSES, LmEncoder
from tokenfeed.tools.pretokenizing.options import (
    fields_of_tasks,
    input_formats,
    parse_options,
    records_of_tasks,
)


@dataclass(frozen=True, kw_only=True)
class Titled(LmEncoder):
    name: ClassVar[Task] = "titled"  # type: ignore[assignment]
    record: ClassVar[str] = "a document with a title"
    kinds: ClassVar[Fields] = {"text": FieldKind.TEXT, "title": FieldKind.TEXT}
    title: str | None = None


def test_the_help_names_every_format_and_every_field_of_every_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pretokenize", "--help"])
    with pytest.raises(SystemExit, match="0"):
        parse_options()
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for said in (input_formats(), records_of_tasks(), fields_of_tasks()):
        assert said in shown
    for format_ in FORMATS.values():
        ending = re.escape(format_.endings[0]) if format_.endings else r"\.bin"
        assert format_ is FALLBACK or re.search(rf" {ending},", shown)
    for name, task in TASK_CLASSES.items():
        fields = re.search(rf"{name}: ([\w\[\], ]+)[;.]", fields_of_tasks())
        assert fields
        assert re.findall(r"\w+", fields[1]) == list(task.kinds)


def test_what_was_just_registered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: dict[Any, Any] = TASK_CLASSES
    monkeypatch.setitem(tasks, "titled", Titled)
    monkeypatch.setitem(FORMATS, "epub", replace(FALLBACK, name="epub", endings=(".epub",)))
    assert fields_of_tasks().endswith("; titled: text, [title].")
    assert records_of_tasks().endswith("; titled: a document with a title.")
    assert ", .epub, each also .gz" in input_formats()


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (pretokenize.main, "a o --text-field x", "Unknown option `--text-field`."),
        (pretokenize.main, "a o --validaton 0", "Unknown option `--validaton`. Did you mean --val"),
        (pretokenize.main, "a o --task foo", "`--task`: expected one of lm, classify"),
        (pretokenize.main, "a", "`OUT` is missing: expected CORPUS... OUT. See pretokenize"),
        (shards.main, "", "expected a command: inspect, verify, "),
        (shards.main, "inspct o", "Unknown command `inspct`. Did you mean inspect? See shards"),
        (shards.main, "verify", "`OUT` is missing. See shards verify --help."),
        (shards.main, "copy a", "`TO` is missing: expected FROM TO. See shards copy --help."),
        (shards.main, "copy a b c", "`c`: unexpected word, expected FROM TO. See shards copy"),
        (shards.main, "copy -- a b -c", "`-c`: unexpected word, expected FROM TO. See shards copy"),
        (
            shards.main,
            "cat o --targets",
            "`--targets`: expected a value: assistant|last|all|KINDS.",
        ),
        (shards.main, "cat o --json=1", "`--json`: takes no value. See shards cat"),
        (shards.main, "cat o --rows abc", "`--rows`: expected a whole number, got abc."),
        (
            shards.main,
            "explain o --state s --step 1.5",
            "`--step`: expected a whole number, got",
        ),
        (shards.main, "explain o", "`--state` is needed: expected"),
        (report.main, "", "`RUN` is missing. See report --help."),
        (report.main, "--jsn run", "Unknown option `--jsn`. Did you mean --json? See report"),
        (report.main, "run --jsn", "Unknown option `--jsn`. Did you mean --json? See report"),
    ],
)
def test_wrong_words_are_one_line(
    main: Any, words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ended = call(main, *words.split(), expect=2)
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error: {message}")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.endswith("--help.\n") or "expected" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "`CORPUS...` is missing: expected CORPUS... OUT."),
        ("--workers abc", "`--workers`: expected a whole number of at least 1 or auto, got abc."),
        ("--workers 0", "`--workers`: expected a whole number of at least 1 or auto, got 0."),
        ("--validation 1", "`--validation`: expected a share from 0 up to 1, got 1."),
        ("--vocab-size 9", "`--vocab-size`: expected a whole number from "),
        ("--max-rejects -1", "`--max-rejects`: expected a whole number of at least 0, got -1."),
        ("--max-rejects 1 --strict", "`--max-rejects` 1 and `--strict`: leave one of them out."),
        ("--tokenizer=", "`--tokenizer` is empty: expected text. Is a shell variable unset?"),
        ("--strict=yes", "`--strict`: takes no value."),
        (
            "--tokenizer t --vocab-size 400",
            "`--vocab-size` 400: is for a tokenizer that is trained",
        ),
        ("--tokenizer t --seed 7", "`--seed` 7: is for a tokenizer that is trained"),
        ("--seed -1", "`--seed`: expected a whole number of at least 0, got -1"),
        (f"--seed {2**63}", "`--seed`: expected below 2**63"),
        ("--shard-size 5G", "`--shard-size` '5G': expected a size like 256MB, or auto."),
    ],
)
def test_pretokenize_rejects_wrong_value_in_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["corpus", "out"] if words else []
    monkeypatch.setattr("sys.argv", ["pretokenize", *paths, *words.split()])
    with pytest.raises(ConfigError) as caught:
        parse_options().check()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (pretokenize.main, ["", "out"]),
        (report.main, [""]),
        (shards.main, ["verify", ""]),
        (shards.main, ["copy", "", "out"]),
    ],
)
def test_command_rejects_empty_path(main: Any, words: list[str]) -> None:
    assert "error: a path is empty: expected " in call(main, *words, expect=2).stderr


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (report.main, []),
        (shards.main, ["explain", "out", "--state"]),
        (train.main, ["--config"]),
        (train.main, ["--run-dir"]),
        (train.main, ["--export"]),
    ],
)
def test_address_in_place_of_path_is_rejected_without_secret(main: Any, words: list[str]) -> None:
    shown = call(main, *words, "s3://me:hunter2@bucket/x?sig=hunter2", expect=2).stderr
    assert "expected a path on this machine, got s3://***@bucket/x" in shown
    assert "hunter2" not in shown


def test_paths_and_options_may_be_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "a --strict b --exclude *.md c --exclude *.txt --workers=3 -"
    monkeypatch.setattr("sys.argv", ["pretokenize", *words.split()])
    options = parse_options()
    assert options.paths == ("a", "b", "c", "-")
    assert options.exclude == ("*.md", "*.txt")
    assert (options.workers, options.strict, options.json) == (3, True, False)
