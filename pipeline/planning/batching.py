"""Plan the micro-batches of a window, deal them to ranks, and digest them: pure functions.

    rows -> pieces           a row longer than a micro-batch is cut, never dropped
    pieces -> sequences      one piece each (padded), or several (packed)
    sequences -> steps       as many as fill `step_size` micro-batches; see the policies
    step -> micro-batches    dealt in turn: sequence j to micro-batch j % step_size
    micro-batches -> ranks   dealt in rounds, one micro-batch per rank

The micro-batches of a step differ by at most one sequence. With one row per sequence (Padded,
Fixed), their tokens differ by at most one row. Packed micro-batches have equally many slots, with
more or less padding. Two steps of 5 and 3 sequences, with 2 micro-batches per step:

    sequences        0 1 2 3 4 | 5 6 7
    micro-batches    0 2 4   1 3 | 5 7   6

The last step of a window may have fewer sequences, and fewer micro-batches if there are too few
sequences. The order of the micro-batches does not depend on the ranks. A round ends with a step,
unless there are enough ranks for several whole steps. So the ranks of a round have equal work, and
a step has the same rows on any number of ranks. If the micro-batches of a step are not a multiple
of the ranks, some ranks get a filler: a copy of one sequence that no loss counts. A window of two
steps, with 4 and 3 micro-batches, for 3 ranks; f is a filler:

    micro-batches     0 1 2 3 | 4 5 6
    rounds            0 1 2     3 f f     4 5 6
    position after        3         4         7

The position in a window is the number of delivered micro-batches, whichever ranks received them.

The digest of the delivered rows lets two runs compare them: the sum, modulo 2**64, of a hash of
(epoch, window, place, rows, spans) of every micro-batch. The order of summation does not matter, so
the digest is the same on every rank, for any number of ranks and workers. Every term includes the
place of its micro-batch, so another order of rows gives another digest. Torch-free.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import ceil_div, offsets_of
from tokenfeed.pipeline.planning.permutation import blocks, mix64
from tokenfeed.pipeline.planning.policies import (
    Batching,
    Pieces,
    cut_rows,
    random_order,
    regroup,
)
from tokenfeed.pipeline.planning.schedule import Draw

_OF_PART = 0x70617274
"""Distinguishes the random numbers that choose a part of a window."""


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

    @property
    def rows(self) -> np.ndarray:
        """Row of each piece in the window, shape (P,), int64."""
        return self.pieces if self.cut.cut_from is None else self.cut.cut_from[self.pieces]

    @property
    def starts(self) -> np.ndarray | None:
        """First token of each piece in its row, shape (P,), int64; None: no row was cut."""
        cut, rows = self.cut, self.rows
        if cut.cut_from is None:
            return None
        starts: np.ndarray = cut.offsets[self.pieces] - cut.offsets[cut.beginnings][rows]
        return starts

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece, shape (P,), int32."""
        return self.cut.lengths.astype(np.int32).take(self.pieces)


def plan_window(
    lengths: np.ndarray,
    batching: Batching,
    *,
    step_size: int,
    draw: Draw | None,
    labels: np.ndarray | None = None,
    rows: np.ndarray | None = None,
) -> WindowPlan:
    """Plan the micro-batches of one window.

    Args:
        lengths: Tokens of each row of the window, shape (R,), every value at least 1.
        batching: The policy.
        step_size: Micro-batches of a step.
        draw: The random numbers of the window; None without shuffling.
        labels: Label of each row, shape (R,); None if rows have none. Labelled rows are not cut.
        rows: All rows in the order of delivery, for `order`="file"; see `file_order`. None: the
            policy decides.

    Cost: O(R log R), one sort. Python loops run per step or per distinct length, not per row.
    """
    if rows is None:
        arranged = batching.arrange(lengths, step_size, draw, labels)
        dealt, batch_offsets, steps = deal(arranged.step_offsets, step_size)
    else:
        arranged = batching.in_order(lengths, rows)
        dealt, batch_offsets = None, arranged.step_offsets
        count = len(batch_offsets) - 1
        if batching.last == "drop":
            count -= count % step_size
            batch_offsets = batch_offsets[: count + 1]
            arranged = arranged._replace(order=arranged.order[: batch_offsets[-1]])
        steps = np.append(np.arange(0, count, step_size), count)
    order = arranged.order if dealt is None else arranged.order[dealt]
    if arranged.packed is None:
        return WindowPlan(arranged.cut, order, None, batch_offsets, steps)
    pieces, sequence_offsets = regroup(*arranged.packed, order)
    return WindowPlan(arranged.cut, pieces, sequence_offsets, batch_offsets, steps)


def plan_part(
    tokens: int,
    lengths: np.ndarray,
    batching: Batching,
    *,
    step_size: int,
    draw: Draw,
    labels: np.ndarray | None,
) -> WindowPlan:
    """Plan random pieces of a window, at most `tokens` tokens, but at least one piece. The size of
    micro-batches does not change which ones. The policy may not `split` or crop. See `plan_window`
    for the other arguments."""
    cut = cut_rows(lengths, batching.longest_piece)
    kept = cut.beginnings if batching.long_rows == "truncate" else np.arange(len(cut.lengths))
    kept = kept[random_order(len(kept), draw.key ^ _OF_PART)]
    count = np.searchsorted(np.cumsum(cut.lengths[kept]), tokens, side="right")
    chosen = np.sort(kept[: max(1, int(count))])
    planned = plan_window(
        cut.lengths[chosen],
        batching,
        step_size=step_size,
        draw=draw,
        labels=None if labels is None else labels[chosen],
    )
    return replace(planned, cut=cut, pieces=chosen[planned.pieces])


def file_order(lengths: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Merge the rows of several sources in proportion to their tokens. Rows of a source keep their
    order.

    Each row is placed at its middle token, as a share of the tokens of its source. Two sources with
    rows of 2, 2, 2, 2 and of 4, 4 tokens: places 1/8 3/8 5/8 7/8 and 1/4 3/4, so the order is
    0 4 1 2 5 3.

    Args:
        lengths: Tokens of each row of a window, shape (R,).
        sources: Source of each row, shape (R,).

    Returns:
        A permutation of range(R), int64.
    """
    places = np.empty(len(lengths))
    for source in np.unique(sources):
        own = lengths[sources == source]
        ends = np.cumsum(own)
        places[sources == source] = (ends - own / 2) / ends[-1]
    return np.argsort(places, kind="stable")


def deal(
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


class Round(NamedTuple):
    """The rows that a round adds to the delivered rows, over all ranks."""

    position: int
    """Number of the window's micro-batches delivered after the round."""
    ends_window: bool
    digest: int
    """Digest of the round; see `digests`."""
    tokens: tuple[int, ...]
    """Tokens of each source."""
    steps: int
    """Number of steps that end with the round."""
    left_out: tuple[int, ...] = (0, 0)
    """Rows and tokens of the window that `last`="drop" left out, if the round ends it."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a window from some position on, for one rank."""

    starts: np.ndarray
    """First micro-batch of each round, shape (rounds,), int64."""
    ends: np.ndarray
    """Position after each round, shape (rounds,), int64."""
    mine: np.ndarray
    """Micro-batch of this rank in each round, shape (rounds,), int64."""
    filler: np.ndarray
    """Whether this rank gets a filler, shape (rounds,), bool."""
    steps: np.ndarray
    """Number of steps that end with the round, shape (rounds,), int64."""
    takes_all: bool
    """Whether this rank takes every micro-batch of the window."""


def deal_rounds(
    step_offsets: np.ndarray, step_size: int, *, first: int, rank: int, world_size: int
) -> Rounds:
    """Deal the micro-batches of a window, from number `first` on, to ranks.

    Args:
        step_offsets: Where each step begins among the micro-batches, shape (steps + 1,).
        step_size: Micro-batches in a full step.
        first: Number of micro-batches of this window delivered before.
        rank: Rank of this process.
        world_size: Number of ranks.
    """
    num_batches = int(step_offsets[-1])
    batches = np.arange(first, num_batches)
    step = np.searchsorted(step_offsets, batches, side="right") - 1
    together = max(1, world_size // step_size)
    group = (step - step[:1]) // together * together + step[:1]  # steps that share a round
    group_start = np.maximum(step_offsets[group], first)
    starts = batches[(batches - group_start) % world_size == 0]
    ends = np.append(starts[1:], num_batches)[: len(starts)]
    mine = starts + rank
    filler = mine >= ends
    return Rounds(
        starts,
        ends,
        np.where(filler, starts, mine),
        filler,
        np.diff(np.searchsorted(step_offsets, np.append(first, ends), side="right")),
        takes_all=world_size == 1 and first == 0,
    )


def missing_rounds(
    step_offsets: np.ndarray, step_size: int, rounds: Rounds, *, first: int, world_size: int
) -> np.ndarray:
    """Return where rounds of fillers must be inserted, so that all steps have equally many rounds.

    Ranks of several streams are at different windows, so one may be in the shorter last step of its
    window. The fillers come before the micro-batches of a step: the position after them is still
    that of the step's begin. A step that has begun already gets none.

    Returns:
        Numbers of the rounds before which a round is missing, ascending, shape (missing,).
    """
    counts, begins = np.diff(step_offsets), step_offsets[:-1]
    missing = ceil_div(step_size, world_size) - ceil_div(counts, world_size)
    missing *= begins >= first
    return np.repeat(np.searchsorted(rounds.starts, begins), missing)


def with_fillers(rounds: Rounds, at: np.ndarray) -> Rounds:
    """Insert rounds in which every rank gets a filler."""
    starts = rounds.starts[at]
    return Rounds(
        np.insert(rounds.starts, at, starts),
        np.insert(rounds.ends, at, starts),
        np.insert(rounds.mine, at, starts),
        np.insert(rounds.filler, at, True),
        np.insert(rounds.steps, at, 0),
        rounds.takes_all and not len(at),
    )


_ROW, _START, _LENGTH = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0x165667B19E3779F9),
)


def digests(
    plan: WindowPlan, rounds: Rounds, numbers: np.ndarray, lengths: np.ndarray, key: int
) -> np.ndarray:
    """Return the digest of each round, over the micro-batches of all ranks, shape (rounds,),
    uint64.

    Args:
        plan: The window's plan.
        rounds: The rounds of any rank.
        numbers: Row of each piece, counted over all sources, shape (P,), int64.
        lengths: Tokens of each piece, shape (P,), int32.
        key: `derive_key` of the epoch and the window.
    """
    first = int(rounds.starts[0])
    offsets = plan.batch_piece_offsets[first:]
    starts = plan.starts
    hashes = np.empty(len(numbers), np.uint64)
    for block in blocks(len(hashes)):
        of_block = numbers[block].view(np.uint64) * _ROW
        if starts is not None:
            of_block += starts[block].view(np.uint64) * _START
        of_block += lengths[block].astype(np.uint64) * _LENGTH
        of_block ^= of_block >> np.uint64(29)
        of_block *= _START
        of_block ^= of_block >> np.uint64(32)
        hashes[block] = of_block
    of_batch = np.add.reduceat(hashes, offsets[:-1])
    place = np.arange(first, first + len(of_batch)).astype(np.uint64) + np.uint64(key)
    terms = mix64(of_batch ^ mix64(place))
    return np.add.reduceat(terms, rounds.starts - first)


def tokens_by_source(
    plan: WindowPlan,
    rounds: Rounds,
    numbers: np.ndarray,
    lengths: np.ndarray,
    row_ends: np.ndarray,
) -> np.ndarray:
    """Return the tokens of each source in each round, over the micro-batches of all ranks.

    Args:
        plan: The window's plan.
        rounds: The rounds of any rank.
        numbers: Row of each piece, counted over all sources, shape (P,), int64.
        lengths: Tokens of each piece, shape (P,), int32.
        row_ends: Running total of the rows of the sources, shape (sources,).

    Returns:
        Shape (rounds, sources), int64.
    """
    first = plan.batch_piece_offsets[rounds.starts]
    if len(row_ends) == 1:  # the last round has the rest
        return np.add.reduceat(lengths, first, dtype=np.int64)[:, None]
    shape = len(first), len(row_ends)
    sizes = np.diff(first, append=len(numbers))
    cells = np.repeat(np.arange(shape[0]) * shape[1], sizes)
    cells += np.searchsorted(row_ends, numbers[first[0] :], side="right")
    # floats, exact up to 2**53
    tokens = np.bincount(cells, lengths[first[0] :], shape[0] * shape[1])
    return tokens.astype(np.int64).reshape(shape)
