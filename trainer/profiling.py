"""A trace of some steps, by torch.profiler: profile/trace.json of a run, for perfetto.dev."""

import logging
from pathlib import Path

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config import TrainConfig

__all__ = ["StepTracer", "check_profile"]

_log = logging.getLogger(__name__)


def check_profile(config: TrainConfig) -> None:
    """Refuse to trace what the run does not have.

    Raises:
        ConfigError: The first step to trace is behind the last of all.
    """
    steps = config.profiled_steps
    if steps and steps[0] > config.steps:
        raise ConfigError(
            f"`--profile`={config.profile}: the run has {config.steps:,} steps. Give some of them."
        )


class StepTracer:
    """Traces steps while they run; costs nothing before the first and after the last.

    Args:
        steps: Which; neighbours.
        folder: Gets trace.json; it is made when the trace is written.
    """

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._profile: torch.profiler.profile | None = None

    def after(self, step: int) -> None:
        """Begin or end, or go on, where the next step says so."""
        if self._profile is not None:
            if step + 1 in self._steps:
                self._profile.step()
            else:
                self.close()
        elif step + 1 in self._steps:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def close(self) -> None:
        """Write what was traced, if anything was."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "trace.json"
        profile.export_chrome_trace(str(path))
        _log.info("traced steps %d to %d: %s", self._steps[0], self._steps[-1], path)
