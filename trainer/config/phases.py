"""The phases of a run: parts of its steps, each with its own weights to train, rate and data.

Steps are counted through all phases. The phase follows from the step, so a checkpoint does not save
it. A run without phases has one phase.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenfeed.trainer.config.lr_schedule import learning_rate
from tokenfeed.trainer.config.run_config import TrainConfig

__all__ = ["Phase", "phase_at", "phases_of"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run."""

    number: int
    """The phase's number, counted from 1."""
    before: int
    """Steps of all earlier phases."""
    changes: int
    """How often the data changed between phases, up to this one."""
    config: TrainConfig
    """The run's settings, overridden by those of the phase. `steps` counts this phase alone."""

    @property
    def last(self) -> int:
        """The phase's last step, counted from the run's first."""
        return self.before + self.config.steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from the run's first."""
        config = self.config
        return learning_rate(
            step - self.before,
            schedule=config.schedule,
            peak=config.learning_rate,
            steps=config.steps,
            warmup_steps=config.warmup_steps,
            least=config.min_learning_rate,
        )


def phases_of(config: TrainConfig) -> tuple[Phase, ...]:
    """Return the run's phases, in order."""
    phases: list[Phase] = []
    before, changes, shards = 0, 0, config.stages[0].shards
    for number, stage in enumerate(config.stages, 1):
        changes += stage.shards != shards
        phases.append(Phase(number, before, changes, stage))
        before, shards = before + stage.steps, stage.shards
    return tuple(phases)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of a step. A step after the run's end is in the last phase."""
    return next((phase for phase in phases if step <= phase.last), phases[-1])
