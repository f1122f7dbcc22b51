"""A data set that sleeps and a model that learns nothing much, for loops that are not ours."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset


class Sleeping(Dataset[dict[str, torch.Tensor]]):
    """Items that take their time."""

    def __init__(
        self, count: int, seconds: float, sleep: Callable[[float], object] | None = None
    ) -> None:
        self._count, self._seconds, self._sleep = count, seconds, sleep

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (self._sleep or time.sleep)(self._seconds)
        ids = torch.arange(8)
        return {"input_ids": ids, "labels": ids}


class Tiny(torch.nn.Module):
    """A model that takes the number of targets, so that the Trainer sums it over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"loss": (self.weight * input_ids).square().mean()}
