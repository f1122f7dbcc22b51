"""CUDA graphs on a CPU: a capture records operators with their memory, and a replay repeats them.

As on a GPU, a capture computes nothing: what it writes into older memory is undone, and what it
allocates is spoiled. A replay runs no Python of the program, so numbers that the program passed
stay those of the capture; random numbers are drawn from torch's generator as it is then. Graphs
share their memory: a replay first spoils all of it that the program does not hold.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "allclose"}
"""Operators that give values to the host, which a capture refuses."""


class Graphs:
    """All graphs of a program, from the moment when this replaces those of `torch.cuda`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, held: Callable[[], Iterable[Tensor]]
    ) -> None:
        """`held` returns what the program holds of the memory that captures allocate."""
        self.all: list[_Graph] = []
        self._held = held
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "CUDAGraph": lambda: _Graph(self),
            "graph": _capture,
            "graph_pool_handle": object,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": nullcontext,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @property
    def replays(self) -> list[int]:
        """How often each graph was replayed."""
        return [graph.replays for graph in self.all]

    def spoil(self) -> None:
        """Overwrite what captures allocated, as graphs of one pool do to each other."""
        held = set(map(_address, self._held()))
        for graph in self.all:
            for each in graph.allocated:
                if _address(each) not in held:
                    _spoil(each)


class _Graph:
    def __init__(self, graphs: Graphs) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.allocated: list[Tensor] = []
        self.replays, self._graphs = 0, graphs
        graphs.all.append(self)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        self._graphs.spoil()
        for function, args, kwargs, outputs in self.calls:
            found = filter(torch.is_tensor, tree_leaves(function(*args, **kwargs)))
            for ours, theirs in zip(outputs, found, strict=True):
                if _address(ours) != _address(theirs):
                    ours.copy_(theirs)


@contextmanager
def _capture(graph: _Graph, **_: Any) -> Iterator[None]:
    recorder = _Recorder(graph)
    try:
        with torch.random.fork_rng([]), recorder:
            yield
    finally:
        with torch.no_grad():
            for each, before in recorder.written.values():
                each.copy_(before)
            for each in graph.allocated:
                _spoil(each)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self._graph = graph
        self._new: set[int] = set()
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        """Older memory that was written to, and what was there before."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.name().removeprefix("aten::").split(".")[0] in _READS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        names = (argument.name for argument in function._schema.arguments)
        by_name = dict(zip(names, args, strict=False)) | kwargs
        written = [
            each
            for argument in function._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for each in tree_leaves(by_name.get(argument.name))
        ]
        for each in filter(torch.is_tensor, written):
            if _address(each) not in self._new:
                whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())  # type: ignore[call-overload]
                self.written.setdefault(_address(each), (whole, whole.clone()))
        given = {_address(each) for each in filter(torch.is_tensor, tree_leaves((args, kwargs)))}
        result = function(*args, **kwargs)
        outputs = [each.detach() for each in filter(torch.is_tensor, tree_leaves(result))]
        new = [each for each in outputs if _address(each) not in given]
        if new or written:  # otherwise it is a view
            self._graph.calls.append((function, args, kwargs, outputs))
            self._graph.allocated += new
            self._new |= set(map(_address, new))
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
