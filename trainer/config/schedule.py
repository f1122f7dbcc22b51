"""The learning rate at each step: a pure function of the step.

A checkpoint does not save the rate. If a resumed run has a higher --steps, its rates are those of a
run that had these --steps from the start. For `constant`, and for `wsd` before its decay, the rates
of the steps already trained are the same too.
"""

import math

from tokenfeed.trainer.config.run_config import ScheduleName

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
