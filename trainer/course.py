"""Where in its phases a run stands: what trains now, and whose turn a step is."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property, reduce
from typing import Any

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.pipeline.planning.turns import Turns
from tokenfeed.trainer.by_task import shards_by_task, shares_by_task
from tokenfeed.trainer.config import Shards, TrainConfig
from tokenfeed.trainer.feeds import Feeds
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.phases import Phase, phase_at, phases_of
from tokenfeed.trainer.step_feed import Dealt, step_feed

__all__ = ["Course", "Lesson"]

_log = logging.getLogger(__name__)


class Lesson:
    """What steps of one task are made of, while a phase lasts."""

    def __init__(self, name: str, feeds: Feeds, phase: Phase, *, goes_on: bool) -> None:
        self.name, self.config = name, phase.config
        self.shape = feeds.shape
        self.loader = feeds.training(phase, goes_on=goes_on)

    @cached_property
    def feed(self) -> Iterator[Dealt]:
        """The loader's batches; to be asked for once its state is loaded."""
        return step_feed(self.loader, self.config.accumulation)


class Course:
    """Leads a learner through the phases of a run, and through its tasks from step to step."""

    def __init__(self, config: TrainConfig, feeds: Mapping[str, Feeds], learner: Learner) -> None:
        """Stand before the first step.

        Args:
            config: Of the run.
            feeds: Of each task, by its name.
            learner: Is told of every phase.

        Raises:
            ConfigError: A phase has a task of which it trains nothing.
        """
        self._config, self._feeds, self._learner = config, feeds, learner
        self._phases = phases_of(config)
        self.phase = self._phases[0]
        for phase in self._phases:
            learner.check_trains(phase, shares_by_task(phase.config.shards, config.shards))
        self._open(goes_on=bool(config.resume))

    def lesson(self, step: int) -> Lesson:
        """The one that a step of this phase has: a function of the step alone."""
        return self._lessons[self._turns.whose(step)]

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
        self.tell()

    def tell(self) -> None:
        """Say what trains, where that is not everything from the first step to the last."""
        if len(self._feeds) > 1:
            _log.info("steps: %s", self._shown_shares())
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
        """That of the loader; of several tasks by their names."""
        states = {lesson.name: lesson.loader.state_dict() for lesson in self._lessons}
        return states.get("", states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, in the same phase.

        Raises:
            ResumeError: It is of other tasks.
        """
        names = [lesson.name for lesson in self._lessons]
        states = {"": state} if names == [""] else state
        if states.keys() != set(names):
            raise ResumeError(
                f"cannot resume: the checkpoint's data is of the tasks {', '.join(states)}, this "
                f"phase's of {', '.join(names)}. Leave the phase that was begun as it was."
            )
        for lesson in self._lessons:
            lesson.loader.load_state_dict(states[lesson.name])

    @property
    def remote(self) -> RemoteStats | None:
        """What the phase's data took of stores; None where they are local."""
        found = (lesson.loader.stats().remote for lesson in self._lessons)
        known = [stats for stats in found if stats is not None]
        return reduce(RemoteStats.with_another, known) if known else None

    def close(self) -> None:
        """End the loaders' workers."""
        for lesson in self._lessons:
            lesson.loader.close()

    def _open(self, *, goes_on: bool) -> None:
        shards, run = self.phase.config.shards, self._config.shards
        self._shares = shares_by_task(shards, run)
        self._turns = Turns([*self._shares.values()], self._config.seed)
        self._lessons = [
            Lesson(name, self._feeds[name], self._phase_on(own), goes_on=goes_on)
            for name, own in shards_by_task(shards, run).items()
        ]

    def _phase_on(self, shards: Shards) -> Phase:
        return dataclasses.replace(
            self.phase, config=dataclasses.replace(self.phase.config, shards=shards)
        )

    def _shown_shares(self) -> str:
        return ", ".join(f"{name} {share:.1%}" for name, share in self._shares.items())
