"""`--profile A:B`: a trace of these steps, and of no others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import make_config, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import TrainConfig


def optimizer_steps(run_dir: Path) -> int:
    trace = json.loads((run_dir / "profile" / "trace.json").read_text())
    return sum(event["name"].startswith("Optimizer.step#") for event in trace["traceEvents"])


@pytest.mark.parametrize(
    ("span", "stop_after", "traced"),
    [("1:3", None, 3), ("6:90", None, 3), ("2:7", 4, 3)],
)
def test_these_steps_are_traced_as_far_as_the_run_goes(
    span: str,
    stop_after: int | None,
    traced: int,
    lm_rows: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    run(make_config(lm_rows, tmp_path, profile=span), stop_after=stop_after)
    assert optimizer_steps(tmp_path) == traced
    first = int(span.split(":")[0])
    assert f"traced steps {first} to {first + traced - 1}: " in caplog.text


def test_a_run_that_goes_on_within_the_steps_traces_the_rest(lm_rows: Path, tmp_path: Path) -> None:
    run(make_config(lm_rows, tmp_path), stop_after=3)
    run(make_config(lm_rows, tmp_path, profile="2:5", resume=True))
    assert optimizer_steps(tmp_path) == 2


@pytest.mark.parametrize("span", [None, "2:3"])
def test_steps_that_are_trained_already_are_not_traced(
    span: str | None, lm_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "profile", None)
    run(make_config(lm_rows, tmp_path), stop_after=3)
    run(make_config(lm_rows, tmp_path, profile=span, resume=True))
    assert not (tmp_path / "profile").exists()


def test_steps_behind_the_last_are_refused_before_the_folder_is_made(
    lm_rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"`--profile`=9:12: the run has 8 steps\. Give steps from"
    ):
        run(make_config(lm_rows, tmp_path / "run", profile="9:12"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("span", ["3", "3:2", "0:4", "1:101", "a:b", "-1:2", ":", "2:3:4"])
def test_what_are_no_steps_is_refused(span: str) -> None:
    config: Any = TrainConfig(shards="out", profile=span)
    with pytest.raises(ConfigError, match=f"`--profile`={span}: expected the first and last of"):
        config.check()
