"""Where in its phases a run stands: what trains now, and the loader of its data."""

import logging

from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.feeds import Feeds
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.phases import phase_at, phases_of

__all__ = ["Course"]

_log = logging.getLogger(__name__)


class Course:
    """Leads a learner through the phases of a run."""

    def __init__(self, config: TrainConfig, feeds: Feeds, learner: Learner) -> None:
        """Stand before the first step."""
        self._config, self._feeds, self._learner = config, feeds, learner
        self._phases = phases_of(config)
        self.phase = self._phases[0]
        self.loader = feeds.training(self.phase, goes_on=bool(config.resume))
        """That of the phase."""

    def ends_before(self, step: int) -> bool:
        """Whether a step is behind the phase."""
        return step > self.phase.last

    def enter(self, step: int, *, goes_on: bool = False) -> None:
        """Go to the phase of a step. Other data begins anew, unless the run goes on there: then a
        saved state will be loaded."""
        before, self.phase = self.phase, phase_at(self._phases, step)
        if self.phase.changes != before.changes:
            self.loader.close()
            self.loader = self._feeds.training(self.phase, goes_on=goes_on)
        self._learner.begin_phase(self.phase)
        self.tell()

    def tell(self) -> None:
        """Say what trains, where that is not everything from the first step to the last."""
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

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()
