"""What a plan reads after the current window, and when it reads a record batch next.

A cache needs both: what to prefetch, and what to evict. The permutations of `order` are invertible,
so `until` computes the place of a record batch directly, at the cost of one permutation. Nothing
lists the record batches of an epoch. Torch-free, no I/O.
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
"""Stands for a record batch that neither this epoch nor the next epoch reads."""
_READINGS = 2
"""Readings of a repeated source that `until` searches in an epoch: the current and the next."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A plan and the current window."""

    plan: Plan
    position: Position

    def windows(self) -> Iterator[Position]:
        """Yield the positions of the windows after the current one, forever."""
        at = self.position
        while True:
            at = self.plan.next_window(at)
            yield at

    def batches(self, position: Position) -> np.ndarray:
        """Return the record batches of a window, counted over all sources, shape (K,), int64."""
        number = self.plan.window_number(position.window)
        return self.plan.order.window(position.epoch, number)

    def until(self, source: int, batches: np.ndarray) -> np.ndarray:
        """Return the number of windows until record batches of a source are read, shape (K,),
        int64.

        0 is the current window. `NEVER` stands for a batch that this stream does not read in this
        or the next epoch (of a repeated source: in the next two readings of each).

        Example: an epoch has 10 windows in one stream, the current window is 7. In this epoch,
        batch 5 is in window 9: its result is 2. Batch 6 was in window 3 of this epoch, and is in
        window 1 of the next: 10 + 1 - 7 = 4. With 2 streams, a result counts only the windows of
        this stream, and windows of the other stream do not count as reads.
        """
        plan, order = self.plan, self.plan.order
        found = np.full(len(batches), NEVER)
        for epochs in range(2):
            first = _first_place(order, source, plan.window_number(self.position.window))
            reading = 0 if epochs else first // order.sizes[source]
            for each in range(reading, reading + _READINGS):
                places = _places(order, source, self.position.epoch + epochs, each, batches)
                windows = _windows(order, source, places)
                nth, stream = np.divmod(windows, plan.num_streams)
                away = epochs * plan.num_windows + nth - self.position.window
                is_read = (windows >= 0) & (stream == plan.stream) & (away >= 0)
                np.minimum(found, away, out=found, where=is_read)
        return found

    def between(self, source: int, parts: int) -> int:
        """Return the average number of windows between two reads of the same part of a source that
        has `parts` parts, such as shards."""
        order = self.plan.order
        return parts * order.num_windows // order.batches_read[source]


def _first_place(order: EpochOrder, source: int, window: int) -> int:
    """Return the place in a source's epoch at which a window begins."""
    for phase in order.phases:
        if window < phase.num_windows:
            return phase.begins[source] + phase.batches[source] * window // phase.num_windows
        window -= phase.num_windows
    return order.batches_read[source]


def _windows(order: EpochOrder, source: int, places: np.ndarray) -> np.ndarray:
    """Return the window of each place in a source's epoch; -1 for a place that no window has."""
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
    order: EpochOrder, source: int, epoch: int, reading: int, batches: np.ndarray
) -> np.ndarray:
    """Return the places of record batches in a source's epoch, in one reading of the source.

    A reading is one pass over the source. Reading r has the places from r * size on. This inverts
    `EpochOrder._batches`.
    """
    size = order.sizes[source]
    if not order.shuffle:
        return reading * size + batches
    keys = next_keys(derive_key(order.seed, epoch, source), reading)
    offset = int(derive_keys(keys, 3)[0] % np.uint64(size))
    return reading * size + _unstratified(
        (batches - offset) % size, size, order.rounds_of(source), keys
    )


def _unstratified(values: np.ndarray, size: int, num_rounds: int, keys: np.ndarray) -> np.ndarray:
    """Invert `order._stratified`: return the places of values. `keys` has the one key of them
    all."""
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
    for count in np.unique(sizes).tolist():  # at most two different sizes
        chosen = sizes == count
        of_round = derive_keys(derive_keys(keys, 0), rounds[chosen])
        places[chosen] = begins[chosen] + unpermute(strata[chosen], count, of_round)
    return places
