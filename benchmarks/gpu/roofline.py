"""How fast would a step of GPT-2 124M be on an H100? Predicted from counted kernels, on a CPU.

A step has 64 rows of 1,024 tokens in bf16. Inductor compiles a block and the loss for the CPU, and
each node of its schedule counts as a kernel of the GPU: with its bytes, if every input is read and
every output written once, its operations, and its exponentials. What runs outside of compiled
functions is listed by hand, and so are the steps of other projects, from their traces and sources.

The rates are from traces of one H100 (results/gpu-beside-h100.json). That of bytes is the one with
which this package before its rewrites, nanoGPT and nanochat are right on average. llm.c, which has
no trace, is the check. The model is refuted where it is further off than 5 %. Nothing was measured
since the rewrites.

usage: python -m benchmarks.gpu.roofline        # writes results/roofline.json
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import sympy
import torch
from torch import Tensor
from torch._inductor import config as inductor

from benchmarks.gpu.before import REWRITES, leave_out
from benchmarks.protocol import write_result
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models import build
from tokenfeed.trainer.models.gpt import ModelSize, Transformer
from tokenfeed.trainer.tasks import vocabulary_loss

BYTES_PER_S, EXPONENTIALS_PER_S = 2.65e12, 2.75e12
"""A kernel with a reduction takes exponentials after its bytes, any other one meanwhile."""
PRODUCTS = {"large": 838e12, "small": 695e12}
"""Operations per second of the products of a vocabulary, and of all others."""
ATTENTION = {64: (323e12, 215e12), 128: (455e12, 273e12)}
"""Operations per second of cuDNN's causal attention and of its gradient, by width of a head."""
GAPS = 1.04
"""Time of a step by that of its kernels: 1.02 to 1.05 in the traces."""
VOCABULARY, CHUNK, ROW = 50_304, 8192, 256
EXPONENTIALS = ("exp", "exp2", "tanh", "erf", "log", "sigmoid")
_DIVISIONS = {
    "FloorDiv": lambda value, by: value // by,
    "ModularIndexing": lambda value, by, modulus: value // by % modulus,
}
"""Inductor's functions of indices, for numpy."""
MEASURED = {
    "tokenfeed before its rewrites": (503_951, 511_315),
    "nanoGPT": (490_134, 495_579),
    "nanochat": (467_844, 476_713),
    "llm.c": (540_295, 540_295),
}
"""Tokens per second on the H100, the least and the most of the runs."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Some kernels of a step. `kind`: memory, reduction, large, small, attention, gradient."""

    kind: str
    count: float
    bytes: float
    operations: float = 0.0
    exponentials: float = 0.0

    def times(self, number: float) -> "Kernels":
        """Return the kernels, run several times."""
        values = self.count, self.bytes, self.operations, self.exponentials
        return Kernels(self.kind, *(number * value for value in values))

    def milliseconds(self, head_width: int) -> float:
        """Return the time that they take on an H100."""
        move, special = self.bytes / BYTES_PER_S, self.exponentials / EXPONENTIALS_PER_S
        if self.kind in PRODUCTS:
            return 1e3 * max(move, self.operations / PRODUCTS[self.kind])
        if self.kind in ("attention", "gradient"):  # of narrow heads, no trace is known
            rates = ATTENTION.get(head_width, ATTENTION[64])
            return 1e3 * max(move, self.operations / rates[self.kind == "gradient"])
        return 1e3 * (move + special if self.kind == "reduction" else max(move, special))


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and its step of one micro-batch."""

    layers: int
    width: int
    heads: int
    length: int
    tokens: int = 65_536

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return 12 * self.layers * self.width**2 + VOCABULARY * self.width

    @property
    def logits(self) -> float:
        """Number of logits of a step."""
        return float(VOCABULARY * self.tokens)

    def softmax(self, count: int, passes: int, exponentials: int) -> Kernels:
        """Return kernels that read or write each logit so often, and take so many exponentials."""
        return Kernels(
            "reduction", count, 2 * passes * self.logits, 0.0, exponentials * self.logits
        )

    def memory(self, count: int, values: float, rest: float = 0.0) -> Kernels:
        """Return kernels that move so many rows of `width` values of bf16 for each token."""
        return Kernels("memory", count, 2.0 * values * self.width * self.tokens + rest)

    def product(self, inputs: float, outputs: float, kind: str = "small") -> Kernels:
        """Return a product of rows of these widths, in units of the model's."""
        rows, matrix = (
            (inputs + outputs) * self.tokens * self.width,
            inputs * outputs * self.width**2,
        )
        return Kernels(kind, 1, 2.0 * (rows + matrix), 2.0 * matrix * self.tokens)

    def attention(self, moved: float = 4.0) -> list[Kernels]:
        """Return the causal attention of a layer, and its gradient."""
        one = Kernels("attention", 1, 0.0, 2.0 * self.tokens * self.length * self.width)
        one = replace(one, bytes=self.memory(1, moved).bytes)
        return [one, replace(one.times(2.5), kind="gradient", count=3)]


GPT2, TINY = Size(12, 768, 12, 1024), Size(6, 128, 4, 256)


def counted(size: Size, make: Callable[[int], Callable[[], Tensor | None]]) -> list[Kernels]:
    """Return the kernels of a compiled function for all tokens of a step, forward and backward.
    `make` returns a call of it for a number of rows; if it gives no tensor, it has no backward."""
    both = [_scheduled(make(rows)) for rows in (1, 2)]
    found = []
    for one, two in zip(*both, strict=True):
        scale = size.tokens / ROW
        moved = 2 * one.bytes - two.bytes + (two.bytes - one.bytes) * scale
        found.append(replace(one.times(scale), count=1, bytes=moved))
    attention = dict(zip(("attention", "gradient"), size.attention(), strict=True))
    return [attention.get(each.kind, each) for each in found]


def _scheduled(call: Callable[[], Tensor | None]) -> list[Kernels]:
    from torch._inductor import lowering
    from torch._inductor.async_compile import AsyncCompile

    found: list[Kernels] = []
    cat = torch.ops.aten.cat
    plain = lowering.lowerings[cat.default]

    def note(nodes: list[Any]) -> list[Any]:
        found.extend(filter(None, map(_kernel, nodes)))
        return nodes

    def joined(parts: list[Any], dim: int = 0) -> Any:  # as for a GPU: by the kernel of the parts
        is_short = len(parts) <= inductor.max_complex_pointwise_cat_inputs
        join: Any = lowering.pointwise_cat if is_short else plain
        return join(parts, dim)

    with (
        mock.patch.dict(lowering.lowerings, dict.fromkeys((cat, cat.default), joined)),
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_: None),
        inductor.patch(build.CHOICES),  # as `compile_model` does
        inductor.patch(_post_fusion_custom_pass=note, force_disable_caches=True),
        inductor.patch({"cpp.vec_isa_ok": True}),  # nothing is compiled for it
        torch.autocast("cpu", torch.bfloat16),
    ):
        torch._dynamo.reset()
        out = call()
        if out is not None:
            out.float().sum().backward()  # type: ignore[no-untyped-call]
    return found


def _kernel(node: Any) -> Kernels | None:
    """Return a node of a schedule, if it is a kernel on a GPU too."""
    moved = _moved(node)
    if type(node.node).__name__ == "MultiOutput":
        return None
    if type(node).__name__ == "ExternKernelSchedulerNode":
        name = str(getattr(node.node, "op_overload", None))
        if "attention" in name:
            return Kernels("gradient" if "backward" in name else "attention", 1, moved)
        operations = float(node.estimate_flops() or 0)
        if "gelu" in name:
            rows, weight = (each.get_size() for each in node.node.inputs[:2])
            return Kernels("small", 1, moved, 2.0 * math.prod(map(float, (rows[0], *weight))))
        widest = max(node.node.get_size())
        return Kernels("large" if widest >= VOCABULARY else "small", 1, moved, operations)
    if not moved or _copies_attention(node) or _sums_over_tokens(node):
        return None
    exponentials = 0.0
    for part in node.get_nodes():
        sizes, reduced = part.get_ranges()
        counts = part._body.op_counts
        each = sum(counts[name] for name in EXPONENTIALS)
        exponentials += each * math.prod(map(int, (*sizes, *reduced)))
    kind = "reduction" if node.is_reduction() else "memory"
    return Kernels(kind, 1, moved, exponentials=exponentials)


def _moved(node: Any) -> float:
    """Return the bytes of a node: each element that it reads or writes, once for reading and once
    for writing. Inductor would count a buffer of which a part is used as a whole."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    whole = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    used: dict[str, float] = {}
    for deps in (node.read_writes.reads, node.read_writes.writes):
        by_name: dict[str, list[Any]] = {}
        for dep in deps:
            by_name.setdefault(dep.name, []).append(dep)
        for name, found in by_name.items():
            size = math.inf
            if all(isinstance(dep, MemoryDep) for dep in found):
                elements = V.graph.sizevars.optimization_hint(_elements(found))
                size = elements * V.graph.get_dtype(name).itemsize
            used[name] = used.get(name, 0.0) + size
    return float(sum(min(size, used.get(name, size)) for name, size in whole.items()))


def _elements(deps: list[Any]) -> Any:
    """Return the number of different elements of a buffer at some indices."""
    if any(dep.is_indirect() for dep in deps):
        return sum(math.prod(dep.size) for dep in deps)
    if len(deps) == 1:
        return deps[0].get_numel()
    places = [
        np.broadcast_to(
            sympy.lambdify(dep.var_names, dep.index, [_DIVISIONS, "numpy"])(
                *np.ogrid[tuple(slice(int(size)) for size in dep.size)]
            ),
            tuple(map(int, dep.size)),
        )
        for dep in deps
    ]
    return len(np.unique(np.concatenate([each.ravel() for each in places])))


def _copies_attention(node: Any) -> bool:
    """Return whether a node only changes the layout of attention's output, which a GPU's attention
    writes as the next product reads it."""
    from torch._inductor.virtualized import V

    origins = {origin.name for part in node.get_nodes() for origin in part.node.origins}
    read: list[Any] = [V.graph.name_to_buffer.get(dep.name) for dep in node.read_writes.reads]
    return all(name.startswith(("clone", "permute", "view")) for name in origins) and any(
        type(buffer).__name__ == "MultiOutput" and "attention" in str(buffer.inputs[0].op_overload)
        for buffer in read
    )


def _sums_over_tokens(node: Any) -> bool:
    """Return whether a node makes gradients of a norm's weights. The traces have no kernel for
    them: a GPU takes them from what the gradient of the norm's input reads (Inductor's mix-order
    reductions)."""
    summed = {math.prod(map(int, part.get_ranges()[1])) for part in node.get_nodes()}
    return bool(summed - {1}) and summed <= {1, ROW, 2 * ROW}


def block_of(size: Size, *, fuses_gelu: bool = False) -> list[Kernels]:
    """Return the kernels of a compiled block of this package. `fuses_gelu`: products apply GELU."""
    head = Head(kind="vocabulary", outputs=VOCABULARY, vocabulary_size=VOCABULARY)

    def make(rows: int) -> Any:
        model = Transformer(ModelSize(layers=1, width=size.width, heads=size.heads), head)
        micro_batch = MicroBatch.of_ids(torch.zeros(rows, ROW, dtype=torch.int64), causal=True)
        rotary = model.rotary(micro_batch.positions_BT, torch.bfloat16)
        block: Any = model.blocks[0]
        block.fuses_gelu = fuses_gelu
        run: Any = torch.compile(block, dynamic=False)
        x = torch.randn(rows, ROW, size.width, dtype=torch.bfloat16, requires_grad=True)
        return lambda: run(x, rotary, micro_batch.scope)

    return counted(size, make)


def loss_of(size: Size) -> list[Kernels]:
    """Return the kernels of the compiled loss."""

    def make(rows: int) -> Any:
        logits = torch.randn(rows * ROW, VOCABULARY).bfloat16()
        targets = torch.zeros(rows * ROW, dtype=torch.int64)
        run: Any = torch.compile(vocabulary_loss.loss_and_error, dynamic=False)
        return lambda: run(logits, targets, wants_error=True) and None

    return counted(size, make)


def tokenfeed(
    size: Size, block: list[Kernels], loss: list[Kernels], *, rewritten: bool = True
) -> list[Kernels]:
    """Return the kernels of `train --compile`, given those of a block and of the loss.

    The trace has one kernel for all passes over the logits of a chunk: what the first one reads,
    the next ones find in the cache. Before the rewrites, a GPU found maximum and sum of a softmax
    at once, with one exponential more for each logit, and a product for the gradient of the head
    was rounded, written, read and added.
    """
    table, chunks, logits = 4.0 * VOCABULARY * size.width, size.tokens / CHUNK, size.logits
    moved = sum(each.bytes for each in loss) - 2 * logits
    exponentials = sum(each.exponentials for each in loss) + (0 if rewritten else logits)
    return [
        *(each.times(size.layers) for each in block),
        Kernels("reduction", chunks, moved, exponentials=exponentials),
        *[size.product(1, VOCABULARY / size.width, "large")] * 3,
        Kernels("memory", chunks, chunks * table * (2 if rewritten else 3)),
        size.memory(19, 21, 4 * table),  # the embedding, the last norm, and their gradients
        Kernels("memory", 35, 32.0 * size.parameters),  # the norm of the gradient, and AdamW
    ]


def other(size: Size, layer: Kernels, loss: Kernels, rest: list[Kernels]) -> list[Kernels]:
    """Return the kernels of a GPT-2 of another project: `layer` is what a layer has besides
    products and attention, `loss` turns logits into their gradient, `rest` is not in layers."""
    products = [size.product(*each).times(3) for each in ((1, 3), (1, 1), (1, 4), (4, 1))]
    layers = [each.times(size.layers) for each in (*products, *size.attention(), layer)]
    return [*layers, *[size.product(1, VOCABULARY / size.width, "large")] * 3, loss, *rest]


def llm_c(size: Size) -> list[Kernels]:
    """Return the kernels of `train_gpt2.cu -ge 1` with cuDNN: all in bf16, with biases."""
    rest = [size.memory(6, 13), Kernels("memory", 18, 30.0 * size.parameters)]
    return other(size, size.memory(13, 41), size.softmax(1, 2, 2), rest)


def nanogpt(size: Size) -> list[Kernels]:
    """Return the kernels of nanoGPT: compiled as a whole, layers added in fp32. Its trace has fills
    of 5.9 GB."""
    rest = [size.memory(8, 10, 5.9e9), Kernels("memory", 24, 40.0 * size.parameters)]
    return other(size, size.memory(9, 58), size.softmax(2, 3, 3), rest)


def nanochat(size: Size) -> list[Kernels]:
    """Return the kernels of nanochat: compiled as a whole, value embeddings in every other layer,
    logits under tanh, and Newton-Schulz: 15 products of each matrix's narrow side."""
    table, tables = 2.0 * VOCABULARY * size.width, size.layers // 2
    matrices = size.parameters - table / 2
    rest = [
        size.memory(4 + 3 * tables, 12 + 5 * tables, 2 * tables * table),
        Kernels("small", 30 * size.layers, 56 * matrices, 30 * matrices * size.width),
        Kernels("memory", tables + 2, 10 * table * (tables + 2)),
    ]
    return other(size, size.memory(32, 75), size.softmax(2, 3, 5), rest)


def predicted(name: str, size: Size, kernels: list[Kernels]) -> dict[str, Any]:
    """Return what is predicted of a step, beside what was measured."""
    parts: dict[str, float] = {}
    for each in kernels:
        took = each.milliseconds(size.width // size.heads)
        parts[each.kind] = parts.get(each.kind, 0.0) + took
    rate = 1e3 * size.tokens / (GAPS * sum(parts.values()))
    found: dict[str, Any] = {"trainer": name, "tokens_per_s": round(rate)}
    if name in MEASURED:
        measured = MEASURED[name]
        found |= {"measured": measured, "difference": round(2 * rate / sum(measured) - 1, 3)}
    if name.startswith("tokenfeed"):
        found["kernels"] = round(sum(each.count for each in kernels))
    return found | {
        "gigabytes": round(sum(each.bytes for each in kernels) / 1e9, 1),
        "milliseconds": {kind: round(took, 1) for kind, took in parts.items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    narrow = replace(GPT2, heads=6)
    results = []

    def add(name: str, size: Size, kernels: list[Kernels]) -> None:
        results.append(predicted(name, size, kernels))
        print(results[-1], flush=True)

    add("llm.c", GPT2, llm_c(GPT2))
    add("nanoGPT", GPT2, nanogpt(GPT2))
    add("nanochat", narrow, nanochat(narrow))
    loss = loss_of(GPT2)
    add("tokenfeed", GPT2, tokenfeed(GPT2, block_of(GPT2), loss))
    fused = tokenfeed(GPT2, block_of(GPT2, fuses_gelu=True), loss)
    add("tokenfeed, GELU in products that stay as fast", GPT2, fused)
    add("tokenfeed, tiny", TINY, tokenfeed(TINY, block_of(TINY), loss))
    leave_out(list(REWRITES))
    before = tokenfeed(GPT2, block_of(GPT2), loss, rewritten=False)
    add("tokenfeed before its rewrites", GPT2, before)
    print(write_result("roofline", results, device="none: an H100 is predicted"))


if __name__ == "__main__":
    main()
