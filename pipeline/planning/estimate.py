"""About how many batches there are, from the manifests alone.

A manifest counts its rows by powers of two of their length. Rows that fit these counts and the sum
of the tokens are made up for one window, and that window is planned like any other: so cutting,
sorting, packing, steps and ranks come in as they will, and nothing is said twice. Torch-free.
"""

import numpy as np

from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.manifest import SplitInfo
from tokenfeed.pipeline.planning.batching import plan_window
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.rounds import deal_rounds

__all__ = ["estimate_rounds", "likely_lengths"]


def estimate_rounds(plan: Plan, sources: tuple[OpenedSplit, ...], world_size: int) -> int:
    """About how many rounds an epoch has: micro-batches that each rank gets.

    Cost: that of planning one window.
    """
    lengths = _window_lengths(plan, sources)
    draw = plan.order.draw(0, 0)  # bands pad, and so decide how many micro-batches there are
    window = plan_window(lengths, plan.batching, step_size=plan.micro_batches_per_step, draw=draw)
    rounds = deal_rounds(
        window.step_offsets, plan.micro_batches_per_step, first=0, rank=0, world_size=world_size
    )
    return len(rounds.starts) * plan.num_windows


def likely_lengths(split: SplitInfo, count: int) -> np.ndarray:
    """So many rows as a split may have, its longest row and its histogram as they are.

    Within a bin a row's length is lo + (hi - lo) * u**p, with u even between 0 and 1, and with the
    one p for all bins that gives the tokens of the split.

    Returns:
        Ascending, shape (count,), int64.
    """
    bins = np.flatnonzero(split.length_histogram)
    rows = np.array(split.length_histogram)[bins]
    low = 1 << bins
    high = np.minimum(2 * low - 1, split.longest_row)
    spread = int((rows * (high - low)).sum())
    share = (split.tokens - int((rows * low).sum())) / spread if spread else 0.5
    power = 1 / min(max(share, 1e-6), 1.0) - 1
    place = (np.arange(count) + 0.5) * (split.rows / count)
    ends = np.cumsum(rows)
    of_bin = np.searchsorted(ends, place, side="right")
    within = (place - (ends - rows)[of_bin]) / rows[of_bin]
    above = np.rint((high - low)[of_bin] * within**power)
    lengths: np.ndarray = low[of_bin] + above.astype(np.int64)
    return lengths


def _window_lengths(plan: Plan, sources: tuple[OpenedSplit, ...]) -> np.ndarray:
    """Rows of a window of average size, from every source as many as an epoch reads of it."""
    read = zip(sources, plan.order.batches_read, strict=True)
    counts = [
        max(1, round(source.rows * batches / source.batches / plan.order.num_windows))
        for source, batches in read
    ]
    parts = [likely_lengths(s.split, count) for s, count in zip(sources, counts, strict=True)]
    return np.concatenate(parts)
