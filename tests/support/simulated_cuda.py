"""A CUDA device that is simulated, or another one: streams, events, page locks, errors. Its tensors
are on the CPU.

It keeps the rules that matter here. An event passes when the test says so, or when it is waited
for. A refused page lock stays the last error, which the launch of the next kernel raises as its
own. After a failed kernel every call fails. Whatever is current when it is called gets a context.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.delivery import open_loader
from tokenfeed import ShardLoader
from tokenfeed.pipeline.errors import ShardFormatError
from tokenfeed.pipeline.feeding import transfer
from tokenfeed.pipeline.feeding.window_source import Lease
from tokenfeed.pipeline.windows.rank_slice import RankSlice

CUDA_1 = torch.device("cuda:1")

_REFUSED = 2  # cudaErrorMemoryAllocation
_NOT_KERNELS = ("empty", "_to_copy", "copy_", "view", "detach", "slice", "alias", "lift_fresh")


class FakeEvent:
    """Passes when the test says so, or when it or a later one of its stream is waited for."""

    def __init__(self, stream: "FakeStream") -> None:
        self._stream = stream
        self.passed = self.was_waited_for = False

    def query(self) -> bool:
        self._stream.check()
        return self.passed

    def synchronize(self) -> None:
        self._stream.check()
        self.was_waited_for |= not self.passed
        for event in self._stream.recorded:
            event.passed = True
            if event is self:
                return


class FakeStream:
    """Keeps the events recorded on it and those it was told to wait for."""

    def __init__(self, check: Callable[[], None], mark: Callable[[], None] = lambda: None) -> None:
        self.recorded: list[FakeEvent] = []
        self.waited: list[FakeEvent] = []
        self.check, self._mark = check, mark

    @property
    def is_done(self) -> bool:
        """Whether all that was queued has passed."""
        return all(event.passed for event in self.recorded)

    def record_event(self) -> FakeEvent:
        self.recorded.append(FakeEvent(self))
        return self.recorded[-1]

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        self._mark()
        self.check()
        for event in self.recorded:
            event.passed = True


class SimulatedCuda:
    """Two streams, the runtime, and what was done with them in which order."""

    def __init__(self) -> None:
        self.copy = FakeStream(self._check, lambda: self.marks.append("wait"))
        self.compute = FakeStream(self._check)
        self.owned: list[int] = []
        """Tensors that were recorded on the compute stream."""
        self.made: list[tuple[int, int]] = []
        """Device and priority of each copy stream that was made."""
        self.launched: list[str] = []
        """Kernels, by operator."""
        self.marks: list[str] = []
        """In their order: `register`, `wait` for the copy stream, and `unregister`, or `unregister
        while it is copied from`."""
        self.locked: dict[int, tuple[int, int]] = {}
        """Size and flags of what is page-locked, by address."""
        self.contexts: set[int] = set()
        """Devices that something was done on."""
        self.current = 0
        self.refuses = self.is_broken = False
        self.last_error = 0

    def runtime(self) -> SimpleNamespace:
        """What torch.cuda.cudart() returns."""
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """torch.cuda.device: makes another device the current one."""
        self._check()
        before, self.current = self.current, device.index
        yield
        self.current = before

    def launch(self, name: str) -> None:
        """A kernel: raises what went wrong before, and forgets it."""
        self._check()
        self.launched.append(name.split(".")[0])
        error, self.last_error = self.last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: out of memory, at {name}")

    def _register(self, address: int, size: int, flags: int) -> int:
        self.contexts.add(self.current)
        self.marks.append("register")
        if self.refuses:
            self.last_error = _REFUSED
            return _REFUSED
        self.locked[address] = (size, flags)
        return 0

    def _unregister(self, address: int) -> int:
        self.contexts.add(self.current)
        waited = self.copy.is_done or self.is_broken
        self.marks.append("unregister" if waited else "unregister while it is copied from")
        del self.locked[address]
        return 0

    def _check(self) -> None:
        if self.is_broken:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")


class _OnTheCpu(TorchFunctionMode):
    """Puts on the CPU what belongs on the device."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        options = {name: _on_the_cpu(value) for name, value in (kwargs or {}).items()}
        if options.pop("pin_memory", False) and self._cuda.refuses:
            raise torch.AcceleratorError("CUDA error: out of memory, at cudaHostAlloc")
        return function(*map(_on_the_cpu, args), **options)


class _Kernels(TorchDispatchMode):
    """Launches a kernel for each operator that is one."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().removeprefix("aten::")
        if name.split(".")[0] not in _NOT_KERNELS:
            self._cuda.launch(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    """Replaces the CUDA of torch for this thread."""
    cuda = SimulatedCuda()

    def new_stream(device: torch.device, priority: int = 0) -> FakeStream:
        cuda.made.append((device.index, priority))
        return cuda.copy

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        assert stream is cuda.copy
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.compute)
    monkeypatch.setattr(torch.cuda, "cudart", cuda.runtime)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: cuda.owned.append(id(tensor))
    )
    transfer.copy_stream.cache_clear()
    with _OnTheCpu(cuda), _Kernels(cuda):
        yield cuda
    transfer.copy_stream.cache_clear()


def started(folder: Path, count: int = 5, **options: Any) -> ShardLoader:
    """A loader on the simulated device that has delivered some batches and copies the next."""
    loader = open_loader(folder, **{"device": CUDA_1, "num_workers": 1, "epochs": None} | options)
    assert len(list(islice(loader, count))) == count
    return loader


class FakeSource:
    """Windows of given sizes, of micro-batches of one token, which is their number; ready as many
    at a time as the test says, and damaged after the last one."""

    def __init__(self, cuda: SimulatedCuda, sizes: list[int], ready: int = 10**9) -> None:
        self.cuda = cuda
        self.sizes = deque(sizes)
        self.ready = ready
        self.taken: list[int] = []
        self.last_copy: dict[int, int] = {}
        """Which copy is the last of each window."""
        self.released: list[int] = []
        self.most_held = 0

    def take(self) -> Lease:
        if not self.sizes:
            raise ShardFormatError("damaged")
        number, size = len(self.taken), self.sizes.popleft()
        self.taken.append(size)
        self.ready -= 1
        self.last_copy[number] = sum(self.taken) - 1
        self.most_held = max(self.most_held, len(self.taken) - len(self.released))
        rank_slice = slice_of(sum(self.taken) - size, size)
        return Lease(rank_slice, 0.0, 1, lambda: self._release(number))

    def _release(self, number: int) -> None:
        assert self.cuda.copy.recorded[self.last_copy[number]].passed, "a copy still reads it"
        assert number not in self.released
        self.released.append(number)

    def is_ready(self) -> bool:
        return self.ready > 0

    def close(self) -> None:
        pass


def slice_of(first: int, count: int) -> RankSlice:
    """Micro-batches of one token, which is their number."""
    ones, offsets = np.ones(count, np.int64), np.arange(count + 1)
    return RankSlice(
        columns={"input_ids": np.arange(first, first + count, dtype=np.uint16)},
        rows=offsets[:-1],
        piece_lengths=ones.astype(np.int32),
        starts=None,
        row_targets=None,
        sequence_lengths=ones.astype(np.int32),
        sequence_offsets=None,
        batch_offsets=offsets,
        piece_offsets=offsets,
        token_offsets=offsets,
        padded_lengths=ones,
        num_targets=0 * ones,
        segments=None,
        segment_offsets=None,
        is_filler=np.zeros(count, bool),
        positions=offsets[1:],
        steps=ones,
        digests=np.zeros(count, np.uint64),
        source_tokens=ones[:, None],
        left_out=np.zeros(2, np.int64),
    )


def _on_the_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type in ("cuda", "xpu"):
        return torch.device("cpu")
    return value
