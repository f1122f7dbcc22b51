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


@pytest.mark.parametrize("steps", ["0:3", "5:3", "x", "5:99", ":", "1:2:3", "-1:2", "٣:٤"])
def test_profile_of_other_steps_is_one_error(steps: str, lm_rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`--profile`=.*expected steps A:B from 1 to --steps=8"):
        run(make_config(lm_rows, tmp_path / "run", profile=steps))
