"""The processes of a run: their communication, and what they agree on after each step.

Sums of tensors are queued on the device, like all computation. Values that the host needs go by
gloo, from host to host, without waiting for a device. Requests to stop or to save, and the counts
of tokens, are one step behind: what a rank sends after step 7, all ranks read after step 8, when
the message has long arrived. So all ranks do the same thing at the same step, and none waits. With
one rank there is no delay.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Gather", "State", "StepSync", "World"]

State = dict[str, Any]
"""Nested dicts and lists of tensors and JSON values."""
Gather = Callable[[Any], list[Any]]
"""A function that returns the values of all ranks, by rank."""

T = TypeVar("T")


class World:
    """One process without others. `ProcessGroup` overrides the methods for several processes."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device of this process."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and logs its progress."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks. The sum is queued on the device."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of rank 0."""

    def concatenate(self, share: Tensor) -> Tensor:
        """Return the equally shaped tensors of all ranks as one, along the first dimension."""
        return share

    def all_reduce_async(self, counts: list[int]) -> Callable[[], list[int]]:
        """Start to sum counts over ranks; return a function that waits, on the host, for the
        sums."""
        return lambda: counts

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        return [value]

    def slow_gather(self) -> Gather:
        """Return a function that gathers values of ranks that may wait for a disk for hours. One
        thread of each rank may call it."""
        return lambda value: [value]

    def run_slow(self, job: Callable[[], T]) -> T:
        """Run a job that waits for a disk. All ranks call this, and return when all jobs are done.

        Raises:
            Exception: What this rank's job raised. Other ranks return.
        """
        return job()

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Return on all ranks what `make` returns on rank 0. If it raises, all ranks end."""
        return make()

    def reason(self, error: Exception) -> str | None:
        """Return why another rank is gone, if the error says so; None for all other errors."""
        return None

    def fail(self, error: BaseException) -> None:
        """Publish the error that ends this rank to the other ranks. Call this before the rank
        ends."""

    def close(self) -> None:
        """Leave the group. All other ranks are done too."""


class StepSync:
    """Stop and save requests, and token counts, over all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: Callable[[], list[int]] | None = None
        self._save = False
        self.stop = False
        """Whether any rank requests a stop."""
        self.tokens = self.slots = 0
        """Counts of all ranks, up to the latest step received. After `wait`, up to the last
        step."""
        self._reported = 0, 0

    def begin(self, tokens: int, slots: int) -> None:
        """Set the counts at which a resumed run starts."""
        self.tokens, self.slots = self._reported = tokens, slots

    def after_step(self, *, stop: bool, save: bool, tokens: int, slots: int) -> tuple[int, int]:
        """Send what happened on this rank. Receive what all ranks sent one step before.

        Returns:
            Tokens and slots of all ranks received since the previous call.
        """
        self.wait()
        self._pending = self._world.all_reduce_async([stop, save, tokens, slots])
        if self._world.size == 1:
            self.wait()
        (tokens, slots), self._reported = self._reported, (self.tokens, self.slots)
        return self.tokens - tokens, self.slots - slots

    def ask(self, *, stop: bool) -> bool:
        """Return whether any rank requests a stop. For use between steps; delayed like
        `after_step`."""
        self.wait()
        self._pending = self._world.all_reduce_async([stop, False, 0, 0])
        if self._world.size == 1:
            self.wait()
        return self.stop

    def wait(self) -> None:
        """Wait for the last messages of all ranks."""
        if self._pending is None:
            return
        stop, save, tokens, slots = self._pending()
        self._pending = None
        self.stop |= stop > 0
        self._save |= save > 0
        self.tokens += tokens
        self.slots += slots

    def take_save(self) -> bool:
        """Return whether any rank requests a save, once per request."""
        save, self._save = self._save, False
        return save
