"""Length bands: put rows of similar length into a step, and shuffle the rows within a band.

Padding is least if rows are sorted by length and cut into steps. But then a data set of one window
would have the same steps in every epoch, and where length depends on the label, steps of one label.
So a few neighbouring steps form a band, and every epoch deals the band's rows to its steps anew.
The band's rows, sorted by length, are cut into strata with as many rows as the band has steps. Each
step takes one row of each stratum. From one epoch to the next, stratum k moves on by k steps. Here
12 rows become 3 steps:

    strata          0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    first epoch     0 3 6 9     1 4 7 10    2 5 8 11
    second epoch    0 5 7 9     1 3 8 10    2 4 6 11

Rows that share a step do not share one in the next epoch, unless the distance of their strata is a
multiple of the number of steps (strata 0 and 3 above, so rows 0 and 9 meet again). Each stratum
starts at a random step, which changes after `order.CYCLE` epochs. The number of steps depends on
lengths and labels only, never on the random numbers. Torch-free.
"""

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.pipeline.planning.permutation import blocks, mix64

if TYPE_CHECKING:
    from tokenfeed.pipeline.planning.policies import ByLength


_LENGTHS_PER_SPREAD = 2.5
"""A band has no rows shorter than longest * (1 - this * spread), because long rows are rare and
their lengths differ much."""
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
        The pieces, shape (P,), and where each step begins in them, shape (steps + 1,); int64.
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
    edges = [len(pieces)]
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
            pieces[start:stop] = _deal(pieces[start:stop], count, draw)
        edges += range(stop - rows, start, -rows)
        edges.append(start)
    return pieces, np.array(edges[::-1])


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
    if alike == 1:
        return 1.0
    step = np.repeat(np.arange(len(sizes)), sizes)
    cells, counts = np.unique(step * len(share) + label[pieces], return_counts=True)
    found = (counts**2 / sizes[cells // len(share)]).sum() - len(label) * alike
    return 1 + (float(found / (len(sizes) * (1 - alike))) - 1) / step_size
