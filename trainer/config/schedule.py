"""The phases of a run, and the learning rate at each step: pure functions of the step.

Phases are parts of the run's steps, each with its own weights to train and rate. Steps are
counted through all phases. A run without phases has one phase. A checkpoint saves neither the phase
nor the rate. If a resumed run has a higher --steps, its rates are those of a run that had these
--steps from the start. For `constant`, and for `wsd` before its decay, the rates of the steps
already trained are the same too.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenfeed.trainer.config.run_config import ScheduleName, TrainConfig

_END = 0.1
"""Last rate of `cosine` and `linear` as a share of the peak, unless another one is given."""
_WSD_DECAY = 0.2
"""Share of all steps in which `wsd` decays. A longer decay gains next to nothing."""


def learning_rate(
    step: int,
    *,
    schedule: ScheduleName,
    peak: float,
    steps: int,
    warmup_steps: int,
    least: float | None = None,
) -> float:
    """Return the learning rate of a step: linear warm-up to the peak, then the schedule.

    `cosine` and `linear` fall to the least rate, which the last step has. `wsd` (warm-up, stable,
    decay) stays at the peak until the last fifth of all steps. There it falls as 1 - √x, and would
    reach the least rate one step after the last. `constant` stays at the peak.

    Example: `wsd` with steps=100, warmup_steps=10: 0.1, 0.2, ... of the peak up to step 10, the
        peak up to step 80, then 1 - √(1/21) = 0.78 of it at step 81 and 1 - √(20/21) = 0.02 at step
        100.

    Args:
        step: The step, counted from 1.
        schedule: The schedule after the warm-up.
        peak: The largest rate.
        steps: The last step.
        warmup_steps: The step that reaches the peak; 0 starts at the peak.
        least: The rate to fall to. Default: a tenth of the peak; 0 for `wsd`.
    """
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    start, default = warmup_steps, _END
    if schedule == "wsd":
        start, default = max(warmup_steps, steps - math.ceil(_WSD_DECAY * steps)), 0.0
    if step <= start or schedule == "constant":
        return peak
    done, of = step - start, steps - start
    if schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done / of))
    elif schedule == "linear":
        left = 1 - done / of
    else:
        left = 1 - math.sqrt(done / (of + 1))
    end = default if least is None else least / peak
    return peak * (end + (1 - end) * left)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run."""

    number: int
    """The phase's number, counted from 1."""
    before: int
    """Steps of all earlier phases."""
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
    parts = config.phase_configs
    ends = itertools.accumulate((part.steps for part in parts), initial=0)
    return tuple(Phase(n, *of) for n, of in enumerate(zip(ends, parts, strict=False), 1))


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase of a step. A step after the run's end is in the last phase."""
    return next((phase for phase in phases if step <= phase.last), phases[-1])
