"""Several processes, connected by torch.distributed.

Hosts talk by gloo. Devices talk by the backend that torch has for them, which is NCCL for CUDA. A
rank that dies closes its connections. The other ranks notice at the next message between hosts,
which is within a step.
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
from tokenfeed.trainer.distributed.world import Gather, World

__all__ = ["ProcessGroup", "RankError", "device_named", "join_world"]

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=10)
"""A rank that sends nothing for this long counts as hung."""
_LONGEST_DISK_WAIT = datetime.timedelta(days=1)
"""Writing or reading a large checkpoint may take longer than `TIMEOUT`."""
_MOST_ELEMENTS = 1 << 26
"""Elements summed over ranks at once. Each sum needs a copy of its tensors."""
_FAILURE = "tokenfeed/failure"
_LINGER_S = 1.0
_GLOO_MESSAGE = re.compile(r"gloo/.*?\] (.*?)(?:\. |$)", re.MULTILINE)
_GROUP_ERRORS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")


class RankError(TokenfeedError, RuntimeError):
    """Another rank has failed, so this rank ends too."""


class ProcessGroup(World):
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
        self._wait_for_all = self.slow_gather()

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum copies of the tensors, concatenated into a few large ones. Write the sums back."""
        for flat in _flat(tensors):
            dist.all_reduce(flat)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast copies of the tensors, concatenated into a few large ones."""
        for flat in _flat(tensors):
            dist.broadcast(flat.view(torch.uint8), 0)  # as bytes: no backend supports every dtype

    def concatenate(self, share: Tensor) -> Tensor:
        """Gather as bytes: gloo does not know bf16."""
        whole = share.new_empty((self.size * len(share), *share.shape[1:]))
        own = share.contiguous().view(torch.uint8)
        dist.all_gather_into_tensor(whole.view(torch.uint8), own)
        return whole

    def all_reduce_async(self, counts: list[int]) -> Callable[[], list[int]]:
        """Sum by gloo, on gloo's thread."""
        sums = torch.tensor(counts)
        work = dist.all_reduce(sums, group=self._control, async_op=True)
        assert work is not None

        def wait() -> list[int]:
            work.wait()
            return sums.tolist()

        return wait

    def all_gather(self, value: T) -> list[T]:
        """Gather by gloo."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def slow_gather(self) -> Gather:
        """Gather by gloo, in a new group: messages of two threads of a group could be mistaken for
        each other. If a rank dies, its connections close and the function raises."""
        group = dist.new_group(backend="gloo", timeout=_LONGEST_DISK_WAIT)

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value, group=group)
            return values

        return gather

    def run_slow(self, job: Callable[[], T]) -> T:
        """Run a job. Then wait for the other ranks in a group of its own."""
        try:
            result = job()
        except Exception:
            self._wait_for_all(None)
            raise
        self._wait_for_all(None)
        return result

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Broadcast by gloo, as a pickle."""
        made: list[Any] = [None]
        if self.is_main:
            made = [make()]
        dist.broadcast_object_list(made, 0, group=self._control)
        found: T = made[0]
        return found

    def reason(self, error: Exception) -> str | None:
        """Return the message of the rank that failed first, or else which connection was closed."""
        is_of_group = isinstance(error, dist.DistError) or any(
            s in str(error) for s in _GROUP_ERRORS
        )
        if not is_of_group:
            return None
        with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode())
        found = _GLOO_MESSAGE.search(str(error))
        cause = found[1] if found else str(error).splitlines()[0]
        return f"another rank is gone ({cause}). See its messages; go on with --resume"

    def fail(self, error: BaseException) -> None:
        """Write the error into the store. Other ranks read it when they lose the connection."""
        if isinstance(error, RankError):
            time.sleep(_LINGER_S if self.is_main else 0)  # rank 0 may host the store
            return
        message = f"rank {self.rank} has failed: {' '.join(str(error).split()) or repr(error)}"
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILURE, message)

    def close(self) -> None:
        """Leave the group. Call this only after success: after a failure it may wait forever."""
        dist.destroy_process_group()


def join_world(device: str) -> World:
    """Return the processes that a launcher started, or this process alone.

    Args:
        device: cpu, cuda or auto.
    """
    launch = Launch.of_environment()
    if launch.size == 1:
        return World(device_named(device))
    return ProcessGroup(_own_device(device_named(device), launch), launch)


def device_named(name: str) -> torch.device:
    """Return the device that --device names: cpu, cuda or auto."""
    return default_device() if name == "auto" else resolve_device(name)


def _own_device(device: torch.device, launch: Launch) -> torch.device:
    """Return the GPU with this rank's local number, or the only visible one."""
    if device.type == "cpu":
        return device
    module = accelerator(device).module
    there = module.device_count()
    if launch.local_rank >= there > 1:
        raise ConfigError(
            f"LOCAL_RANK={launch.local_rank}, but there are {there} GPUs. Start one process "
            "per GPU."
        )
    own = torch.device(device.type, launch.local_rank if there > 1 else 0)
    module.set_device(own)
    return own


def _backends(kind: str) -> str:
    """Return torch's name of the backends for tensors on the host and on a type of device."""
    if kind == "cpu":
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


@contextlib.contextmanager
def _unflattened(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the values of tensors as one flat tensor. Afterwards write its values back."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield flat
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def _flat(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield tensors concatenated into a few flat ones, by device and dtype."""
    by_type = defaultdict(list)
    for tensor in tensors:
        by_type[tensor.device, tensor.dtype].append(tensor)
    for group in by_type.values():
        ends = itertools.accumulate(tensor.numel() for tensor in group)
        number = [(end - 1) // _MOST_ELEMENTS for end in ends]
        for _, pairs in itertools.groupby(zip(number, group, strict=True), key=lambda p: p[0]):
            with _unflattened([tensor for _, tensor in pairs]) as flat:
                yield flat
