"""What a plan reads after the current window, and when it reads a record batch next.

A cache needs both: what to prefetch, and what to evict. The permutations of `order` are invertible,
so `until` computes the place of a record batch directly, at the cost of one permutation. Nothing
lists the record batches of an epoch. Torch-free, no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.planning.plan import Plan, Position

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
            first = order.places(source, plan.window_number(self.position.window))[0]
            reading = 0 if epochs else first // order.sizes[source]
            for each in range(reading, reading + _READINGS):
                places = order.places_of(source, self.position.epoch + epochs, each, batches)
                windows = order.windows_of(source, places)
                nth, stream = np.divmod(windows, plan.num_streams)
                away = epochs * plan.num_windows + nth - self.position.window
                is_read = (windows >= 0) & (stream == plan.stream) & (away >= 0)
                np.minimum(found, away, out=found, where=is_read)
        return found

    def between(self, source: int, parts: int) -> int:
        """Return the average number of windows between two reads of the same part of a source that
        has `parts` parts, such as shards."""
        per_window = max(stretch.batches[source] for stretch in self.plan.order.stretches)
        return int(parts / per_window)
