"""The learning rate: a pure function of the step.

Nothing to save, nothing to load, nothing that can drift from the step count. A run whose `steps`
are raised goes on as if it had had them from the start; under `wsd`, before its decay, and under
`constant` it has: a longer run's rates are the same.
"""

import math
from collections.abc import Callable

from tokenfeed.trainer.config.run_config import ScheduleName

__all__ = ["learning_rate", "rate_factor"]

_END = 0.1
_WSD_DECAY = 0.2
"""The share of all steps in which `wsd` decays: more gains next to nothing."""


def learning_rate(
    step: int, *, schedule: ScheduleName, peak: float, steps: int, warmup_steps: int
) -> float:
    """Linear warm-up to the peak, then the schedule; above 0 at every step.

    `cosine` and `linear` fall to a tenth of the peak. `wsd` (warm-up, stable, decay) stays at the
    peak until the last fifth of all steps, where it falls as 1 - √x does, towards the zero that one
    more step would reach. `constant` stays at the peak.

    Args:
        step: Counts from 1.
        schedule: What follows the warm-up.
        peak: The largest rate.
        steps: The last step.
        warmup_steps: The step that reaches the peak; 0 starts there.
    """
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    start = _decay_start(schedule, steps, warmup_steps)
    return peak * _DECAYS[schedule](step - start, steps - start) if step > start else peak


def rate_factor(step_tokens: int, reference_tokens: int) -> float:
    """What a rate found with steps of `reference_tokens` is multiplied by for others.

    The root of the ratio, which suits optimizers that divide by the gradient's size, as AdamW and
    Muon do.
    """
    return math.sqrt(step_tokens / reference_tokens)


def _decay_start(schedule: ScheduleName, steps: int, warmup_steps: int) -> int:
    """The last step at the peak."""
    if schedule != "wsd":
        return warmup_steps
    return max(warmup_steps, steps - math.ceil(_WSD_DECAY * steps))


def _cosine(done: int, steps: int) -> float:
    return _END + (1 - _END) * 0.5 * (1 + math.cos(math.pi * done / steps))


def _linear(done: int, steps: int) -> float:
    return _END + (1 - _END) * (1 - done / steps)


def _square_root(done: int, steps: int) -> float:
    return 1 - math.sqrt(done / (steps + 1))


def _constant(done: int, steps: int) -> float:
    return 1.0


_DECAYS: dict[ScheduleName, Callable[[int, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _square_root,
    "constant": _constant,
}
"""Share of the peak after so many of the steps that decay."""
