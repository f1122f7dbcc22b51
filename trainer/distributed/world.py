"""The processes of a run, and their communication.

Sums of tensors are queued on the device, like all computation. Values that the host needs go by
gloo, from host to host, without waiting for a device.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["State", "World"]


State = dict[str, Any]
"""Nested dicts and lists of tensors and JSON values."""


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
