"""--profile A:B at the borders of a run, and over a stop and a resume."""

import gzip
import json
import logging
from pathlib import Path

import pytest
from support.training import make_config, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.report.run_files import Report


def traced_steps(run_dir: Path, name: str) -> int:
    """Number of optimizer steps in a trace."""
    events = json.loads(gzip.decompress((run_dir / name).read_bytes()))["traceEvents"]
    return sum(event["name"].startswith("Optimizer.step#") for event in events)


@pytest.mark.parametrize(("steps", "count"), [("1:1", 1), ("3:8", 6), ("8:8", 1)])
def test_profile_traces_its_steps_at_the_borders_of_a_run(
    steps: str, count: int, lm_rows: Path, tmp_path: Path
) -> None:
    report = run(make_config(lm_rows, tmp_path / "run", profile=steps))
    assert report.trace == f"trace-{steps.replace(':', '-')}.json.gz"
    assert traced_steps(tmp_path / "run", report.trace) == count


def test_profile_of_a_resumed_run_traces_what_is_left(
    lm_rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make_config(lm_rows, tmp_path / "run"), stop_after=4)
    assert Report.of_run(tmp_path / "run").trace is None  # type: ignore[union-attr]
    report = run(make_config(lm_rows, tmp_path / "run", resume=True, profile="3:6"))
    assert report.trace == "trace-3-6.json.gz"
    assert traced_steps(tmp_path / "run", report.trace) == 2
    caplog.set_level(logging.WARNING)
    longer = {"resume": True, "steps": 9}
    run(make_config(lm_rows, tmp_path / "run", profile="3:6", **longer))
    assert "--profile 3:6: these steps are trained already: no trace" in caplog.text


def test_stopped_run_keeps_the_trace_of_its_steps(lm_rows: Path, tmp_path: Path) -> None:
    report = run(make_config(lm_rows, tmp_path / "run", profile="2:8"), stop_after=4)
    assert report.trace == "trace-2-8.json.gz"
    assert traced_steps(tmp_path / "run", report.trace) == 3


@pytest.mark.parametrize("steps", ["0:3", "5:3", "x", "5:99", ":", "1:2:3", "-1:2", "٣:٤"])
def test_profile_of_other_steps_is_one_error(steps: str, lm_rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--profile`=.*expected steps A:B from 1 to --steps=8"):
        run(make_config(lm_rows, tmp_path / "run", profile=steps))
