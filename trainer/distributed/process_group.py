"""Several processes, by torch.distributed: gloo between hosts, and between devices the backend that
torch has for them, which is NCCL for CUDA.

A rank that dies closes its connections, so the others find out at the next message from host to
host: within a step.
"""

import contextlib
import datetime
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.feeding.devices import accelerator, default_device, resolve_device
from tokenfeed.trainer.distributed.launcher import Launch
from tokenfeed.trainer.distributed.world import World

__all__ = ["Group", "RankError", "chosen_device", "join_world"]

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=10)
"""Without a message for so long, another rank counts as hung."""
_MOST_ELEMENTS = 1 << 26
"""Of one sum over ranks: a copy of so many is made."""
_FAILURE = "tokenfeed/failure"
_LINGER_S = 1.0
_SAID_BY_GLOO = re.compile(r"gloo/.*?\] (.*?)(?:\. |$)", re.MULTILINE)
_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")


class RankError(TokenfeedError, RuntimeError):
    """Another rank has ended, and this one with it."""


class Group(World):
    """One process of several."""

    def __init__(self, device: torch.device, launch: Launch) -> None:
        super().__init__(device)
        self.rank, self.size = launch.rank, launch.size
        self._store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
        self._store = PrefixStore(str(launch.restarts), self._store)
        dist.init_process_group(
            _backends(device.type),
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
            device_id=None if device.type == "cpu" else device,
        )
        self._control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Add up copies, few and large ones; the sums are put back."""
        for flat in _flat(tensors):
            dist.all_reduce(flat)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Send copies, few and large ones."""
        for flat in _flat(tensors):
            dist.broadcast(flat.view(torch.uint8), 0)  # no backend knows every dtype

    def add_up_later(self, counts: list[int]) -> Callable[[], list[int]]:
        """By gloo, in a thread of its own."""
        sums = torch.tensor(counts)
        work = dist.all_reduce(sums, group=self._control, async_op=True)
        assert work is not None

        def wait() -> list[int]:
            work.wait()
            return sums.tolist()

        return wait

    def gathered(self, value: T) -> list[T]:
        """By gloo."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """By gloo, as a pickle."""
        made: list[Any] = [None]
        if self.is_main:
            made = [make()]
        dist.broadcast_object_list(made, 0, group=self._control)
        found: T = made[0]
        return found

    def reason(self, error: Exception) -> str | None:
        """What the rank said that failed first, or else who closed the connection."""
        is_of_group = isinstance(error, dist.DistError) or any(s in str(error) for s in _SIGNS)
        if not is_of_group:
            return None
        with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode())
        found = _SAID_BY_GLOO.search(str(error))
        said = found[1] if found else str(error).splitlines()[0]
        return f"another rank is gone ({said}). See what it said; go on with --resume"

    def fail(self, error: BaseException) -> None:
        """In the store, which the others read when they lose the connection."""
        if isinstance(error, RankError):
            time.sleep(_LINGER_S if self.is_main else 0)  # it may be the host of the store
            return
        said = f"rank {self.rank} has failed: {' '.join(str(error).split()) or repr(error)}"
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILURE, said)

    def close(self) -> None:
        """Only after success: after a failure the others may be anywhere."""
        dist.destroy_process_group()


def join_world(device: str) -> World:
    """The processes that a launcher started, or this one alone.

    Args:
        device: cpu, cuda or auto.
    """
    launch = Launch.of_environment()
    if launch.size == 1:
        return World(chosen_device(device))
    return Group(_own_device(chosen_device(device), launch), launch)


def chosen_device(name: str) -> torch.device:
    """What --device means here: cpu, cuda or auto."""
    return default_device() if name == "auto" else resolve_device(name)


def _own_device(device: torch.device, launch: Launch) -> torch.device:
    """The GPU of this rank: that of its number, or the only one that it is shown."""
    if device.type == "cpu":
        return device
    module = accelerator(device).module
    there = module.device_count()
    if launch.local_rank >= there > 1:
        raise ConfigError(
            f"LOCAL_RANK={launch.local_rank}, but there are {there} GPUs. Start one process a GPU."
        )
    own = torch.device(device.type, launch.local_rank if there > 1 else 0)
    module.set_device(own)
    return own


def _backends(kind: str) -> str:
    """Of tensors on the host, and on devices of a type."""
    if kind == "cpu":
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


@contextlib.contextmanager
def _unflattened(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The values of tensors one after the other; what becomes of them is put back."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield flat
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def _flat(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors in a few flat ones, by device and dtype."""
    alike = defaultdict(list)
    for tensor in tensors:
        alike[tensor.device, tensor.dtype].append(tensor)
    for group in alike.values():
        ends = itertools.accumulate(tensor.numel() for tensor in group)
        number = [(end - 1) // _MOST_ELEMENTS for end in ends]
        for _, pairs in itertools.groupby(zip(number, group, strict=True), key=lambda p: p[0]):
            with _unflattened([tensor for _, tensor in pairs]) as flat:
                yield flat
