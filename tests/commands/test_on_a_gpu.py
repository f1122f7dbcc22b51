"""Loaders that feed a real GPU from worker processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.delivery import POLICIES, open_loader, same_values

from tokenfeed.pipeline.planning.policies import Batching

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_batches_on_a_gpu_are_those_of_the_host(
    folder: Path, batching: Batching, num_workers: int
) -> None:
    options: dict[str, Any] = {"epochs": 3, "rank": 1, "world_size": 2, "micro_batches_per_step": 3}
    host = list(open_loader(folder, batching, **options))
    with open_loader(folder, batching, num_workers=num_workers, device="cuda", **options) as loader:
        device = list(loader)
        state = loader.state_dict()
    for ours, theirs in zip(device, host, strict=True):
        assert list(ours) == list(theirs)
        assert same_values(ours.to("cpu"), theirs)
        assert (ours.rows.tolist(), ours.is_filler) == (theirs.rows.tolist(), theirs.is_filler)
    other = open_loader(folder, batching, **options)
    list(other)
    assert state == other.state_dict()


@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_feeding_a_gpu_never_synchronises(folder: Path, batching: Batching) -> None:
    with open_loader(folder, batching, num_workers=2, epochs=None, device="cuda") as loader:
        feed = iter(loader)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(300):
                next(feed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
