"""Arrange the pieces of a window: in steps of similar length, or packed into sequences.

**Length bands.** Padding is least if rows are sorted by length and cut into steps. But then a data
set of one window would have the same steps in every epoch, and where length depends on the label,
steps of one label. So a few neighbouring steps form a band, and every epoch deals the band's rows
to its steps anew. The band's rows, sorted by length, are cut into strata with as many rows as the
band has steps. Each step takes one row of each stratum. From one epoch to the next, stratum k moves
on by k steps. Here 12 rows become 3 steps:

    strata          0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    first epoch     0 3 6 9     1 4 7 10    2 5 8 11
    second epoch    0 5 7 9     1 3 8 10    2 4 6 11

Rows that share a step do not share one in the next epoch, unless the distance of their strata is a
multiple of the number of steps (strata 0 and 3 above, so rows 0 and 9 meet again). Each stratum
starts at a random step, which changes after `schedule.CYCLE` epochs. The number of steps depends on
lengths and labels only, never on the random numbers.

**Packing.** Best-fit-decreasing works on length counts: pieces of equal length are interchangeable,
so bins and pieces are handled in groups. The Python loop runs once per (length, group of equal
bins), not once per piece, and a few vector operations assign the pieces. Six pieces of 6, 4, 4, 4,
3 and 2 tokens in bins of 10:

    length 6, once      bin 0: 6                        4 left
    length 4, 3 times   bin 0: 6 4    bin 1: 4 4        0 and 2 left
    length 3, once                    bin 2: 3          7 left
    length 2, once                    bin 1: 4 4 2      0 left

Nothing is dropped. On real text, bins are over 99.9 % full. Source: best-fit packing for language
models, arXiv 2404.10830. Torch-free.
"""

from bisect import bisect_left, bisect_right
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from tokenfeed.pipeline.arithmetic import ceil_div, offsets_of, ranges
from tokenfeed.pipeline.planning.permutation import blocks, mix64
from tokenfeed.pipeline.planning.schedule import Draw

if TYPE_CHECKING:
    from tokenfeed.pipeline.planning.policies import ByLength


_LENGTHS_PER_SPREAD = 2.5
"""A band has no rows shorter than longest * (1 - this * spread), because long rows are rare and
their lengths differ much."""
_LEFT_OUT = 0x6C617374
"""Distinguishes the random numbers for the rows that `last`="drop" leaves out."""
_LABEL_VARIANCE = 2.5
"""Largest variance of the labels in a micro-batch, relative to a random micro-batch. Above it,
bands are made wider."""


def steps_by_length(
    lengths: np.ndarray,
    batching: "ByLength",
    *,
    step_size: int,
    draw: Draw | None,
    labels: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sort pieces by length and cut them into steps.

    Args:
        lengths: Tokens of each piece, shape (P,).
        batching: The policy; its `spread` is the width of the bands.
        step_size: Micro-batches of a step.
        draw: The random numbers of the window; None for strict order.
        labels: Label of each piece, shape (P,); None if pieces have none.

    Returns:
        The pieces, shape (P,), and where each step begins in them, shape (steps + 1,); int64. With
        `last`="drop", the pieces that fill whole steps.
    """
    num_steps = batching.batches_of(lengths) / step_size
    # About a W-th in an epoch of W windows: the shuffle of the windows mixes rows, too.
    spread = 1 - (1 - batching.spread) ** (1 / draw.num_windows) if draw else 0.0
    label = None if labels is None else np.unique(labels, return_inverse=True)[1]
    while draw and label is not None and 0 < spread < 1:
        some = Draw(0, 0, 0, draw.num_windows)  # the same in every epoch, so the width is too
        cut = _cut(lengths, batching, step_size, some, num_steps, spread)
        if label_variance(label, *cut, step_size) <= _LABEL_VARIANCE:
            break
        spread = min(1.0, 2 * spread)
    return _cut(lengths, batching, step_size, draw, num_steps, spread)


def sort_by_length(lengths: np.ndarray, key: int | None) -> np.ndarray:
    """Return indices by ascending length; ties in random order, or by index for `key`=None.

    It sorts one 64-bit word per row: length, random bits, index. The index breaks the last ties and
    is read back from the sorted words. That is faster than argsort, and the same on every machine.
    Example with 4 rows: row 2 of length 7 is the word 7 | random bits | 2.
    """
    index_bits = max(len(lengths) - 1, 1).bit_length()
    length_bits = int(lengths.max()).bit_length()
    low = np.uint64((1 << index_bits) - 1)
    words = np.arange(len(lengths), dtype=np.uint64)
    for block in blocks(len(lengths)):
        of_block = words[block]
        if key is not None:
            random = _scramble(of_block, key)
            random >>= np.uint64(length_bits)
            random &= ~low
            of_block |= random
        shifted = lengths[block].astype(np.uint64)
        shifted <<= np.uint64(64 - length_bits)
        of_block |= shifted
    words.sort()
    words &= low
    return words.view(np.int64)


def _scramble(index: np.ndarray, key: int) -> np.ndarray:
    """Return random high bits for consecutive integers, in half the passes of `mix64`."""
    values = index * np.uint64(0x9E3779B97F4A7C15)
    values += np.uint64(key)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    return values


def _cut(
    lengths: np.ndarray,
    batching: "ByLength",
    step_size: int,
    draw: Draw | None,
    num_steps: float,
    spread: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Cut bands of steps from the longest rows down, and deal the pieces of each band to its
    steps."""
    most = len(lengths) if spread >= 1 else int(num_steps * spread)
    key, comes_again = draw.key if draw else None, False
    if draw and most > 1 and draw.num_windows == 1:
        # Ties keep their order for a cycle if the same rows come again and few have equal length.
        comes_again = len(np.unique(lengths)) * most > len(lengths)
        key = draw.cycle_key if comes_again else draw.key
    pieces = sort_by_length(lengths, key)
    ascending = lengths[pieces]
    edges, bands = [len(pieces)], list[tuple[int, int, int]]()
    while (stop := edges[-1]) > 0:
        longest, count = int(ascending[stop - 1]), 1
        rows = step_size * batching.rows_of(longest)
        if draw and most > 1:
            # An int: a float would cast the whole array.
            least = ceil(longest * (1 - _LENGTHS_PER_SPREAD * spread))
            near = stop - np.searchsorted(ascending, least)
            count = max(1, min(most, ceil_div(int(near), rows), stop // rows))
        start = max(0, stop - count * rows)
        # Otherwise the random ties have dealt the pieces.
        if draw and count > 1 and (comes_again or ascending[start] < longest):
            bands.append((start, stop, count))
        edges += range(stop - rows, start, -rows)
        edges.append(start)
    left_out = 0
    if batching.last == "drop" and edges[-2] < rows:
        left_out = edges[-2]
        pieces = _without(pieces, left_out, draw)
        edges.pop()
    for start, stop, count in bands:
        assert draw
        band = slice(start - left_out, stop - left_out)
        pieces[band] = _deal(pieces[band], count, draw)
    return pieces, np.array(edges[::-1]) - left_out


def _without(pieces: np.ndarray, count: int, draw: Draw | None) -> np.ndarray:
    """Leave out random pieces, or the first ones without shuffling.

    The others move on to the steps of longer pieces, so no step gets larger.
    """
    if draw is None:
        return pieces[count:]
    keys = mix64(np.arange(len(pieces), dtype=np.uint64) ^ np.uint64(draw.key ^ _LEFT_OUT))
    kept = np.ones(len(pieces), np.bool_)
    kept[np.argpartition(keys, count - 1)[:count]] = False
    return pieces[kept]


def _deal(band: np.ndarray, num_steps: int, draw: Draw) -> np.ndarray:
    """Deal the pieces of a band, sorted by length, to its steps; return them in the order of
    steps."""
    strata = band.reshape(-1, num_steps)
    stratum = np.arange(len(strata))
    begins = mix64(stratum.astype(np.uint64) ^ np.uint64(draw.cycle_key)) >> np.uint64(33)
    moved = (begins.astype(np.int64) + stratum * draw.cycle_epoch) % num_steps
    taken = np.arange(num_steps)[:, None] - moved  # which piece of each stratum each step takes
    taken += (taken < 0) * num_steps
    return np.asarray(strata[stratum, taken].ravel())


def label_variance(
    label: np.ndarray, pieces: np.ndarray, step_offsets: np.ndarray, step_size: int
) -> float:
    """Return the variance of the labels in a micro-batch, relative to a random micro-batch.

    A step deals its rows to its micro-batches, so an excess of one label in a step is divided among
    them: hence the division by `step_size`.
    """
    sizes = np.diff(step_offsets)
    share = np.bincount(label) / len(label)
    alike = (share**2).sum()
    if alike == 1 or not len(sizes):
        return 1.0
    step = np.repeat(np.arange(len(sizes)), sizes)
    cells, counts = np.unique(step * len(share) + label[pieces], return_counts=True)
    found = (counts**2 / sizes[cells // len(share)]).sum() - len(label) * alike
    return 1 + (float(found / (len(sizes) * (1 - alike))) - 1) / step_size


def pack(pieces: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into as few bins as best-fit-decreasing finds.

    Args:
        pieces: Numbers of the pieces, the longest first, shape (P,).
        lengths: Their lengths in any order, shape (P,), every value in [1, capacity].
        capacity: Tokens per bin.

    Returns:
        The pieces in bin order, shape (P,); and the offsets of the bins into them, shape (S + 1,),
        int64.

    Cost: O(D log D) Python steps for D distinct lengths, plus O(P) vector operations.
    """
    bins = OpenBins(capacity)
    counts = np.bincount(lengths)
    distinct = np.flatnonzero(counts)[::-1]
    for length, count in zip(distinct.tolist(), counts[distinct].tolist(), strict=True):
        bins.place(length, count)
    return bins.deal(pieces)


def concatenate(
    lengths: np.ndarray, order: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate rows and cut them wherever a bin is full.

    Args:
        lengths: Tokens of each row, shape (R,).
        order: Order of concatenation, a permutation of range(R).
        capacity: Tokens per bin. Only the last bin may have fewer.

    Returns:
        Row of each piece (P,) and offsets of the pieces (P + 1,), both in the order of the rows;
        the pieces in bin order (P,), and offsets of the bins into them (S + 1,); all int64.
    """
    laid = lengths[order]
    ends = np.cumsum(laid)
    bin_starts = np.arange(0, ends[-1], capacity)
    place = np.searchsorted(
        ends, bin_starts, side="right"
    )  # place of the row in which each bin begins
    into = bin_starts - (ends - laid)[place]  # tokens of that row before the bin; 0: no cut
    is_cut = into > 0
    place_cut = place[is_cut]
    cuts = np.bincount(place_cut, minlength=len(laid))
    nth = is_cut.astype(np.int64)  # number of the bin's first piece in its row
    nth[is_cut] += np.arange(len(place_cut)) - offsets_of(cuts)[place_cut]
    counts = np.empty_like(cuts)
    counts[order] = cuts + 1
    first = offsets_of(counts)[:-1]  # first piece of each row
    offsets = np.full(len(laid) + len(place_cut) + 1, ends[-1])
    offsets[first] = offsets_of(lengths)[:-1]
    cut_rows = order[place_cut]
    offsets[first[cut_rows] + nth[is_cut]] = offsets_of(lengths)[cut_rows] + into[is_cut]
    first_laid = offsets_of(cuts + 1)[:-1]
    pieces = np.arange(len(offsets) - 1) + np.repeat(first[order] - first_laid, cuts + 1)
    bins = np.append(first_laid[place] + nth, len(pieces))
    return np.repeat(np.arange(len(laid)), counts), offsets, pieces, bins


def next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Put pieces into bins one after the other. A piece that does not fit begins the next bin.

    Args:
        lengths: Piece lengths, shape (P,), every value in [1, capacity].
        capacity: Tokens per bin.

    Returns:
        Offsets of the bins into the pieces, shape (S + 1,), int64.
    """
    ends, offsets, filled = np.cumsum(lengths), [0], 0
    while offsets[-1] < len(lengths):
        offsets.append(int(np.searchsorted(ends, filled + capacity, side="right")))
        filled = int(ends[offsets[-1] - 1])
    return np.array(offsets)


def crop(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill bins one after the other with the longest piece that fits. Where none fits, crop the
    shortest piece to fill the bin exactly. Only the last bin may have free space.

    Args:
        lengths: Piece lengths, ascending, shape (P,), every value at least 1.
        capacity: Tokens per bin.

    Returns:
        Tokens used of each piece, shape (P,); the pieces in bin order, shape (P,), int64; and the
        offsets of the bins into them, shape (S + 1,), int64.

    Cost: O(P) Python steps at most, each a search among the distinct lengths that are left.
    """
    distinct, first = np.unique(lengths, return_index=True)
    left = distinct.tolist()  # distinct lengths of the pieces that are left, ascending
    following = dict(zip(left, first.tolist(), strict=True))
    ends = dict(zip(left, [*first[1:].tolist(), len(lengths)], strict=True))
    used, order, offsets, room = lengths.copy(), list[int](), [0], capacity
    while left:
        at = bisect_right(left, room) - 1
        length = left[max(at, 0)]
        piece = following[length]
        count = min(max(room // length, 1), ends[length] - piece)
        order.extend(range(piece, piece + count))
        if at < 0:
            used[piece] = room
        room -= min(count * length, room)
        following[length] += count
        if following[length] == ends[length]:
            del left[max(at, 0)]
        if not room or not left:
            offsets.append(len(order))
            room = capacity
    return used, np.array(order), np.array(offsets)


_BLOCK = 1 << 15
"""Pieces that `OpenBins.deal` places together, so that its arrays stay in the cache."""


class OpenBins:
    """Groups of bins with free space. A group has bins with consecutive numbers and the same number
    of pieces."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_bins = 0
        self._groups: list[tuple[int, int, int, int]] = []
        """Free space of each bin, first bin, number of bins, pieces in each bin. Ascending by free
        space; of groups with equal space the newest comes first."""
        self.placed: list[tuple[int, int, int, int]] = []
        """Pieces of one length that were put into a group: first bin, number of bins, pieces added
        to each bin, pieces in each bin before."""

    def place(self, length: int, count: int) -> None:
        """Put `count` pieces of one length into the fullest bins with enough space."""
        while count:
            at = bisect_left(self._groups, (length,))
            if at < len(self._groups):
                room, first, bins, filled = self._groups.pop(at)
            else:
                room, first, filled = self._capacity, self._num_bins, 0
                bins = ceil_div(count, room // length)
                self._num_bins += bins
            each = room // length
            full = min(bins, count // each)
            rest = count - full * each if full < bins else 0
            partly = int(rest > 0)
            for start, some, pieces in ((first, full, each), (first + full, partly, rest)):
                if some:
                    self.placed.append((start, some, pieces, filled))
                    self._keep(room - pieces * length, start, some, filled + pieces)
            self._keep(room, first + full + partly, bins - full - partly, filled)
            count -= full * each + rest

    def deal(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sort pieces by bin.

        Args:
            pieces: All pieces, in the order in which they were placed, shape (P,).

        Returns:
            The pieces in the order of their bins, and the offsets of the bins into them.
        """
        first, bins, each, filled = np.array(self.placed, np.int64).reshape(-1, 4).T
        change = np.zeros(self._num_bins + 1, np.int64)  # of the sizes, from bin to bin
        np.add.at(change, first, each)
        np.subtract.at(change, first + bins, each)
        offsets = offsets_of(np.cumsum(change[:-1]))
        dealt, ends = np.empty_like(pieces), np.cumsum(bins * each)
        blocks = np.searchsorted(ends, np.arange(0, len(pieces), _BLOCK), side="right")
        for start, stop in pairwise([*np.unique(blocks).tolist(), len(ends)]):
            of = slice(start, stop)
            filled_bins = ranges(first[of], bins[of])  # each bin once per record that fills it
            begins = offsets[filled_bins] + np.repeat(filled[of], bins[of])
            places = ranges(begins, np.repeat(each[of], bins[of]))
            dealt[places] = pieces[ends[stop - 1] - len(places) : ends[stop - 1]]
        return dealt, offsets

    def _keep(self, room: int, first: int, bins: int, filled: int) -> None:
        if bins and room:
            at = bisect_left(self._groups, (room,))
            self._groups.insert(at, (room, first, bins, filled))
