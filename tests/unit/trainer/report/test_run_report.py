"""report.json while a run goes on: what is measured stays, whatever ends it or fills its disk."""

import dataclasses
import errno
from pathlib import Path

import pytest
from support.training import make_config, run

from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.report import run_report
from tokenfeed.trainer.report.run_report import Report


class Killed(BaseException):
    """Ends a run as a kill does: nothing is finished."""


def test_a_killed_run_leaves_a_report_of_what_it_measured_that_says_it_is_unfinished(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(run_report, "MOST_SHARE", 1e9)
    config = make_config(few_rows, tmp_path / "run", steps=8)
    asked = iter(range(1, 100))

    def kill() -> bool:
        if next(asked) == 7:
            raise Killed
        return False

    with pytest.raises(Killed):
        train(config, bool, kill)
    report = Report.of_run(config.run_dir)
    assert report is not None
    assert not report.finished
    assert report.steps == 6
    assert report.stall.steps == 2
    assert "stopped before the end" in report.summary()


def test_report_after_resume_covers_all_parts(few_rows: Path, tmp_path: Path) -> None:
    config = make_config(few_rows, tmp_path / "run", steps=16, save_every=2)
    first = run(config, stop_after=10)
    second = run(dataclasses.replace(config, resume=True))
    assert (first.parts, second.parts, second.finished) == (1, 2, True)
    assert second.seconds > first.seconds
    assert second.stall.queued_steps == 16
    for cause, part in first.stall.causes.items():
        assert second.stall.causes[cause].seconds >= part.seconds
        assert second.stall.causes[cause].max_s >= part.max_s
    assert second.stall.steps > first.stall.steps > 0
    assert second.stall.tokens > first.stall.tokens
    idle = sum(part.seconds for part in second.stall.causes.values())
    assert second.stall.stall == pytest.approx(idle / second.stall.seconds)
    assert " in 2 parts" in second.summary()


def test_the_last_line_of_a_run_leaves_no_report_that_says_it_is_finished(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(run_report, "MOST_SHARE", 1e9)
    seen: list[tuple[int, bool]] = []
    write = Report.write

    def noted(report: Report, run_dir: Path) -> None:
        seen.append((report.steps, report.finished))
        write(report, run_dir)

    monkeypatch.setattr(Report, "write", noted)
    run(make_config(few_rows, tmp_path / "run", steps=2))
    assert seen == [(1, False), (2, False), (2, True)]


def test_drafts_are_rare_and_a_full_disk_stops_none_but_is_said_once(
    few_rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = run(make_config(few_rows, tmp_path / "run", steps=1))
    written: list[float] = []
    now = [100.0]

    def full(report: Report, run_dir: Path) -> None:
        written.append(now[0])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Report, "write", full)
    monkeypatch.setattr(run_report.time, "perf_counter", lambda: now[0])
    drafts = run_report.InterimReports(tmp_path, lambda: report)
    for _ in range(100):
        drafts.write()
        now[0] += 1.0
    assert written == [100.0, 130.0, 160.0, 190.0]
    assert [record.message for record in caplog.records].count(
        "report.json cannot be written, training goes on: [Errno 28] No space left on device"
    ) == 1
