"""Options of `pretokenize`: their help and their errors."""

import re
from typing import Any

import pytest
from support.commands import call

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools import report, shards, train
from tokenfeed.tools.corpus.formats.registry import FALLBACK, FORMATS
from tokenfeed.tools.encoding.tasks.registry import TASK_CLASSES
from tokenfeed.tools.pretokenizing.options import (
    fields_of_tasks,
    input_formats,
    parse_options,
    records_of_tasks,
)


def test_the_help_names_every_format_and_every_field_of_every_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pretokenize", "--help-all"])
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
    words = "a --json - --exclude *.md c --exclude *.txt --workers=3 out"
    monkeypatch.setattr("sys.argv", ["pretokenize", *words.split()])
    options = parse_options()
    assert options.paths == ("a", "-", "c", "out")
    assert options.exclude == ("*.md", "*.txt")
    assert (options.workers, options.finish, options.json) == (3, False, True)


def test_standard_output_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretokenize", "-", "-"])
    with pytest.raises(ConfigError, match="OUT, the last path, is a folder"):
        parse_options()
