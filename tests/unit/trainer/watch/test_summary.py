"""The report of a watch: ranks, files of ranks, advice and the page."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.reports import stall_of

import tokenfeed
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.report.progress_lines import remedies
from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.stall_report import CauseReport, StallReport
from tokenfeed.trainer.stall.verdict import conclude
from tokenfeed.trainer.watch.places import Place, Site
from tokenfeed.trainer.watch.ranks import RankFiles
from tokenfeed.trainer.watch.summary import Run

torch.set_num_threads(1)


def train(steps: int = 12) -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def figures(seconds: float, **causes: float) -> list[float]:
    """What a rank of ten steps writes for the others."""
    return [10, seconds, *(causes.get(cause, 0.0) for cause in CAUSES), 0]


@pytest.fixture
def second_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Rank 2 of 4, the first of its node."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    return places


def test_ranks_of_a_later_node_keep_their_numbers(
    second_node: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with tokenfeed.watch() as running:
        train()
        RankFiles(3, 4, second_node | {"RANK": "3", "LOCAL_RANK": "1"}).write(
            figures(100.0, data=90.0)
        )
    report, shown = running.report, capfd.readouterr().err
    assert (report.rank, report.world_size) == (2, 4)
    assert [each.rank for each in report.ranks] == [2, 3]
    assert (report.slowest_rank.rank, report.slowest_rank.cause) == (3, "data")
    assert "WAITS FOR RANK 3" in shown
    assert "rank 3 keeps the others waiting: data" in shown
    assert ", rank 2 of 4" in shown
    assert "left no reading" not in shown


@pytest.mark.parametrize("kind", ["link", "file", "of another user"])
def test_folder_of_somebody_else_is_not_read(
    kind: str,
    second_node: dict[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / f"tokenfeed-stall-{os.getuid()}-{os.getppid()}-2-0"
    other = tmp_path / "other"
    other.mkdir()
    (other / "2.json").write_text("kept")
    (other / "3.json").write_text(str(figures(1.0, data=0.9)))
    if kind == "link":
        folder.symlink_to(other)
    elif kind == "file":
        folder.write_text("kept")
    else:
        other.rename(folder)
        other = folder
        found = os.lstat

        def lstat(path: Any) -> os.stat_result:
            values = found(path)
            if Path(path) != folder:
                return values
            return os.stat_result([*values[:4], os.getuid() + 1, *values[5:]])

        monkeypatch.setattr(os, "lstat", lstat)
    with tokenfeed.watch() as running:
        train()
    assert running.report.steps == 7
    assert running.report.ranks == []
    assert (other / "2.json").read_text() == "kept"
    assert (other / "3.json").exists()
    shown = capfd.readouterr().err
    assert shown.count("verdict") == 1
    assert f"missing  {folder}: is not a folder of this user" in shown


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("command", ["stall", "train"])
def test_advice_names_nothing_that_the_user_does_not_call(cause: Cause, command: str) -> None:
    part = {"fraction": 0.4, "seconds": 20.0, "interval": (0.4, 0.4), "speed_up": 1.7}
    none = part | {"fraction": 0.0, "seconds": 0.0, "interval": (0.0, 0.0)}
    causes = {each: CauseReport(**(part if each == cause else none)) for each in CAUSES}
    report = StallReport(**stall_of(causes=causes, stall=0.4))
    never = StallReport(**stall_of(causes=causes, stall=None, steps=0))
    task: Any = SimpleNamespace(kind="row", manifest=None)
    config = TrainConfig(shards="x", batching="padded")
    known = Run().remedies() if command == "stall" else remedies(config, task)
    for each in (report, never):
        found = conclude(each, known)
        assert "meter." not in str(found)
    assert conclude(report, known).advice[0].cause == cause
    own = conclude(report)
    assert ("meter." in str(own)) == (cause in ("wait", "communication", "other"))


@pytest.mark.parametrize(
    ("cause", "every", "remedy"),
    [
        ("checkpoint", "60", "save less often than every 60 steps, or in the background"),
        ("evaluation", "eval_interval", "raise `eval_interval`"),
    ],
)
def test_remedy_names_the_interval(cause: Cause, every: str, remedy: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"if step % {every} == 0:\n    run()\n")
    run = Run()
    run.spent(cause, 1.0, Site((Place(str(script), 2),), ""))
    assert run.remedies()[cause] == f"{remedy} (train.py:1)"


@pytest.mark.parametrize(
    ("data", "seconds", "words"),
    [
        (
            0.5,
            (0.20, 0.10),
            "199.3 ms ±3% a step with the loader, 99.7 ms ±3% with batches that are",
        ),
        (0.5, (0.20, 0.10), ": 1.90 to 2.11 times as fast"),
        (0.03, (0.48, 0.28), ": not comparable. The loop waited for batches for 3.0% of the time"),
        (0.5, (0.20, 0.20), ": not comparable. The loop waited for batches for 50.0% of the time"),
        (0.03, (0.20, 0.20), ": no difference beyond the spread of the steps"),
    ],
)
def test_ideal_loader_claims_no_more_than_the_loop_waits(
    data: float, seconds: tuple[float, float], words: str
) -> None:
    marks = []
    for mean in seconds:
        now = 0.0
        for step in range(16):
            marks.append((now, 0.0))
            now += mean * (1.05 if step % 2 else 0.95)
    causes = {
        each: CauseReport(fraction=data * (each == "data"), seconds=0, interval=None, speed_up=1)
        for each in CAUSES
    }
    report = StallReport(**stall_of(causes=causes, stall=data))
    run = Run(ideal_marks=marks, ideal_steps=15, replayed=20, report=report)
    assert words in run.ideal_words()
    assert (
        "none was replayed" in Run(ideal_steps=15, ideal_marks=marks, report=report).ideal_words()
    )


def test_page_is_named_only_if_it_was_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with tokenfeed.watch(tmp_path / "good"):
        train()
    assert f"page     {tmp_path / 'good' / 'report.html'}" in capfd.readouterr().err
    with tokenfeed.watch(tmp_path / "bad"):
        train()
        (tmp_path / "bad").write_text("in the way")
    shown = capfd.readouterr().err
    assert "page  " not in shown
    assert f"missing  {tmp_path / 'bad'}: cannot be written (File exists)" in shown
