"""Count the kernels of training steps, with their bytes and operations, on a machine without a GPU.

How kernels are counted depends on what runs:

- A compiled function: Inductor compiles it for the CPU, for two numbers of tokens. Each node of its
  schedule after fusion counts as a kernel; bytes and operations are linear in the tokens.
- Operators that run one by one: a dispatch mode sees each of them, on tensors without values.
- Code in CUDA: a list written by hand from its source.

Bytes are those that a kernel with a perfect cache moves: every input is read once, every output
written once.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

__all__ = ["Line", "Operator", "compiled", "dispatched", "in_part", "times"]

_ROW = 256
"""Tokens of a row in which a compiled function is counted."""
_CHUNK, _BLOCKS, _TENSORS = 65_536, 320, 30
"""Of torch's kernels over lists of tensors: elements of a block, blocks and tensors of a launch."""
_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_local_scalar_dense")


@dataclass(frozen=True, slots=True)
class Operator:
    """Kernels of one name. A product or attention has operations, the rest only moves bytes."""

    part: str
    name: str
    launches: float
    bytes: float
    flops: float = 0.0

    @property
    def kind(self) -> str:
        """product, attention, attention backward, or memory."""
        if "attention" in self.name or "attn" in self.name:
            return "attention backward" if "backward" in self.name else "attention"
        return "product" if self.flops else "memory"


def times(operators: list[Operator], count: float) -> list[Operator]:
    """Return the operators, run several times."""
    return [
        replace(o, launches=o.launches * count, bytes=o.bytes * count, flops=o.flops * count)
        for o in operators
    ]


def in_part(operators: list[Operator], part: str) -> list[Operator]:
    """Return the operators under the name of one part."""
    return [replace(operator, part=part) for operator in operators]


@dataclass(frozen=True, slots=True)
class Line:
    """A kernel of a compiled function, for any number of tokens."""

    name: str
    fixed_bytes: float
    """Bytes that do not depend on the tokens, such as those of weights."""
    token_bytes: float
    token_flops: float

    def at(self, part: str, tokens: int, *, times: float = 1.0, width: float = 1.0) -> Operator:
        """Return the operator for some tokens, run several times.

        Args:
            part: Name of the part of the step.
            tokens: Number of tokens.
            times: How often it runs.
            width: Width of the model, divided by the width of the compiled model.
        """
        moved = self.fixed_bytes * width**2 + self.token_bytes * width * tokens
        flops = self.token_flops * width**2 * tokens
        return Operator(part, self.name, times, times * moved, times * flops)


def compiled(make: Callable[[int], Callable[[], Tensor | None]]) -> list[Line]:
    """Return what Inductor makes of a function forward and backward.

    Args:
        make: Given a number of rows of 256 tokens, returns a call of a compiled function. If it
            returns a tensor, its backward pass counts too.
    """
    one, two = (_schedule(make(rows)) for rows in (1, 2))
    assert [name for name, *_ in one] == [name for name, *_ in two]
    return [
        Line(name, 2 * moved - twice, (twice - moved) / _ROW, flops / _ROW)
        for (name, moved, flops), (_, twice, _) in zip(one, two, strict=True)
    ]


def _schedule(call: Callable[[], Tensor | None]) -> list[tuple[str, float, float]]:
    """Return the name, bytes and operations of each kernel that Inductor schedules."""
    from torch._inductor import config, lowering
    from torch._inductor.async_compile import AsyncCompile

    found: list[tuple[str, float, float]] = []

    def note(nodes: list[Any]) -> list[Any]:
        found.extend(filter(None, map(_kernel, nodes)))
        return nodes

    def nothing(*arguments: Any) -> Any:
        return lambda *tensors: None  # in place of a kernel: its values do not matter

    plain = lowering.lowerings[torch.ops.aten.cat.default]

    def cat(parts: list[Any], dim: int = 0) -> Any:
        # As for a GPU: short lists are joined by the kernel that computes the parts.
        is_short = len(parts) <= config.max_complex_pointwise_cat_inputs
        return (lowering.pointwise_cat if is_short else plain)(parts, dim)

    joined = dict.fromkeys((torch.ops.aten.cat, torch.ops.aten.cat.default), cat)
    with (
        mock.patch.dict(lowering.lowerings, joined),
        mock.patch.object(AsyncCompile, "cpp_pybinding", nothing),
        config.patch(_post_fusion_custom_pass=note, force_disable_caches=True),
    ):
        torch._dynamo.reset()
        out = call()
        if out is not None:
            out.float().sum().backward()
    return found


def _kernel(node: Any) -> tuple[str, float, float] | None:
    """Return a node of a schedule, if it is a kernel on a GPU too."""
    if type(node.node).__name__ == "MultiOutput":
        return None
    moved = _moved(node)
    if type(node).__name__ != "ExternKernelSchedulerNode":
        return ("fused", moved, 0.0) if moved and not _copies_attention(node) else None
    operator = getattr(node.node, "op_overload", None)
    name = str(operator or getattr(node.node, "python_kernel_name", None))
    return name, moved, float(node.estimate_flops() or 0)


def _moved(node: Any) -> float:
    """Return the bytes of a node. Inductor counts a buffer of which a part is used as a whole."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    used: dict[str, float] = defaultdict(float)
    for dep in (*node.read_writes.reads, *node.read_writes.writes):
        if not isinstance(dep, MemoryDep):
            used[dep.name] = math.inf
            continue
        elements = math.prod(dep.size) if dep.is_indirect() else dep.get_numel()
        count = V.graph.sizevars.optimization_hint(elements)
        used[dep.name] += count * V.graph.get_dtype(dep.name).itemsize
    whole = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return float(sum(min(size, used.get(name, size)) for name, size in whole.items()))


def _copies_attention(node: Any) -> bool:
    """Return whether a node only changes the layout of attention's output, which a GPU's attention
    writes as the next product reads it."""
    from torch._inductor.virtualized import V

    origins = {origin.name for part in node.get_nodes() for origin in part.node.origins}
    read = [V.graph.name_to_buffer.get(dep.name) for dep in node.read_writes.reads]
    return all(name.startswith(("clone", "permute", "view")) for name in origins) and any(
        type(buffer).__name__ == "MultiOutput" and "attention" in str(buffer.inputs[0].op_overload)
        for buffer in read
        if buffer is not None
    )


@contextmanager
def dispatched(part: str) -> Iterator[list[Operator]]:
    """Collect the operators that run in the block, one by one."""
    found: list[Operator] = []
    with _Counter(part, found):
        yield found


class _Counter(TorchDispatchMode):
    def __init__(self, part: str, found: list[Operator]) -> None:
        super().__init__()
        self._part, self._found = part, found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name, schema = function.name(), function._schema
        is_view = any(a.alias_info and not a.alias_info.is_write for a in schema.arguments)
        if is_view or name.startswith((*_NO_KERNEL, "prim", "profiler")):
            return out
        tensors = list(_tensors((args, kwargs)))
        values = [*args, *(kwargs or {}).values()]
        changed = [
            value
            for argument, value in zip(schema.arguments, values, strict=False)
            if argument.alias_info and argument.alias_info.is_write
        ]
        made = [t for t in _tensors(out) if all(t is not other for other in tensors)]
        moved = sum(map(_bytes, (*tensors, *_tensors(changed), *made)))
        flops = flop_registry.get(function.overloadpacket)
        operations = flops(*args, **(kwargs or {}), out_val=out) if flops else 0
        operator = Operator(self._part, name, _launches(name, args), moved, operations)
        if operator.kind.startswith("attention"):  # causal: a query attends to half of the row
            operator = replace(operator, flops=operator.flops / 2)
        self._found.append(operator)
        return out


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _launches(name: str, args: Any) -> int:
    if not name.startswith(("aten::_foreach", "aten::_fused")):
        return 1
    first = list(_tensors(args[0]))
    blocks = sum(-(-tensor.numel() // _CHUNK) for tensor in first)
    return max(-(-blocks // _BLOCKS), -(-len(first) // _TENSORS))
