"""From the row lengths of a window to micro-batches in steps: pure functions.

    rows -> pieces           a row longer than a micro-batch may be is cut, never dropped
    pieces -> sequences      one piece each (padded), or several (packed)
    sequences -> steps       of about one length, `step_size` micro-batches at a time; see `bands`
    step -> micro-batches    dealt like cards in order of length

Because a step is dealt like cards, its micro-batches differ by at most one sequence. Where a
sequence is one row (Padded, Fixed), they differ in tokens by at most one row's length; packed, they
have equal slots, of which some are fuller than others. So whoever takes them at the same time has
the same work. A window's tail is an ordinary step with fewer sequences, and with fewer
micro-batches where sequences are too few.

Nothing here knows ranks: a step is what a training step is made of, whoever takes part in it.
Every result depends on the arguments only: lengths, labels, policy, step size and draw.
Torch-free.
"""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.planning.bands import sort_by_length, steps_by_length
from tokenfeed.pipeline.planning.order import Draw, mix64
from tokenfeed.pipeline.planning.packing import concatenate, pack
from tokenfeed.pipeline.planning.policy import Batching, Packed

__all__ = ["Pieces", "WindowPlan", "offsets_of", "plan_window", "regroup"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows, or the parts they are cut into, in the order of the rows."""

    offsets: np.ndarray
    """Where they cut the window's tokens, shape (P + 1,), int64."""
    lengths: np.ndarray
    """Tokens of each, shape (P,), int64."""
    cut_from: np.ndarray | None
    """Row of the window each is cut from, shape (P,), int64; None: none was cut, P = R."""

    @property
    def rows(self) -> np.ndarray:
        """Row of the window each is of, shape (P,), int64."""
        return np.arange(len(self.lengths)) if self.cut_from is None else self.cut_from


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

    Cost: O(R log R), one sort; a Python step per step or per distinct length, none per row.
    """
    if isinstance(batching, Packed):
        return _plan_packed(lengths, batching, step_size, draw)
    cut = _cut(lengths, batching.longest_piece)
    pieces, step_offsets = steps_by_length(
        cut.lengths,
        batching,
        step_size=step_size,
        draw=draw,
        labels=labels,
    )
    if draw:
        order = _random_order(len(step_offsets) - 1, draw.key ^ 2)
        pieces, step_offsets = regroup(pieces, step_offsets, order)
    dealt, batch_offsets, steps = _deal(step_offsets, step_size)
    if dealt is not None:
        pieces = pieces[dealt]
    return WindowPlan(cut, pieces, None, batch_offsets, steps)


def _plan_packed(
    lengths: np.ndarray, batching: Packed, step_size: int, draw: Draw | None
) -> WindowPlan:
    if batching.split:
        order = _random_order(len(lengths), draw.key) if draw else np.arange(len(lengths))
        cut_from, offsets, pieces, sequence_offsets = concatenate(
            lengths, order, batching.sequence_length
        )
        cut = Pieces(offsets, np.diff(offsets), cut_from)
    else:
        cut = _cut(lengths, batching.longest_piece)
        longest_first = sort_by_length(cut.lengths, draw.key if draw else None)[::-1]
        packed, sequence_offsets = pack(cut.lengths[longest_first], batching.sequence_length)
        pieces = longest_first[packed]
    count = len(sequence_offsets) - 1
    order = _random_order(count, draw.key ^ 1) if draw else np.arange(count)
    step_offsets = np.append(np.arange(0, count, batching.batch_size * step_size), count)
    dealt, batch_offsets, steps = _deal(step_offsets, step_size)
    if dealt is not None:
        order = order[dealt]
    pieces, sequence_offsets = regroup(pieces, sequence_offsets, order)
    return WindowPlan(cut, pieces, sequence_offsets, batch_offsets, steps)


def regroup(
    items: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Take groups of consecutive items in another order, keeping the order inside each.

    Returns:
        The items, and the groups' offsets into them, shape (len(order) + 1,).
    """
    starts, sizes = offsets[:-1][order], np.diff(offsets)[order]
    new_offsets = offsets_of(sizes)
    if len(items) > 64 * len(offsets):  # few and large: a copy each is cheaper than an index each
        pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        taken = [items[start:stop] for start, stop in pairs]
        return np.concatenate(taken) if taken else items[:0], new_offsets
    index = np.arange(new_offsets[-1]) + np.repeat(starts - new_offsets[:-1], sizes)
    return items[index], new_offsets


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Running total of sizes, with a leading 0, int64."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _cut(lengths: np.ndarray, longest: int) -> Pieces:
    """Cut rows into pieces of at most `longest` tokens."""
    if lengths.max() <= longest:
        return Pieces(offsets_of(lengths), lengths, None)
    counts = -(-lengths // longest)
    rows = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.cumsum(lengths) - lengths)[rows] + nth * longest
    offsets = np.append(starts, lengths.sum())
    return Pieces(offsets, np.diff(offsets), rows)


def _random_order(count: int, key: int) -> np.ndarray:
    keys = mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(keys)  # no two are equal, so any sort gives the same order


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
    least, more = sizes // hands, sizes % hands
    nth = np.arange(step_offsets[-1]) - np.repeat(step_offsets[:-1], sizes)
    hand, place = nth % np.repeat(hands, sizes), nth // np.repeat(hands, sizes)
    start = hand * np.repeat(least, sizes) + np.minimum(hand, np.repeat(more, sizes))
    dealt = np.empty(len(nth), np.int64)
    dealt[np.repeat(step_offsets[:-1], sizes) + start + place] = np.arange(len(nth))
    steps = offsets_of(hands)
    number = np.arange(steps[-1]) - np.repeat(steps[:-1], hands)
    return dealt, offsets_of(np.repeat(least, hands) + (number < np.repeat(more, hands))), steps
