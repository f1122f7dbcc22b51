"""From the row lengths of a window to micro-batches in steps: pure functions.

    rows -> pieces           a row longer than a micro-batch may be is cut, never dropped
    pieces -> sequences      one piece each (padded), or several (packed)
    sequences -> steps       so many that they become `step_size` micro-batches; see the policies
    step -> micro-batches    dealt like cards

Because a step is dealt like cards, its micro-batches differ by at most one sequence. Where a
sequence is one row (Padded, Fixed), they differ in tokens by at most one row's length; packed, they
have equal slots, of which some are fuller than others. So whoever takes them at the same time has
the same work. Two steps of 5 and 3 sequences, with 2 micro-batches a step:

    sequences        0 1 2 3 4 | 5 6 7
    micro-batches    0 2 4   1 3 | 5 7   6

A window's tail is an ordinary step with fewer sequences, and with fewer micro-batches where
sequences are too few. Nothing here knows ranks: a step is what an optimizer step is made of,
whoever takes part in it. Every result depends on the arguments only. Torch-free.
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
    """What the rows were cut into."""
    pieces: np.ndarray
    """All pieces in the order of delivery, shape (P,), int64."""
    sequence_offsets: np.ndarray | None
    """Where each sequence begins in `pieces`, shape (S + 1,), int64; None: every piece is one."""
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
        draw: The window's randomness; None for none.
        labels: The label of each row, shape (R,), where each has one; such rows are not cut.

    Raises:
        ConfigError: The policy leaves out rows, or repeats some.

    Cost: O(R log R), one sort; a Python step per step or per distinct length, none per row.
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
        Which sequence comes where, shape (S,), or None where all stay in place; batch offsets over
        the sequences; step offsets over the micro-batches.
    """
    if step_size == 1:
        return None, step_offsets, np.arange(len(step_offsets))
    sizes = np.diff(step_offsets)
    hands = np.minimum(sizes, step_size)  # micro-batches: none is left without a sequence
    steps = offsets_of(hands)
    nth = np.arange(step_offsets[-1]) - np.repeat(step_offsets[:-1], sizes)
    hand = np.repeat(steps[:-1], sizes) + nth % np.repeat(hands, sizes)
    return np.argsort(hand, kind="stable"), offsets_of(np.bincount(hand)), steps
