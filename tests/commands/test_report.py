"""The command `report`: a run's report again, its page anew, and two runs side by side."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.training import make_config, run, write_every_task

SCRIPT = [sys.executable, "-m", "tokenfeed.tools.report"]


def report(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*SCRIPT, *map(str, words)], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    shards = write_every_task(folder / "data") / "lm"
    for name, steps in (("one", 6), ("other", 8)):
        run(make_config(shards, folder / name, steps=steps))
    return folder / "one", folder / "other"


def test_a_run_is_reported_again_and_its_page_is_made_anew(runs: tuple[Path, Path]) -> None:
    page = runs[0] / "report.html"
    before = page.read_bytes()
    page.unlink()
    ended = report(runs[0])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("model ")
    assert f"page     {page}" in ended.stdout
    assert page.read_bytes() == before
    told = json.loads(report(runs[0], "--json").stdout)
    assert told == json.loads((runs[0] / "report.json").read_bytes())


def test_two_runs_stand_side_by_side(runs: tuple[Path, Path]) -> None:
    ended = report("compare", *runs)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "settings that differ" in ended.stdout
    found = json.loads(report("compare", *runs, "--json").stdout)
    assert [(row["name"], row["one"], row["other"]) for row in found["settings"]] == [
        ("--steps", "6", "8")
    ]
    names = [row["name"] for row in found["figures"]]
    assert set(names) >= {"loss at step 6", "steps", "real tokens a second"}
    assert len(names) == len(set(names))
    assert "communication" not in [row["name"] for row in found["causes"]]


def test_the_command_needs_no_torch(runs: tuple[Path, Path]) -> None:
    code = (
        "import sys; sys.argv = ['report', sys.argv[1]]\n"
        "from tokenfeed.tools.report import _run\n"
        "_run()\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(runs[0])], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
