"""The help of `pretokenize` names every format and every task, also one that was just added."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from command import call

from tokenfeed.pipeline.format.schema import Task
from tokenfeed.tools import pretokenize, report, shards
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.corpus.kinds import Fields, Kind
from tokenfeed.tools.described import fields_of_tasks, input_formats, records_of_tasks
from tokenfeed.tools.encoding.tasks import TASK_CLASSES, Lm
from tokenfeed.tools.options import parse_options


@dataclass(frozen=True, kw_only=True)
class Titled(Lm):
    name: ClassVar[Task] = "titled"  # type: ignore[assignment]
    record: ClassVar[str] = "a document with a title"
    kinds: ClassVar[Fields] = {"text": Kind.TEXT, "title": Kind.TEXT}
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
        assert format_ is FALLBACK or f" {format_.endings[0]}," in shown
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
        (pretokenize.main, "a o --text-field x", "Unrecognized options: --text-field, x."),
        (
            pretokenize.main,
            "a o --validaton 0",
            "Unrecognized options: --validaton, 0. Did you mean --validation PART?",
        ),
        (pretokenize.main, "a o --task foo", "invalid choice 'foo' for argument '--task'."),
        (shards.main, "inspct o", "Unrecognized options: inspct, o. Available subcommands:"),
        (shards.main, "verify", "Missing from shards verify: OUT. See shards verify --help."),
        (report.main, "", "Missing from report: RUN. See report --help."),
        (report.main, "run --jsn", "Unrecognized options: --jsn. Did you mean --json"),
    ],
)
@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_wrong_words_are_one_line(
    main: Any, words: str, message: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ended = call(main, *words.split(), expect=2)
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error: {message}")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.endswith("--help.\n")
