"""What others may add to the trainer is added in few places: a task, and a device for ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.simulated_cuda import simulate

from tokenfeed.trainer.distributed import world as group


def test_each_rank_has_a_device_of_its_own_and_the_backend_of_its_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    current: list[torch.device] = []
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **more: asked.update(more, backend=backend)
    )
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    with simulate(monkeypatch):
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
        world = group.join_world("cuda")
    assert [world.device] == current == [torch.device("cuda:1")] == [asked["device_id"]]
    assert asked["backend"] == "cpu:gloo,cuda:nccl"
