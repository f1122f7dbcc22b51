"""Where a loop begins: at any step of any epoch, and with the rank of a mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.delivery import POLICIES, Span, open_loader, spans
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tokenfeed import Fixed, Padded, ShardDataset, ShardLoader, Stage, ranks_of
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.policies import Batching


def steps_of(loader: ShardLoader) -> list[list[list[Span]]]:
    """The batches of each step that is left of a pass."""
    steps: list[list[list[Span]]] = [[]]
    for batch in loader:
        steps[-1].append(spans(batch))
        if batch.ends_step:
            steps.append([])
    return steps[:-1]


@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_at_continues_as_a_loop_that_came_there(folder: Path, batching: Batching) -> None:
    options: dict[str, Any] = {"micro_batches_per_step": 4, "rank": 1, "world_size": 2}
    whole = open_loader(folder, batching, **options)
    first, second = steps_of(whole), steps_of(whole)
    for number in (0, 1, len(second) // 2, len(second) - 1, len(second)):
        loader = open_loader(folder, batching, **options).at(epoch=1, step=number)
        assert steps_of(loader) == (second[number:] or steps_of(whole))
    loader.at(step=2)
    assert steps_of(loader) == first[2:]
    assert loader.at(epoch=1).position == (1, 0, 0)


def test_state_after_at_is_that_of_a_loop_over_the_epoch(folder: Path) -> None:
    loop, loader = open_loader(folder), open_loader(folder).at(step=7)
    for _ in islice(loop, 7):
        pass
    assert loader.state_dict() == loop.state_dict()
    again = open_loader(folder)
    again.load_state_dict(loader.state_dict())
    assert steps_of(again) == steps_of(loader) == steps_of(loop)


def test_at_beyond_an_epoch_names_its_steps(folder: Path) -> None:
    loader = open_loader(folder)
    count = len(steps_of(loader))
    with pytest.raises(ConfigError, match=f"`step`={count + 1}: epoch 0 has {count} steps"):
        loader.at(step=count + 1)
    assert loader.position == (1, 0, 0)
    endless = open_loader([Stage({folder: 1})])  # type: ignore[arg-type]
    for epoch in (-1, 1, 1.5):
        with pytest.raises(ConfigError, match=f"`epoch`={epoch}"):
            endless.at(epoch=epoch)  # type: ignore[arg-type]


def test_set_epoch_repeats_an_epoch_as_a_sampler_does(folder: Path) -> None:
    whole = open_loader(folder)
    epochs = [steps_of(whole) for _ in range(3)]
    loader = open_loader(folder)
    for epoch in (0, 1, 1, 0, 2):
        loader.set_epoch(epoch)
        assert steps_of(loader) == epochs[epoch]
    assert loader.state_dict()["epoch"] == 3
    loader.set_epoch(1)
    next(iter(loader))  # an interrupted cell of a notebook
    loader.set_epoch(1)
    assert steps_of(loader) == epochs[1]


def test_set_epoch_does_not_leave_a_loaded_position(folder: Path) -> None:
    whole = open_loader(folder)
    first, second = steps_of(whole), steps_of(whole)
    saved, loader = open_loader(folder).at(epoch=1, step=3), open_loader(folder)
    loader.load_state_dict(saved.state_dict())
    loader.set_epoch(0)  # of a script that counts its own loops
    assert steps_of(loader) == second[3:]
    loader.set_epoch(0)
    assert steps_of(loader) == first


def test_validation_begins_anew_in_the_set_epoch(both_splits: Path) -> None:
    options: dict[str, Any] = {"split": "validation", "window_tokens": 1000}
    train = open_loader(both_splits, Fixed(8), **options | {"split": "train"})
    assert steps_of(train) != steps_of(train)
    loader = open_loader(both_splits, Fixed(8), **options)
    first = steps_of(loader)
    loader.set_epoch(1)
    second = [steps_of(loader) for _ in range(2)]
    assert second[0] == second[1] != first
    loader.rewind()
    assert steps_of(loader) == first
    assert steps_of(loader.at(step=3)) == first[3:]


@contextmanager
def process(rank: int, world_size: int) -> Iterator[None]:
    """This process as one of many of torch.distributed."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_loader_made_before_the_ranks_were_is_refused(folder: Path) -> None:
    loader, window_slices = open_loader(folder), ShardDataset(folder, Padded(512))
    given = open_loader(folder, rank=0, world_size=1)
    with process(1, 2):  # as in a function that `torch.multiprocessing.spawn` has started
        for early in (loader, window_slices):
            with pytest.raises(ConfigError, match="made for rank 0 of 1, but now this process has"):
                iter(early)
        assert steps_of(given) == steps_of(open_loader(folder, rank=0, world_size=1))
    with process(0, 1):
        assert steps_of(loader)


SHAPE, NAMES = (2, 2, 2), ("dp_replicate", "dp_shard", "tp")


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    size = torch.tensor(shape).prod().item()
    return DeviceMesh("cpu", torch.arange(size).view(shape), mesh_dim_names=names)


@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        (SHAPE, NAMES, ("dp_replicate", "dp_shard")),
        (SHAPE, NAMES, ("dp_shard", "dp_replicate")),
        ((2, 3, 2), ("pp", "dp", "cp"), "dp"),
        ((4,), ("dp",), None),
        ((3,), None, None),
    ],
    ids=str,
)
def test_rank_in_a_mesh_counts_its_data_parallel_dimensions(
    shape: tuple[int, ...], names: tuple[str, ...] | None, dims: Any
) -> None:
    """`tests/commands/test_mesh.py` delivers rows on real ranks."""
    size = int(torch.tensor(shape).prod())
    counted = [n for n, name in enumerate(names or ("0",)) if dims is None or name in dims]
    for rank in range(size):
        with process(rank, size):
            found = ranks_of(mesh_of(shape, names), dims)
        place = torch.arange(size).view(shape).eq(rank).nonzero()[0].tolist()
        expected, ranks = 0, 1
        for dim in counted:
            expected, ranks = expected * shape[dim] + place[dim], ranks * shape[dim]
        assert found == (expected, ranks)


def test_rank_of_a_process_group_is_that_of_the_group() -> None:
    with process(5, 6):
        group = dist.new_group([1, 3, 5])
        found = ranks_of(group)
        with pytest.raises(ConfigError, match="a process group has no dimensions"):
            ranks_of(group, "dp")
    assert found == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"`dims`=None: the mesh has the dimensions dp_replicate, dp_shard, tp\. Pass"),
        ({"dims": ()}, "the mesh has the dimensions"),
        ({"dims": "dp"}, "`dims`='dp': the mesh has the dimensions"),
        ({"mesh": "dp"}, "`mesh`='dp': expected a DeviceMesh or a process group that has this"),
        ({"mesh": dist.GroupMember.NON_GROUP_MEMBER}, "process group that has this process"),
    ],
    ids=str,
)
def test_mesh_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with process(0, 8), pytest.raises(ConfigError, match=message):
        ranks_of(**{"mesh": mesh_of(SHAPE, NAMES)} | options)


def test_process_outside_of_a_mesh_gets_no_rows() -> None:
    with process(2, 3):
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("dp",))
        with pytest.raises(ConfigError, match="this process is not in the mesh"):
            ranks_of(mesh)
