"""Trace some steps of a run with torch.profiler, into a file that perfetto opens."""

import logging
from pathlib import Path

from torch.profiler import ProfilerAction, profile

from tokenfeed.trainer.config.run_config import TrainConfig

_log = logging.getLogger(__name__)


def open_profiler(config: TrainConfig, done: int) -> profile | None:
    """Return a profiler for the steps of --profile; None without steps to trace.

    Its `step` must be called after each step. Between the traced steps it does nothing.

    Args:
        config: The settings of the run.
        done: Steps that are trained already.
    """
    if config.profiled is None:
        return None
    first, last = config.profiled
    if done >= last:
        _log.warning("--profile %s: these steps are trained already: no trace", config.profile)
        return None

    def action(number: int) -> ProfilerAction:
        step = done + 1 + number
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        if first <= step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == first - 1 else ProfilerAction.NONE

    def write(found: profile) -> None:
        path = config.run_dir / f"trace-{first}-{last}.json.gz"
        part = path.with_name(".trace.json.gz")
        try:
            found.export_chrome_trace(str(part))
            part.replace(path)
        except OSError as error:
            _log.warning("--profile: %s was not written: %s", path, error.strerror)
        else:
            _log.info("trace: %s, open it at https://ui.perfetto.dev", path)

    return profile(schedule=action, on_trace_ready=write)


def trace_of(run_dir: Path) -> str | None:
    """Return the name of the latest trace in the folder of a run; None without one."""
    found = max(
        run_dir.glob("trace-*.json.gz"), key=lambda path: path.stat().st_mtime, default=None
    )
    return found.name if found else None
