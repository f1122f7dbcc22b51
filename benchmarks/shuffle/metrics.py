"""How well an order of delivery mixes a corpus: figures that need nothing but the order.

A group is a tenth of the corpus: one of its ten sources, or a tenth of its lengths or its dates.
Shares are by tokens. A step is as many whole batches as have begun within so many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tokenfeed.pipeline.planning.schedule import Schedule

__all__ = [
    "Order",
    "again",
    "deviation",
    "drift",
    "five_readings",
    "full_shuffle",
    "label_variance",
    "met_again",
    "neighbours",
    "persistence",
    "shares",
]

_MEDIAN_OF_A_SHUFFLE = 1 - 0.5**0.5
"""Median distance of two random places of a line of length 1."""
_LEAST_STEPS = 32
"""With fewer the spread of a share says nothing."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one epoch delivered; P pieces in M batches."""

    rows: np.ndarray
    """Row of the corpus that each piece is of, (P,), int64."""
    tokens: np.ndarray
    """Tokens of each piece, (P,), int64."""
    whole: np.ndarray
    """Whether each piece begins its row, (P,), bool: a row that is cut counts once as a row."""
    batches: np.ndarray
    """Where each batch begins among the pieces, (M + 1,), int64."""
    slots: int
    """Tokens and padding of all batches."""

    @property
    def padding(self) -> float:
        """Part of the slots that holds no token."""
        return 1 - int(self.tokens.sum()) / self.slots

    @property
    def of_batch(self) -> np.ndarray:
        """The batch of each piece, (P,), int64."""
        sizes = np.diff(self.batches)
        return np.repeat(np.arange(len(sizes)), sizes)


def full_shuffle(lengths: np.ndarray, rows_a_batch: int, seed: int) -> Order:
    """Every row at any place of the epoch with equal chance."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    return by_rows(order, lengths, rows_a_batch)


def by_rows(order: np.ndarray, lengths: np.ndarray, rows_a_batch: int) -> Order:
    """Rows in some order, so many a batch, padded to the longest."""
    tokens = lengths[order]
    starts = np.arange(0, len(order), rows_a_batch)
    batches = np.append(starts, len(order))
    slots = int((np.maximum.reduceat(tokens, starts) * np.diff(batches)).sum())
    return Order(order, tokens, np.ones(len(order), np.bool_), batches, slots)


def shares(order: Order, groups: np.ndarray, step_tokens: float) -> np.ndarray:
    """Share of each group in each whole step, (steps, groups), but for the epoch's tail."""
    begins = np.append(0, np.cumsum(order.tokens))[order.batches[:-1]]
    step = np.repeat((begins // step_tokens).astype(np.int64), np.diff(order.batches))
    count, kinds = int(step[-1]) + 1, int(groups.max()) + 1
    cells = step * kinds + groups[order.rows]
    tokens = np.bincount(cells, order.tokens, count * kinds).reshape(count, kinds)
    totals = tokens.sum(axis=1)
    return tokens[totals > 0][:-1] / totals[totals > 0][:-1, None]


def deviation(of_steps: np.ndarray, corpus: np.ndarray) -> float | None:
    """Standard deviation of a group's share in a step from its share of the corpus."""
    if len(of_steps) < _LEAST_STEPS:
        return None
    return float(np.sqrt(np.mean((of_steps - corpus) ** 2)))


def persistence(of_steps: np.ndarray, corpus: np.ndarray) -> float | None:
    """Correlation of neighbouring steps: 0 where a step does not tell of the next one."""
    if len(of_steps) < _LEAST_STEPS:
        return None
    apart = of_steps - corpus
    return float((apart[1:] * apart[:-1]).sum() / max((apart**2).sum(), 1e-30))


def drift(order: Order, groups: np.ndarray) -> float:
    """The largest change of a group's share from the first tenth of an epoch to the last, as a
    part of its share of the corpus."""
    place = np.cumsum(order.tokens) / order.tokens.sum()
    kinds = int(groups.max()) + 1

    def share(chosen: np.ndarray) -> np.ndarray:
        tokens = np.bincount(groups[order.rows[chosen]], order.tokens[chosen], kinds)
        return np.asarray(tokens / tokens.sum())

    change = share(place > 0.9) - share(place <= 0.1)
    return float(np.abs(change / share(place > 0)).max())


def neighbours(order: Order) -> dict[str, float]:
    """How far rows that stand side by side in a batch were apart in the corpus.

    Returns:
        `distance`: its median over that of a full shuffle. `near`: how many times as often as by
        chance they were within a thousandth of the corpus.
    """
    rows, batch = order.rows[order.whole], order.of_batch[order.whole]
    size = int(rows.max()) + 1
    apart = np.abs(np.diff(rows))[batch[1:] == batch[:-1]]
    reach = max(1, size // 1000)
    return {
        "distance": float(np.median(apart)) / (_MEDIAN_OF_A_SHUFFLE * size),
        "near": float(np.mean(apart <= reach)) / (2 * reach / size),
    }


def again(first: Order, second: Order) -> dict[str, float]:
    """Rows that share a batch in one epoch and again in the next.

    Returns:
        `pairs`: part of the first epoch's pairs that meet again; `chance`: the same if the second
        epoch were a full shuffle into batches of its sizes; `batches`: part of the first epoch's
        batches of two rows and more that come again whole.
    """
    one, two = batch_of_rows(first), batch_of_rows(second)
    width = int(two.max()) + 1
    both, counts = np.unique(one * width + two, return_counts=True)
    sizes = np.bincount(one), np.bincount(two)
    same = (counts == sizes[0][both // width]) & (counts == sizes[1][both % width]) & (counts > 1)
    pairs = _pairs(sizes[0])
    return {
        "pairs": _pairs(counts) / max(pairs, 1),
        "chance": _pairs(sizes[1]) / max(_pairs(np.array([len(one)])), 1),
        "batches": float(same.sum() / max(np.count_nonzero(sizes[0] > 1), 1)),
    }


def five_readings(order: Schedule, windows: int) -> list[list[np.ndarray]]:
    """The record batches of the windows of five readings, each of so many windows."""
    whole = order.num_windows
    places = [divmod(nth, whole) for nth in range(5 * windows)]
    drawn = [order.window(*place) for place in places]
    return [drawn[first : first + windows] for first in range(0, len(drawn), windows)]


def met_again(readings: Sequence[Sequence[np.ndarray]]) -> float:
    """How often record batches that shared a window share one in the next reading, over chance.

    Args:
        readings: Record batches of each window of each reading. All readings have the same number
            of windows, and each of `size` record batches once.
    """
    windows, size = len(readings[0]), sum(map(len, readings[0]))
    placed = []
    for reading in readings:
        window_of = np.empty(size, np.int64)
        for number, batches in enumerate(reading):
            window_of[batches] = number
        placed.append(window_of)
    met = [np.bincount(one * windows + other, minlength=1) for one, other in pairwise(placed)]
    again = np.mean([(counts.astype(float) ** 2).sum() - size for counts in met])
    pairs = size * (size / windows - 1)
    return float(again / (pairs * (size / windows - 1) / (size - 1)))


def batch_of_rows(order: Order) -> np.ndarray:
    """The batch of each row, (R,), by the first of its pieces."""
    found = np.empty(int(order.rows.max()) + 1, np.int64)
    found[order.rows[order.whole]] = order.of_batch[order.whole]
    return found


def _pairs(sizes: np.ndarray) -> float:
    return float((sizes * (sizes - 1) / 2).sum())


def label_variance(order: Order, labels: np.ndarray) -> float:
    """Variance of the share of label 1 within a batch, over that of rows drawn at random."""
    of_rows = labels[order.rows[order.whole]]
    batch = order.of_batch[order.whole]
    sizes = np.bincount(batch)
    ones = np.bincount(batch, of_rows)[sizes > 0]
    sizes = sizes[sizes > 0]
    part = labels.mean()
    return float(np.mean((ones - part * sizes) ** 2 / (sizes * part * (1 - part))))
