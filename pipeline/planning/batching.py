"""Plan the micro-batches of a window from its row lengths: pure functions.

    rows -> pieces           a row longer than a micro-batch is cut, never dropped
    pieces -> sequences      one piece each (padded), or several (packed)
    sequences -> steps       as many as fill `step_size` micro-batches; see the policies
    step -> micro-batches    dealt in turn: sequence j to micro-batch j % step_size

So the micro-batches of a step differ by at most one sequence. With one row per sequence (Padded,
Fixed), their tokens differ by at most one row. Packed micro-batches have equally many slots, with
more or less padding. So ranks that take them at the same time have equal work. Two steps of 5 and 3
sequences, with 2 micro-batches per step:

    sequences        0 1 2 3 4 | 5 6 7
    micro-batches    0 2 4   1 3 | 5 7   6

The last step of a window may have fewer sequences, and fewer micro-batches if there are too few
sequences. Ranks do not matter here: `rounds` deals micro-batches to ranks. Every result depends on
the arguments only. Torch-free.
"""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.pipeline.planning.pieces import Pieces, regroup
from tokenfeed.pipeline.planning.policy import Batching

__all__ = ["WindowPlan", "plan_window"]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """All micro-batches of a window."""

    cut: Pieces
    """The pieces of the rows."""
    pieces: np.ndarray
    """All pieces in the order of delivery, shape (P,), int64."""
    sequence_offsets: np.ndarray | None
    """Where each sequence begins in `pieces`, shape (S + 1,), int64; None: every piece is a
    sequence."""
    batch_offsets: np.ndarray
    """Where each micro-batch begins among the sequences, shape (M + 1,), int64."""
    step_offsets: np.ndarray
    """Where each step begins among the micro-batches, shape (steps + 1,), int64."""

    @property
    def batch_piece_offsets(self) -> np.ndarray:
        """Where each micro-batch begins in `pieces`, shape (M + 1,), int64."""
        if self.sequence_offsets is None:
            return self.batch_offsets
        starts: np.ndarray = self.sequence_offsets[self.batch_offsets]
        return starts


def plan_window(
    lengths: np.ndarray,
    batching: Batching,
    *,
    step_size: int,
    draw: Draw | None,
    labels: np.ndarray | None = None,
) -> WindowPlan:
    """Plan the micro-batches of one window.

    Args:
        lengths: Tokens of each row of the window, shape (R,), every value at least 1.
        batching: The policy.
        step_size: Micro-batches of a step.
        draw: The random numbers of the window; None without shuffling.
        labels: Label of each row, shape (R,); None if rows have none. Labelled rows are not cut.

    Raises:
        ConfigError: The policy omits or repeats rows.

    Cost: O(R log R), one sort. Python loops run per step or per distinct length, not per row.
    """
    arranged = batching.arrange(lengths, step_size, draw, labels)
    arranged.check(lengths, batching)
    dealt, batch_offsets, steps = _deal(arranged.step_offsets, step_size)
    order = arranged.order if dealt is None else arranged.order[dealt]
    if arranged.packed is None:
        return WindowPlan(arranged.cut, order, None, batch_offsets, steps)
    pieces, sequence_offsets = regroup(*arranged.packed, order)
    return WindowPlan(arranged.cut, pieces, sequence_offsets, batch_offsets, steps)


def _deal(
    step_offsets: np.ndarray, step_size: int
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Deal the sequences of each step to its micro-batches: sequence j to number j % step_size.

    Returns:
        The new order of the sequences, shape (S,), or None if it is unchanged; offsets of the
        micro-batches over the sequences; offsets of the steps over the micro-batches.
    """
    if step_size == 1:
        return None, step_offsets, np.arange(len(step_offsets))
    sizes = np.diff(step_offsets)
    counts = np.minimum(sizes, step_size)  # micro-batches of each step: each gets a sequence
    steps = offsets_of(counts)
    nth = np.arange(step_offsets[-1]) - np.repeat(step_offsets[:-1], sizes)
    batch = np.repeat(steps[:-1], sizes) + nth % np.repeat(counts, sizes)
    return np.argsort(batch, kind="stable"), offsets_of(np.bincount(batch)), steps
