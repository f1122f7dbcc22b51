"""The phases of a run: parts of its steps, each with weights, a rate and data of its own.

Steps are counted through. A phase is a function of the step, so nothing of it is saved: a run that
goes on knows from its step in which phase it is. A run without phases is one phase.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenfeed.trainer.config.lr_schedule import learning_rate
from tokenfeed.trainer.config.run_config import TrainConfig

__all__ = ["Phase", "phase_at", "phases_of"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run."""

    number: int
    """From 1."""
    before: int
    """Steps of the phases before."""
    changes: int
    """How often the data was another one than in the phase before, up to this one."""
    config: TrainConfig
    """The run's settings with those of the phase over them; `steps` are its own alone."""

    @property
    def last(self) -> int:
        """Its last step, counted from the run's first."""
        return self.before + self.config.steps

    def rate(self, step: int) -> float:
        """The learning rate of one of its steps, counted from the run's first."""
        config = self.config
        return learning_rate(
            step - self.before,
            schedule=config.schedule,
            peak=config.learning_rate,
            steps=config.steps,
            warmup_steps=config.warmup_steps,
        )


def phases_of(config: TrainConfig) -> tuple[Phase, ...]:
    """Those of a run, in their order."""
    phases: list[Phase] = []
    before, changes, shards = 0, 0, config.stages[0].shards
    for number, stage in enumerate(config.stages, 1):
        changes += stage.shards != shards
        phases.append(Phase(number, before, changes, stage))
        before, shards = before + stage.steps, stage.shards
    return tuple(phases)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The one that a step is in; of a step behind all, the last."""
    return next((phase for phase in phases if step <= phase.last), phases[-1])
