"""The processes of a run: their communication, and what they agree on after each step.

Sums of tensors are queued on the device, like all computation, by the backend that torch has for
it: NCCL for CUDA. Values that the host needs go by gloo, from host to host, without waiting for a
device. Requests to stop or to save, and the counts of tokens, are one step behind: what a rank
sends after step 7, all ranks read after step 8, when the message has long arrived. So all ranks do
the same thing at the same step, and none waits. With one rank there is no delay.

A rank that dies closes its connections. The other ranks notice at the next message between hosts,
which is within a step.
"""

import datetime
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.feeding.devices import cuda, default_device, resolve_device
from tokenfeed.trainer.distributed.gpu import why_unusable

State = dict[str, Tensor]
"""Tensors by name."""
Gather = Callable[[Any], list[Any]]
"""A function that returns the values of all ranks, by rank."""

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=10)
"""A rank that sends nothing for this long counts as hung."""
_LONGEST_DISK_WAIT = datetime.timedelta(days=1)
"""Writing or reading a large checkpoint may take longer than `TIMEOUT`."""
_GLOO_MESSAGE = re.compile(r"gloo/.*?\] (.*?)(?:\. |$)", re.MULTILINE)
_GROUP_ERRORS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")


def is_sharded_tensor(tensor: Tensor) -> bool:
    """Return whether ranks hold shards of this tensor. Importing DTensor to ask takes a second."""
    return hasattr(tensor, "to_local")


def reshard(model: nn.Module) -> None:
    """Free the whole weights that an evaluation of a sharded model has left."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


class RankError(TokenfeedError, RuntimeError):
    """Another rank has failed, so this rank ends too."""


class World:
    """This process, and the others of its process group.

    Args:
        device: The device of this process.
        launched: Whether torchrun, or a launcher that sets the same variables, started this process
            with others. Otherwise it is alone, and no method communicates.
    """

    rank, size = 0, 1

    def __init__(self, device: torch.device, *, launched: bool = False) -> None:
        self.device = device
        self._wait_for_all: Gather = lambda value: [value]
        if not launched:
            return
        try:
            store, self.rank, self.size = next(rendezvous("env://", timeout=TIMEOUT))
        except ValueError as error:
            size = os.environ["WORLD_SIZE"]
            raise ConfigError(f"WORLD_SIZE={size}: {error}. Start with torchrun.") from error
        # Restarted ranks may use the same store, which still has the addresses of the ones before.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        on_cpu = device.type == "cpu"
        dist.init_process_group(
            "gloo"
            if on_cpu
            else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}",
            store=PrefixStore(restarts, store),
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
            device_id=None if on_cpu else device,
        )
        self._control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._wait_for_all = self.slow_gather()

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and logs its progress."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks. The sum is queued on the device."""
        for tensor in tensors if self.size > 1 else ():
            dist.all_reduce(tensor)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of rank 0."""
        for tensor in tensors if self.size > 1 else ():
            flat = tensor.detach().contiguous().view(-1)
            dist.broadcast(flat.view(torch.uint8), 0)  # as bytes: no backend supports every dtype
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view_as(tensor))

    def all_reduce_async(self, counts: list[int]) -> Callable[[], list[int]]:
        """Start to sum counts over ranks; return a function that waits, on the host, for the
        sums."""
        if self.size == 1:
            return lambda: counts
        sums = torch.tensor(counts)
        work = dist.all_reduce(sums, group=self._control, async_op=True)
        assert work is not None

        def wait() -> list[int]:
            work.wait()
            return sums.tolist()

        return wait

    def all_gather(self, value: T, group: Any = None) -> list[T]:
        """Return the values of all ranks, by rank. Default of `group`: that of the control
        messages."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=group or self._control)
        return values

    def slow_gather(self) -> Gather:
        """Return a function that gathers values of ranks that may wait for a disk for hours. One
        thread of each rank may call it.

        It has a group of its own: messages of two threads of a group could be mistaken for each
        other. If a rank dies, its connections close and the function raises.
        """
        if self.size == 1:
            return self.all_gather
        group = dist.new_group(backend="gloo", timeout=_LONGEST_DISK_WAIT)
        return functools.partial(self.all_gather, group=group)

    def run_slow(self, job: Callable[[], T]) -> T:
        """Run a job that waits for a disk. All ranks call this, and return when all jobs are done.

        Raises:
            Exception: What this rank's job raised. Other ranks return.
        """
        try:
            result = job()
        except Exception:
            self._wait_for_all(None)
            raise
        self._wait_for_all(None)
        return result

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Return on all ranks what `make` returns on rank 0. If it raises, all ranks end."""
        made: list[Any] = [make() if self.is_main else None]
        if self.size > 1:
            dist.broadcast_object_list(made, 0, group=self._control)
        found: T = made[0]
        return found

    def reason(self, error: Exception) -> str | None:
        """Return what torch says about a rank that is gone; None for errors of other kinds."""
        is_of_group = isinstance(error, dist.DistError) or any(
            s in str(error) for s in _GROUP_ERRORS
        )
        if self.size == 1 or not is_of_group:
            return None
        found = _GLOO_MESSAGE.search(str(error))
        cause = found[1] if found else str(error).splitlines()[0]
        return f"another rank is gone ({cause}). See its messages; go on with --resume"

    def close(self) -> None:
        """Leave the group. Call this only after success: after a failure it may wait forever."""
        if self.size > 1:
            dist.destroy_process_group()


def join_world(device: str) -> World:
    """Return the processes that a launcher started, or this process alone.

    Args:
        device: cpu, cuda or auto.
    """
    own = device_named(device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return World(own)
    if own.type != "cpu":  # the GPU with this rank's local number, or the only visible one
        local_rank, there = int(os.environ.get("LOCAL_RANK", "0")), cuda.device_count()
        if local_rank >= there > 1:
            raise ConfigError(
                f"LOCAL_RANK={local_rank}, but there are {there} GPUs. Start one process per GPU."
            )
        own = torch.device(own.type, local_rank if there > 1 else 0)
        cuda.set_device(own)
    return World(own, launched=True)


def device_named(name: str) -> torch.device:
    """Return the device that --device names: cpu, cuda or auto.

    Raises:
        ConfigError: torch cannot use the GPU, and `name` is not auto.
    """
    reason = why_unusable() if name != "cpu" else None
    if reason and name != "auto":
        raise ConfigError(f"`--device`={name}: {reason}")
    if name == "auto":
        return torch.device("cpu") if reason else default_device()
    return resolve_device(name)


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
        self.exchange([stop, save, tokens, slots])
        (tokens, slots), self._reported = self._reported, (self.tokens, self.slots)
        return self.tokens - tokens, self.slots - slots

    def ask(self, *, stop: bool) -> bool:
        """Return whether any rank requests a stop. For use between steps; delayed like
        `after_step`."""
        self.exchange([stop, False, 0, 0])
        return self.stop

    def exchange(self, counts: list[int]) -> None:
        """Receive the last messages of all ranks, and send the next one."""
        self.wait()
        self._pending = self._world.all_reduce_async(counts)
        if self._world.size == 1:
            self.wait()

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
