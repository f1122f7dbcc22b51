"""Trace some steps with torch.profiler, to profile/trace.json of the run, for perfetto.dev."""

import logging
from pathlib import Path

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import TrainConfig

_log = logging.getLogger(__name__)


def check_profile(config: TrainConfig) -> None:
    """Refuse to trace steps that the run does not have.

    Raises:
        ConfigError: The first step to trace comes after the last step of the run.
    """
    steps = config.profiled_steps
    if steps and steps[0] > config.steps:
        raise ConfigError(
            f"`--profile`={config.profile}: the run has {config.steps:,} steps. "
            f"Give steps from 1 to {config.steps}."
        )


class StepTracer:
    """Traces steps while they run. Costs nothing before the first and after the last step.

    Args:
        steps: Consecutive steps to trace.
        folder: Receives trace.json. It is created when the trace is written.
    """

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._profile: torch.profiler.profile | None = None

    def after(self, step: int) -> None:
        """Start, continue or end the trace, as the next step needs."""
        if self._profile is not None:
            if step + 1 in self._steps:
                self._profile.step()
            else:
                self.close()
        elif step + 1 in self._steps:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def close(self) -> None:
        """Write the trace, if there is one."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "trace.json"
        profile.export_chrome_trace(str(path))
        _log.info("traced steps %d to %d: %s", self._steps[0], self._steps[-1], path)
