"""report.json while a run goes on: what is measured stays, whatever ends it or fills its disk."""

from pathlib import Path

import pytest
from support.training import make_config, read_metrics

from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.report.run_files import Report


class Killed(BaseException):
    """Ends a run as a kill does: nothing is finished."""


def test_a_killed_run_leaves_a_report_of_what_it_measured_that_says_it_is_unfinished(
    few_rows: Path, tmp_path: Path
) -> None:
    config = make_config(few_rows, tmp_path / "run", steps=8, save_every=2)
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
    assert report.loss_last == read_metrics(config.run_dir, "loss")[6]
    assert report.stall.steps == 2
    assert "stopped before the end" in report.summary()
