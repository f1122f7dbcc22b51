"""The phases of a run in training: open the loader of each phase, and train its weights."""

import logging
from collections.abc import Iterator
from typing import Any

from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.trainer.config.phases import phase_at, phases_of
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.feeding.loaders import SplitLoaders, StepBatch, step_feed
from tokenfeed.trainer.optim.train_state import Learner

__all__ = ["Curriculum"]

_log = logging.getLogger(__name__)


class Curriculum:
    """Leads the training through the phases of a run."""

    _loader: ShardLoader
    _feed: Iterator[StepBatch] | None

    def __init__(self, config: TrainConfig, loaders: SplitLoaders, learner: Learner) -> None:
        """Open the loader of the first phase.

        Args:
            config: Settings of the run.
            loaders: Opens the loader of each phase.
            learner: The model and optimizer. It trains the weights that each phase selects.
        """
        self._config, self._loaders, self._learner = config, loaders, learner
        self._phases = phases_of(config)
        self.phase = self._phases[0]
        self._open(goes_on=bool(config.resume))

    @property
    def feed(self) -> Iterator[StepBatch]:
        """The loader's batches. After the first use, the loader accepts no saved state."""
        if self._feed is None:
            self._feed = step_feed(self._loader, self.phase.config.accumulation)
        return self._feed

    def config_at(self, step: int) -> TrainConfig:
        """Return the settings of a step's phase."""
        return phase_at(self._phases, step).config

    def ends_before(self, step: int) -> bool:
        """Return whether a step is after the current phase."""
        return step > self.phase.last

    def enter(self, step: int, *, goes_on: bool = False) -> None:
        """Enter the phase of a step.

        If the data changes, they are read from their beginning.

        Args:
            step: The next step.
            goes_on: Whether the caller will load a saved state of the loader.
        """
        before, self.phase = self.phase, phase_at(self._phases, step)
        if self.phase.changes != before.changes:
            self.close()
            self._open(goes_on=goes_on)
        self._learner.begin_phase(self.phase)
        self.log_phase()

    def log_phase(self) -> None:
        """Log what is trained, if there are phases or frozen weights."""
        if not self._config.phases and not self._config.chooses:
            return
        _log.info(
            "phase %d of %d, until step %d: trains %s of %s parameters",
            self.phase.number,
            len(self._phases),
            self.phase.last,
            f"{self._learner.trained_parameters[self.phase.number - 1]:,}",
            f"{sum(weight.numel() for weight in self._learner.model.parameters()):,}",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, in the same phase."""
        self._loader.load_state_dict(state)

    @property
    def remote(self) -> RemoteStats | None:
        """What the phase's data took from stores; None if the data are local."""
        return self._loader.stats().remote

    def close(self) -> None:
        """End the loader's workers."""
        self._loader.close()

    def _open(self, *, goes_on: bool) -> None:
        self._feed = None
        self._loader = self._loaders.train_loader(self.phase, goes_on=goes_on)
