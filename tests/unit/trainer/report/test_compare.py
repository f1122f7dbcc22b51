"""`report compare`: two runs side by side, in 15 lines, as a page, and for programs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import call
from support.reports import cause, report_of, stall_of, write_run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools import report as report_command
from tokenfeed.trainer.report.compare import Comparison


def stall_with(low: float, high: float, **changes: Any) -> dict[str, Any]:
    """A stall in the middle of an interval, all of it by late batches."""
    share = (low + high) / 2
    data = cause(share) | {"interval": [low, high]}
    causes = {"data": data, "log": cause(0.0)}
    return stall_of(stall=share, interval=[low, high], at_most=share, causes=causes, **changes)


def compare(folder: Path, a: dict[str, Any], b: dict[str, Any], *words: str) -> str:
    """What the command prints about two reports."""
    for name, found in (("a", a), ("b", b)):
        write_run(folder / name, found)
    ended = call(report_command.main, "compare", folder / "a", folder / "b", *words)
    assert ended.stderr == ""
    return ended.stdout


def row_of(printed: str, name: str) -> str:
    (found,) = [line for line in printed.splitlines() if line.strip().startswith(name)]
    return found


def test_compare_shows_verdicts_stall_causes_and_speed(tmp_path: Path) -> None:
    slow = stall_with(0.44, 0.46, verdict="WAITS FOR DATA", seconds=78.0, real_tokens_per_s=4000.0)
    fast = stall_with(0.005, 0.015, verdict="THE DEVICE IS BUSY", seconds=39.0)
    printed = compare(tmp_path, {"stall": slow}, {"stall": fast})
    lines = printed.splitlines()
    assert len(lines) <= 15
    assert lines[0].split() == ["a", "b"]
    assert lines[1].split("  ")[0] == "verdict"
    assert "WAITS FOR DATA" in lines[1]
    assert "THE DEVICE IS BUSY" in lines[1]
    shown = "45.00% [44.00%, 46.00%]  1.00% [0.50%, 1.50%]  44.00 points less"
    assert row_of(printed, "stall").endswith(shown)
    assert row_of(printed, "data").endswith("44.00 points less")
    assert "log" not in printed
    assert row_of(printed, "ms a step").split()[3:] == ["400", "200", "50.0%", "less"]
    assert row_of(printed, "real tokens/s").split()[2:] == ["4,000", "6,000", "50.0%", "more"]
    assert row_of(printed, "settings").endswith("not recorded")
    page = (tmp_path / "b" / "compare.html").read_text()
    assert lines[-1] == f"page     {tmp_path / 'b' / 'compare.html'}"
    for part in ("WAITS FOR DATA", "THE DEVICE IS BUSY", "44.00 points less", "50.0% more"):
        assert part in page


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ((0.04, 0.06), (0.045, 0.065), "none: within both intervals"),
        ((0.04, 0.06), (0.055, 0.075), "1.50 points more"),  # neither holds the other
        ((0.01, 0.09), (0.059, 0.061), "1.00 points more"),  # only the first holds the other
    ],
)
def test_difference_within_both_intervals_is_none(
    first: tuple[float, float], second: tuple[float, float], difference: str, tmp_path: Path
) -> None:
    printed = compare(
        tmp_path, {"stall": stall_with(*first)}, {"stall": stall_with(*second)}, "--json"
    )
    row = json.loads(printed)["rows"][0]
    assert (row["name"], row["is_same"]) == ("stall", difference.startswith("none"))
    shown = Comparison.of(tmp_path / "a", tmp_path / "b").summary()
    assert row_of(shown, "stall").endswith(difference)
    assert row_of(shown, "data").endswith(difference)


def test_settings_that_differ_are_listed_and_cut(tmp_path: Path) -> None:
    before = {"num_workers": 0, "seed": 7, "run_dir": "x", "lora": {"rank": 8, "alpha": 1}}
    after = {"num_workers": 4, "seed": 7, "run_dir": "y", "lora": {"rank": 8, "alpha": 2}}
    runs = {"a": before, "b": after | {"compile": True, "track": ["wandb"]}}
    for name, settings in runs.items():
        folder = write_run(tmp_path / name, report_of())
        (folder / "config.yaml").write_text(json.dumps(settings))
    ended = call(report_command.main, "compare", tmp_path / "a", tmp_path / "b")
    assert len(ended.stdout.splitlines()) <= 15
    assert row_of(ended.stdout, "settings").endswith("4 differ. The page has all of them")
    assert row_of(ended.stdout, "num_workers").split() == ["num_workers", "0", "4"]
    assert row_of(ended.stdout, "lora.alpha").split() == ["lora.alpha", "1", "2"]
    assert row_of(ended.stdout, "compile").split() == ["compile", "not", "set", "True"]
    assert "wandb" not in ended.stdout
    assert "wandb" in (tmp_path / "b" / "compare.html").read_text()
    ended = call(report_command.main, "compare", tmp_path / "a", tmp_path / "b", "--json")
    assert json.loads(ended.stdout)["settings"] == {
        "num_workers": [0, 4],
        "lora.alpha": [1, 2],
        "compile": [None, True],
        "track": [None, ["wandb"]],
    }


def test_settings_that_no_run_recorded_are_not_called_equal(tmp_path: Path) -> None:
    on_gpu = {"stall": stall_of(device="NVIDIA H100")}
    printed = compare(tmp_path, {"stall": stall_of()}, on_gpu)
    assert row_of(printed, "settings").split() == ["settings", "not", "recorded"]
    assert row_of(printed, "device").split() == ["device", "CPU", "NVIDIA", "H100"]
    assert "Not recorded." in (tmp_path / "b" / "compare.html").read_text()
    found = Comparison.of(tmp_path / "a", tmp_path / "a").as_dict()
    assert (found["settings"], found["settings_recorded"]) == (None, {"a": False, "b": False})
    (write_run(tmp_path / "c", report_of()) / "config.yaml").write_text("seed: 7")
    shown = Comparison.of(tmp_path / "c", tmp_path / "a").summary()
    assert row_of(shown, "settings").endswith("not recorded in a")
    assert "seed" not in shown
    shown = Comparison.of(tmp_path / "c", tmp_path / "c").summary()
    assert row_of(shown, "settings").endswith("none differs")


def test_run_without_a_measured_step_is_compared_by_what_is_known(tmp_path: Path) -> None:
    nothing = stall_of(stall=None, interval=None, at_most=None, steps=0, real_tokens_per_s=None)
    printed = compare(tmp_path, {"stall": nothing}, {"stall": stall_of()})
    assert row_of(printed, "stall").split()[:4] == ["stall", "not", "measured", "5.00%"]
    assert row_of(printed, "ms a step").split()[3:] == ["not", "measured", "256"]
    assert "0.00%" not in printed
    assert "points" not in printed


def test_runs_of_one_name_are_shown_by_their_paths(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run", {"stall": stall_of()})
    shown = Comparison.of(tmp_path / "x" / "run", tmp_path / "y" / "run").summary()
    assert shown.splitlines()[0].split() == [str(tmp_path / x / "run") for x in "xy"]


def test_folder_without_a_report_is_one_error(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"stall": stall_of()})
    with pytest.raises(ConfigError, match=r"b holds no report\.json"):
        Comparison.of(tmp_path / "a", tmp_path / "b")
    ended = call(report_command.main, "compare", tmp_path / "a", expect=2)
    assert ended.stderr == "error: `B` is missing: expected A B. See report compare --help.\n"


def test_page_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, {"stall": stall_of()})
    (tmp_path / "b" / "compare.html").mkdir()
    ended = call(report_command.main, "compare", tmp_path / "a", tmp_path / "b")
    assert "verdict" in ended.stdout
    assert ended.stderr.endswith("compare.html: not written: Is a directory\n")
