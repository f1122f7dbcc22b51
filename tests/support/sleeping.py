"""A data set that sleeps and a model that learns nothing much, for loops that are not ours."""

import time
from typing import Any

import torch
from torch.utils.data import Dataset

slept: list[float] = []
"""Seconds of each sleep of this process: on a busy machine it takes longer than was asked for."""


def sleep(seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    slept.append(time.perf_counter() - began)


class Sleeping(Dataset[dict[str, torch.Tensor]]):
    """Items that take their time."""

    def __init__(self, count: int, milliseconds: float) -> None:
        self._count, self._seconds = count, milliseconds / 1e3

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sleep(self._seconds)
        ids = torch.arange(8)
        return {"input_ids": ids, "labels": ids}


class Tiny(torch.nn.Module):
    """A model that takes the number of targets, so that the Trainer sums it over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"loss": (self.weight * input_ids).square().mean()}
