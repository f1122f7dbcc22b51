"""torch.profiler around a run: `docs/how/settings.md` shows this."""

import json
from pathlib import Path

import torch
from support.training import make_config

from tokenfeed.trainer.loop.run import train


def test_a_profiler_traces_the_steps_of_its_schedule(lm_rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as profiler:
        train(make_config(lm_rows, tmp_path / "run"), bool, lambda: bool(profiler.step()))
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"].startswith("Optimizer.step#") for event in events) == 3
