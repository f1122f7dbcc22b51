"""The micro-batches of an epoch, from the manifest alone: how many there are, and of what shapes.

Rows as long as the manifest counts them are cut, sorted and packed like those of a window.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Self

import numpy as np

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.format.manifest import SplitInfo
from tokenfeed.pipeline.planning.batching import WindowPlan, plan_window
from tokenfeed.pipeline.planning.estimate import likely_lengths
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.trainer.batching import Policy

__all__ = ["EpochShapes"]

_MOST_ROWS = 400_000
"""More are not sampled: as many as a window has."""
_MOST_SHAPES = 8


@dataclass(frozen=True, slots=True)
class EpochShapes:
    """What an epoch has, about."""

    count: float
    """Micro-batches."""
    slots: float
    """Token slots of all of them."""
    tokens: int
    shapes: dict[str, int]
    """Micro-batches by rows x length, the most frequent."""

    @classmethod
    def of_split(cls, split: SplitInfo, policy: Policy, seed: int) -> Self:
        """Those of a split.

        Cost: that of planning a window.
        """
        sampled = min(split.rows, _MOST_ROWS)
        draw = Draw(seed, seed, 0, num_windows=1)
        lengths = likely_lengths(split, sampled)
        plan = plan_window(lengths, policy, step_size=1, draw=draw)
        rows, longest = _shapes(plan, policy)
        times = split.rows / sampled
        found = Counter(zip(rows.tolist(), longest.tolist(), strict=True)).most_common(_MOST_SHAPES)
        return cls(
            count=times * len(rows),
            slots=times * int((rows * longest).sum()),
            tokens=split.tokens,
            shapes={f"{r} x {length}": round(times * n) for (r, length), n in found},
        )


def _shapes(plan: WindowPlan, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Rows and padded length of each micro-batch, shapes (M,)."""
    rows = np.diff(plan.batch_offsets)
    lengths = plan.cut.lengths[plan.pieces]
    longest = np.maximum.reduceat(lengths, plan.batch_piece_offsets[:-1])
    return rows, round_up(longest, policy.multiple_of)
