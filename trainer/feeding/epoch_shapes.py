"""The steps and micro-batches of an epoch, estimated from the manifest alone.

Rows as long as the manifest counts them are cut, sorted and packed like those of a window.
Torch-free.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Self

import numpy as np

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.format.manifest import SplitInfo
from tokenfeed.pipeline.planning.batching import WindowPlan, plan_window
from tokenfeed.pipeline.planning.estimates import likely_lengths
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.trainer.feeding.batch_policy import Policy

__all__ = ["EpochShapes"]

_MOST_ROWS = 100_000
"""More are not sampled."""
_MOST_SHAPES = 8


@dataclass(frozen=True, slots=True)
class EpochShapes:
    """What an epoch has, about."""

    steps: float
    """Optimizer steps. The last one of a window may have fewer micro-batches than the others."""
    slots: float
    """Token slots of all micro-batches."""
    tokens: float
    """Real tokens; truncated rows lose some."""
    shapes: dict[str, int]
    """Micro-batches by rows x length, the most frequent."""

    @classmethod
    def of_split(cls, split: SplitInfo, policy: Policy, seed: int, step_size: int) -> Self:
        """The epoch of a split, in steps of `step_size` micro-batches.

        Cost: that of planning a window.
        """
        sampled = min(split.rows, _MOST_ROWS)
        draw = Draw(seed, seed, 0, num_windows=1)
        lengths = likely_lengths(split, sampled)
        plan = plan_window(lengths, policy, step_size=step_size, draw=draw)
        rows, longest = _shapes(plan, policy)
        times = split.rows / sampled
        found = Counter(zip(rows.tolist(), longest.tolist(), strict=True)).most_common(_MOST_SHAPES)
        return cls(
            steps=times * (len(plan.step_offsets) - 1),
            slots=times * int((rows * longest).sum()),
            tokens=split.tokens * int(plan.cut.lengths[plan.pieces].sum()) / int(lengths.sum()),
            shapes={f"{r} x {length}": round(times * n) for (r, length), n in found},
        )


def _shapes(plan: WindowPlan, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Rows and padded length of each micro-batch, shapes (M,)."""
    rows = np.diff(plan.batch_offsets)
    lengths = plan.cut.lengths[plan.pieces]
    longest = np.maximum.reduceat(lengths, plan.batch_piece_offsets[:-1])
    return rows, round_up(longest, policy.multiple_of)
