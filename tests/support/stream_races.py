"""Finds memory that two streams use in no order, with the sanitizer that torch has for CUDA.

Its event handler is plain Python: it is told of kernels, of what they read and write, and of events
that are recorded and waited for. Here a simulated device tells it, whose allocator is as hostile as
the real one may be: what is freed goes at once to the next who allocates on the same stream, unless
it was recorded on another.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import EventHandler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from support.simulated_cuda import simulate


class Event:
    """Known to the sanitizer; `has_passed` is asked whether the host finds that it has."""

    def __init__(self, traced: "Traced", stream: "Stream") -> None:
        self.traced = traced
        self.number = next(traced.numbers)
        traced.handler._handle_event_record(self.number, stream.number)

    def query(self) -> bool:
        return self.traced.has_passed()

    def synchronize(self) -> None:
        self.traced.handler._handle_event_synchronization(self.number)


class Stream:
    """Known to the sanitizer; number 0 is the one that computes."""

    def __init__(self, traced: "Traced", number: int) -> None:
        self.traced, self.number = traced, number
        traced.handler._handle_stream_creation(number)

    def record_event(self) -> Event:
        return Event(self.traced, self)

    def wait_event(self, event: Event) -> None:
        self.traced.handler._handle_event_wait(event.number, self.number)

    def synchronize(self) -> None:
        self.traced.handler._handle_stream_synchronization(self.number)


@dataclass(eq=False, slots=True)
class _Block:
    """Memory of a stream."""

    address: int
    home: Stream
    is_recorded: bool = False
    """On another stream: the allocator waits for that before it gives the block away again."""


@dataclass
class Traced:
    """A device with two streams, and what was found wrong with their use."""

    has_passed: Callable[[], bool]
    races: list[str] = field(default_factory=list)
    handler: EventHandler = field(default_factory=EventHandler)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.compute, self.copy = Stream(self, 0), Stream(self, 1)
        self.current = self.compute
        self._blocks: dict[int, _Block] = {}
        self._free: dict[Stream, list[_Block]] = {self.compute: [], self.copy: []}

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """torch.cuda.stream."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Tensor.record_stream."""
        block = self._block(tensor)
        block.is_recorded |= stream is not block.home

    def launch(self, operator: str, reads: Any, writes: Any) -> None:
        """A kernel on the current stream."""
        written = {self._block(tensor).address for tensor in writes}
        known = filter(self._is_known, reads)
        read = {self._block(tensor).address for tensor in known} - written
        names: dict[int, list[str]] = {address: [] for address in written | read}
        errors = self.handler._handle_kernel_launch(
            self.current.number, read, written, set(), operator, names
        )
        self.races += [_say(error) for error in errors]

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether it is the device's: what it reads of the host is none of its memory."""
        return tensor.untyped_storage()._cdata in self._blocks

    def _block(self, tensor: torch.Tensor) -> _Block:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            free = self._free[self.current]
            block = free.pop() if free else _Block(next(self.numbers), self.current)
            self._blocks[storage._cdata] = block
            weakref.finalize(storage, self._give_free, storage._cdata)
        return self._blocks[storage._cdata]

    def _give_free(self, key: int) -> None:
        block = self._blocks.pop(key)
        if not block.is_recorded:
            self._free[block.home].append(block)


@contextlib.contextmanager
def trace(monkeypatch: pytest.MonkeyPatch, has_passed: Callable[[], bool]) -> Iterator[Traced]:
    """Replaces the CUDA of torch, for this thread; what runs on it is watched."""
    with simulate(monkeypatch):
        traced = Traced(has_passed)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: traced.copy)
        monkeypatch.setattr(torch.cuda, "stream", traced.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: traced.current)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: traced.record(*args))
        with _Kernels(traced), _Copies():
            yield traced


class _Copies(TorchFunctionMode):
    """Copies to the device what is sent there, even where both are on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == torch.Tensor.to and isinstance(args[1], torch.device):
            return args[0].clone()
        return function(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """Tells what each operator reads and writes; a view does neither."""

    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.traced = traced

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        schema, given = function._schema, kwargs or {}
        values = [*args, *(given.get(argument.name) for argument in schema.arguments[len(args) :])]
        reads, writes = [], []
        for argument, value in zip(schema.arguments, values, strict=True):
            if argument.alias_info is None:
                reads += _tensors(value)
            elif argument.alias_info.is_write:
                writes += _tensors(value)
        outs = out if len(schema.returns) > 1 else (out,)
        for returned, value in zip(schema.returns, outs, strict=True):
            if returned.alias_info is None:
                writes += _tensors(value)
        if writes or (schema.returns and not _tensors(out)):  # a value, that the host reads
            self.traced.launch(function.name(), reads, writes)
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    return [part for part in tree_iter(value) if isinstance(part, torch.Tensor)]


def _say(error: Any) -> str:
    now, before = error.current_access, error.previous_access
    return (
        f"stream {now.stream} is {now.type} what stream {before.stream} is {before.type}: "
        f"{now.operator} after {before.operator}"
    )
