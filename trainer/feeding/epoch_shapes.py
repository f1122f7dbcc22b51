"""The steps and micro-batches of an epoch, estimated from the manifest alone.

Draws rows with the lengths in the manifest, then cuts, sorts and packs them as one window. Imports
no torch.
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
"""Rows to sample at most."""
_MOST_SHAPES = 8


@dataclass(frozen=True, slots=True)
class EpochShapes:
    """Estimated figures of an epoch."""

    steps: float
    """Optimizer steps. The last one of a window may have fewer micro-batches than the others."""
    slots: float
    """Token slots of all micro-batches."""
    tokens: float
    """Real tokens. Truncated rows lose some."""
    shapes: dict[str, int]
    """Number of micro-batches by shape, such as "8 x 256" for 8 rows of 256 slots. Only the most
    frequent shapes."""

    @classmethod
    def of_split(cls, split: SplitInfo, policy: Policy, seed: int, step_size: int) -> Self:
        """Estimate an epoch of a split, with `step_size` micro-batches per step.

        Cost: as much as planning a window.
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
    """Return rows and padded length of each micro-batch, two arrays of shape (M,)."""
    rows = np.diff(plan.batch_offsets)
    lengths = plan.cut.lengths[plan.pieces]
    longest = np.maximum.reduceat(lengths, plan.batch_piece_offsets[:-1])
    return rows, round_up(longest, policy.multiple_of)
