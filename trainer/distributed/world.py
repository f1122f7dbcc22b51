"""The processes of a run, and what passes between them.

Sums of tensors are queued on the device, as all that is computed; whatever the host has to know
goes by gloo, from host to host, and no device is waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["State", "World"]


State = dict[str, Any]
"""Nested dicts and lists of tensors and of what JSON holds."""


T = TypeVar("T")


class World:
    """One process: nothing to add, nobody to ask. `Group` is the same for several."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Where this process computes."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files, and speaks."""
        return self.rank == 0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor its sum over ranks, which is queued on the device."""

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor that of rank 0."""

    def add_up_later(self, counts: list[int]) -> Callable[[], list[int]]:
        """Begin to add counts over ranks; the function waits for the sums, on the host."""
        return lambda: counts

    def gathered(self, value: T) -> list[T]:
        """That of every rank."""
        return [value]

    def from_main(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, known to all; where it raises, all ranks end."""
        return make()

    def reason(self, error: Exception) -> str | None:
        """Why another rank is gone, where the error is that one is; None for all other errors."""
        return None

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends; to be called before it does."""

    def close(self) -> None:
        """Leave the others, who are done too."""
