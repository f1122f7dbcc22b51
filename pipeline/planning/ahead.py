"""Ahead: what a plan reads after some window, and when it reads a record batch next.

Whoever keeps record batches near at hand asks both: what to fetch before it is wanted, and what is
wanted last. The permutations of the order are one to one, so they can be asked the other way round,
for as little: no list of the epoch is ever made. Torch-free and free of I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.planning.order import (
    EpochOrder,
    derive_key,
    derive_keys,
    next_keys,
    unpermute,
)
from tokenfeed.pipeline.planning.plan import Plan, Position

__all__ = ["NEVER", "Ahead"]

NEVER = 1 << 40
"""Windows until a record batch is read that neither this epoch nor the next one has."""
_TURNS = 2
"""Readings of a source within an epoch that are looked through: the next one is among them."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A plan, and the window that is read at present."""

    plan: Plan
    position: Position

    def windows(self) -> Iterator[Position]:
        """The windows after this one, without an end."""
        at = self.position
        while True:
            at = self.plan.next_window(at)
            yield at

    def batches(self, position: Position) -> np.ndarray:
        """The record batches of a window, counted over all sources."""
        number = self.plan.window_number(position.window)
        return self.plan.order.window(position.epoch, number)

    def until(self, source: int, batches: np.ndarray) -> np.ndarray:
        """How many windows it is until record batches of a source are read, shape (K,), int64.

        0 is the present window; `NEVER` stands for those of which the next epoch has none, or, of a
        source that streams read again and again, this stream neither of the next two readings.
        """
        plan, order = self.plan, self.plan.order
        found = np.full(len(batches), NEVER)
        for epochs in range(2):
            first = _first_place(order, source, plan.window_number(self.position.window))
            turn = 0 if epochs else first // order.sizes[source]
            for each in range(turn, turn + _TURNS):
                places = _places(order, source, self.position.epoch + epochs, each, batches)
                windows = _windows(order, source, places)
                nth, stream = np.divmod(windows, plan.num_streams)
                away = epochs * plan.num_windows + nth - self.position.window
                is_there = (windows >= 0) & (stream == plan.stream) & (away >= 0)
                np.minimum(found, away, out=found, where=is_there)
        return found

    def between(self, source: int, parts: int) -> int:
        """About how many windows it is from one that reads a part of a source to the next one that
        does, where the source has so many parts."""
        order = self.plan.order
        return parts * order.num_windows // order.batches_read[source]


def _first_place(order: EpochOrder, source: int, window: int) -> int:
    """The place in a source's epoch at which a window begins."""
    for phase in order.phases:
        if window < phase.num_windows:
            return phase.begins[source] + phase.batches[source] * window // phase.num_windows
        window -= phase.num_windows
    return order.batches_read[source]


def _windows(order: EpochOrder, source: int, places: np.ndarray) -> np.ndarray:
    """The window of the epoch that each place of a source is in; -1 where none is."""
    windows = np.full(len(places), -1)
    first = 0
    for phase in order.phases:
        begin, count = phase.begins[source], phase.batches[source]
        inside = (places >= begin) & (places < begin + count)
        nth = (places[inside] - begin + 1) * phase.num_windows - 1
        windows[inside] = first + nth // max(1, count)
        first += phase.num_windows
    return windows


def _places(
    order: EpochOrder, source: int, epoch: int, turn: int, batches: np.ndarray
) -> np.ndarray:
    """The places in a source's epoch of its record batches, in one of its readings."""
    size = order.sizes[source]
    if not order.shuffle:
        return turn * size + batches
    keys = next_keys(derive_key(order.seed, epoch, source), turn)
    offset = int(derive_keys(keys, 3)[0] % np.uint64(size))
    return turn * size + _unstratified(
        (batches - offset) % size, size, order.rounds_of(source), keys
    )


def _unstratified(values: np.ndarray, size: int, num_rounds: int, keys: np.ndarray) -> np.ndarray:
    """The places that `order` sends to some values; `keys` holds the one key of them all."""
    strata, values = np.divmod(values, num_rounds)
    full, extra = divmod(size, num_rounds)
    is_full = strata < full
    rounds = np.empty(len(values), np.int64)
    of_stratum = derive_keys(derive_keys(keys, 1), strata[is_full])
    rounds[is_full] = unpermute(values[is_full], num_rounds, of_stratum)
    nth = unpermute(values[~is_full], max(1, extra), derive_keys(keys, 2))
    rounds[~is_full] = ((nth + 1) * num_rounds - 1) // max(1, extra)
    begins = size * rounds // num_rounds
    sizes = size * (rounds + 1) // num_rounds - begins
    places = np.empty(len(values), np.int64)
    for count in np.unique(sizes).tolist():  # two at most
        chosen = sizes == count
        of_round = derive_keys(derive_keys(keys, 0), rounds[chosen])
        places[chosen] = begins[chosen] + unpermute(strata[chosen], count, of_round)
    return places
