"""Where in its phases a run stands: what trains now, and which loader feeds it."""

import logging
from collections.abc import Iterator
from typing import Any

from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.trainer.config.phases import phase_at, phases_of
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.feeding.loaders import Dealt, Feeds, step_feed
from tokenfeed.trainer.optim.train_state import Learner

__all__ = ["Course"]

_log = logging.getLogger(__name__)


class Course:
    """Lead a learner through the phases of a run."""

    _loader: ShardLoader
    _feed: Iterator[Dealt] | None

    def __init__(self, config: TrainConfig, feeds: Feeds, learner: Learner) -> None:
        """Open the loader of the first phase.

        Args:
            config: Settings of the run.
            feeds: Opens the loader of each phase.
            learner: Trains the weights that each phase chooses.
        """
        self._config, self._feeds, self._learner = config, feeds, learner
        self._phases = phases_of(config)
        self.phase = self._phases[0]
        self._open(goes_on=bool(config.resume))

    @property
    def feed(self) -> Iterator[Dealt]:
        """The loader's batches. The loader takes no other state once this was asked for."""
        if self._feed is None:
            self._feed = step_feed(self._loader, self.phase.config.accumulation)
        return self._feed

    def config_at(self, step: int) -> TrainConfig:
        """The settings of the phase of a step."""
        return phase_at(self._phases, step).config

    def ends_before(self, step: int) -> bool:
        """Whether a step is behind the phase."""
        return step > self.phase.last

    def enter(self, step: int, *, goes_on: bool = False) -> None:
        """Go to the phase of a step. Other data begins anew, unless the run goes on there: then a
        saved state will be loaded."""
        before, self.phase = self.phase, phase_at(self._phases, step)
        if self.phase.changes != before.changes:
            self.close()
            self._open(goes_on=goes_on)
        self._learner.begin_phase(self.phase)
        self.log_phase()

    def log_phase(self) -> None:
        """Log what trains, unless that is everything from the first step to the last."""
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
        """The loader's state."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, in the same phase."""
        self._loader.load_state_dict(state)

    @property
    def remote(self) -> RemoteStats | None:
        """What the phase's data took of stores; None where they are local."""
        return self._loader.stats().remote

    def close(self) -> None:
        """End the loader's workers."""
        self._loader.close()

    def _open(self, *, goes_on: bool) -> None:
        self._feed = None
        self._loader = self._feeds.training(self.phase, goes_on=goes_on)
