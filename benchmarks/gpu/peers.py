"""The training steps of other projects, as lists of operators: llm.c, nanochat, modded-nanogpt.

Those of nanochat and modded-nanogpt are compiled from modules with the same layers as theirs. The
list of llm.c is from its source: `train_gpt2.cu`, with the options of its scripts.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.operators import Line, Operator, compiled, times

__all__ = ["Size", "attention_flops", "llm_c", "nanochat"]


_WIDTH, _HEADS = 768, 6
"""Of the layers that are compiled. Wider ones are scaled from them."""


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT-2 or nanochat, and its step."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    tokens: int
    """Of a micro-batch on one GPU."""
    micro_batches: int = 1
    ranks: int = 8
    """GPUs that share the optimizer's work."""
    keys: float | None = None
    """Keys that a query attends to, on average over queries and layers. Default: half a row."""

    @property
    def matrices(self) -> int:
        """Weights of the matrices of all layers."""
        return 12 * self.layers * self.width**2


def attention_flops(size: Size) -> float:
    """Return the operations of the forward pass of one layer's attention."""
    return 4.0 * size.tokens * (size.keys or size.length / 2) * size.width


def llm_c(size: Size) -> list[Operator]:
    """Return the kernels of llm.c with cuDNN, `-r 0 -ge 1 -z 1`: everything in bf16, AdamW shared.

    Every kernel is given by the numbers of `width` values that it reads and writes per token.
    """
    rows, width = size.tokens, size.width
    value = 2.0 * rows * width

    def memory(part: str, name: str, values: float) -> Operator:
        return Operator(part, name, 1, values * value)

    def product(part: str, name: str, reads: float, writes: float) -> Operator:
        """Of matrices with `reads * width` and `writes * width` columns, or their gradients."""
        weight = 2 * reads * writes * width**2
        return Operator(
            part, name, 1, (reads + writes) * value + weight, rows * reads * writes * 2 * width**2
        )

    attend = attention_flops(size)
    layer = [
        product("blocks", "qkv", 1, 3),
        Operator("blocks", "attention", 1, 4 * value, attend),
        product("blocks", "projection", 1, 1),
        memory("blocks", "residual and norm", 4),
        product("blocks", "up, with gelu", 1, 4),
        memory("blocks", "the other output of the product with gelu", 4),
        product("blocks", "down", 4, 1),
        memory("blocks", "residual and norm", 4),
        memory("blocks", "bias backward", 1),
        product("blocks", "down backward", 1, 4),
        memory("blocks", "gelu backward", 12),
        product("blocks", "down weight", 1, 4),
        memory("blocks", "bias backward", 4),
        product("blocks", "up backward", 4, 1),
        product("blocks", "up weight", 4, 1),
        memory("blocks", "norm backward", 4),
        memory("blocks", "bias backward", 1),
        product("blocks", "projection backward", 1, 1),
        product("blocks", "projection weight", 1, 1),
        Operator("blocks", "attention backward", 3, 8 * value, 2.5 * attend),
        memory("blocks", "bias backward", 3),
        product("blocks", "qkv backward", 3, 1),
        product("blocks", "qkv weight", 3, 1),
        memory("blocks", "norm backward", 4),
    ]
    head = size.vocabulary / width
    micro_batch = [
        memory("embedding", "encoder", 3),
        memory("embedding", "encoder backward", 4),
        memory("last norm", "norm", 2),
        memory("last norm", "norm backward", 4),
        *times(layer, size.layers),
        product("vocabulary loss", "logits", 1, head),
        memory("vocabulary loss", "fused classifier", 2 * head),
        product("vocabulary loss", "logits backward", head, 1),
        product("vocabulary loss", "logits weight", head, 1),
    ]
    parameters = size.matrices + size.vocabulary * width
    return [
        *times(micro_batch, size.micro_batches),
        Operator("clipping", "global norm", 2, 2 * parameters / size.ranks),
        # Master weights and two moments read and written, gradients read, weights written.
        Operator("optimizer", "adamw", 16 * size.ranks, 28 * parameters / size.ranks),
    ]


class _Layer(nn.Module):
    """A layer of modded-nanogpt, or of nanochat: then with value embeddings in every other one."""

    def __init__(self, width: int, heads: int, *, mixes: bool) -> None:
        super().__init__()
        self._heads = heads
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_down = nn.Linear(4 * width, width, bias=False)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.1])) if mixes else None
        self.gate = nn.Linear(32, heads, bias=False) if mixes else None

    def forward(self, x: Tensor, first: Tensor, extra: Tensor | None, turn: Any) -> Tensor:
        if self.mix is not None:
            x = self.mix[0] * x + self.mix[1] * first
        normed = F.rms_norm(x, x.shape[-1:])
        query, key, value = (
            part(normed).unflatten(-1, (self._heads, -1)) for part in (self.c_q, self.c_k, self.c_v)
        )
        if extra is not None and self.gate is not None:
            share = 2 * torch.sigmoid(self.gate(normed[..., :32]))
            value = value + share[..., None] * extra.view_as(value)
        query, key = (F.rms_norm(_turned(part, turn), part.shape[-1:]) for part in (query, key))
        mixed = F.scaled_dot_product_attention(
            *(part.transpose(1, 2).to(value.dtype) for part in (query, key, value)), is_causal=True
        )
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.c_down(F.relu(self.c_fc(F.rms_norm(x, x.shape[-1:]))).square())


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x.chunk(2, -1)
    cosine, sine = turn
    return torch.cat((left * cosine + right * sine, right * cosine - left * sine), 3).type_as(x)


def nanochat(size: Size, *, modded: bool = False) -> list[Operator]:
    """Return the kernels of nanochat in bf16, or of modded-nanogpt of October 2024.

    Both compile the whole model. A layer is the difference of two layers and one, so sums and norms
    at its border are fused as in the whole. nanochat adds layers in bf16, and modded-nanogpt in
    fp32.
    """
    kinds = [False] if modded else [False, True]
    blocks = [
        operator for extra in kinds for operator in _blocks(size, len(kinds), modded, extra=extra)
    ]
    value = (4.0 if modded else 2.0) * size.tokens * size.width
    micro_batch = [
        # Rows are read, normed and kept twice; backward: gradients are read, and added by atomics.
        Operator("embedding", "embedding", 4, 12 * value),
        *blocks,
        *_whole_loss(size, softcap=not modded),
    ]
    tables = size.vocabulary * size.width * (1 if modded else 2)
    # Five rounds of Newton-Schulz take 15 products of the narrow side per weight; 40 bytes each
    # weight and round. AdamW updates the tables. The ranks share all of it.
    muon = Operator(
        "optimizer",
        "muon",
        30 * size.layers / size.ranks,
        size.matrices * (16 + 5 * 8) / size.ranks,
        size.matrices * 5 * 6 * size.width / size.ranks,
    )
    adamw = Operator("optimizer", "adamw", 4, 28 * tables / (1 if modded else size.ranks))
    return [*times(micro_batch, size.micro_batches), muon, adamw]


def _blocks(size: Size, kinds: int, modded: bool, *, extra: bool) -> list[Operator]:
    """Return the kernels of the layers of one kind."""
    attend = {"attention": attention_flops(size), "attention backward": 2.5 * attention_flops(size)}
    found = []
    for stack, sign in zip(_stacks(modded, extra), (1, -1), strict=True):
        count = sign * size.layers / kinds
        for line in stack:
            operator = line.at("blocks", size.tokens, times=count, width=size.width / _WIDTH)
            if operator.kind in attend:  # the CPU's kernels have no formula
                operator = replace(operator, flops=count * attend[operator.kind])
            found.append(operator)
    return found


@cache
def _stacks(modded: bool, extra: bool) -> tuple[list[Line], list[Line]]:
    """Return the kernels of two layers and of one layer, compiled as one function."""
    stream = torch.float32 if modded else torch.bfloat16

    def make(count: int, rows: int) -> Any:
        stack = nn.ModuleList(_Layer(_WIDTH, _HEADS, mixes=not modded) for _ in range(count))
        x, first, more = (
            torch.randn(rows, 256, _WIDTH, dtype=stream, requires_grad=True) for _ in range(3)
        )
        angles = torch.randn(1, 256, 1, _WIDTH // _HEADS // 2).bfloat16()

        @torch.compile(dynamic=False)
        def run(x: Tensor, first: Tensor, more: Tensor) -> Tensor:
            for layer in stack:
                x = layer(x, first, more if extra else None, (angles, angles))
            return x

        def call() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return run(x, first, more)

        return call

    return compiled(partial(make, 2)), compiled(partial(make, 1))


def _whole_loss(size: Size, *, softcap: bool) -> list[Operator]:
    """Return the head and the loss, compiled as one function over all logits."""

    def make(rows: int) -> Any:
        x = torch.randn(rows * 256, size.width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(size.vocabulary, size.width, requires_grad=True)
        targets = torch.zeros(rows * 256, dtype=torch.int64)

        @torch.compile(dynamic=False)
        def run(x: Tensor, weight: Tensor) -> Tensor:
            logits = F.linear(F.rms_norm(x, x.shape[-1:]), weight).float()
            logits = 15 * torch.tanh(logits / 15) if softcap else logits
            return F.cross_entropy(logits, targets, ignore_index=-1)

        def call() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return run(x, weight)

        return call

    return [line.at("vocabulary loss", size.tokens) for line in compiled(make)]
