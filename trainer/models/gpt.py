"""The built-in models: a transformer in a few sizes, a decoder or an encoder, with one head.

Pre-norm, rotary positions, no biases. Positions count from the beginning of each document. Only the
distance between two tokens has a meaning, and no parameter ties a checkpoint to a length. The price
is two more multiplications per attention input than with learned positions.

Shapes: B rows, T tokens, D width, H heads, K width of a head, V vocabulary, C outputs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.trainer.data.attention import KeyValues, Scope, attend, product_dtype
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch

INITIAL_STD = 0.02
ROTARY_BASE = 10_000.0
_VOCABULARY_MULTIPLE = 64
"""Logits this wide keep the largest matrix product of the model on tensor cores' tiles. The extra
ids occur in no text, so they are only ever pushed down; their weights do not count as a cost."""
TOKEN_TYPES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The size of a built-in model."""

    layers: int
    width: int
    heads: int
    by_word: bool = False
    """Whether the model reads words instead of tokens, if it predicts labels."""


SIZES: dict[str, ModelSize] = {
    "words": ModelSize(layers=0, width=128, heads=4, by_word=True),
    "shallow": ModelSize(layers=2, width=128, heads=4),
    "tiny": ModelSize(layers=6, width=128, heads=4),
    "mini": ModelSize(layers=6, width=384, heads=6),
    "small": ModelSize(layers=8, width=512, heads=8),
    "gpt2": ModelSize(layers=12, width=768, heads=12),
}


class Transformer(nn.Module):
    """Token ids to logits: of the vocabulary, of a token's tags, or of a row's classes."""

    drops_attention = False
    """Whether attention weights are set to 0 at random. Dropout comes after attention here."""

    def __init__(self, size: ModelSize, head: Head, dropout: float = 0.0) -> None:
        """
        Args:
            size: Number of layers, and their width.
            head: What the logits predict, and whether attention is causal.
            dropout: Share of the values that are set to 0 in training, before and inside the
                blocks. If rows have one label, the share of whole tokens that are set to 0 too, so
                that a row is not classified by a single word.
        """
        super().__init__()
        self.embedding = nn.Embedding(padded_vocabulary(head), size.width)
        self.type_embedding = nn.Embedding(TOKEN_TYPES, size.width) if head.pairs else None
        self.blocks = nn.ModuleList(_Block(size, dropout) for _ in range(size.layers))
        self.norm = Norm(size.width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.token_dropout = nn.Dropout1d(dropout if head.kind == "row" else 0.0)
        self.pick = Pick(size) if head.kind == "row" else None
        self.head = None if head.kind == "vocabulary" else nn.Linear(size.width, head.outputs)
        self.rotary = Rotary(size.width // size.heads)
        self._initialize(size.layers)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Logits: (B, T, V) with V padded up, (B, T, C), or (B, C) for a head of rows."""
        x_BTD = self.hidden(micro_batch)
        if self.head is None:
            return F.linear(x_BTD, self.embedding.weight)
        if self.pick is not None:
            x_BTD = self.pick(x_BTD, micro_batch.is_token_BT)
        logits: Tensor = self.head(self.dropout(x_BTD))
        return logits

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Return the input of the head, (B, T, D)."""
        x_BTD = self.embedding(micro_batch.ids_BT)
        if self.type_embedding is not None:
            x_BTD = x_BTD + self.type_embedding(micro_batch.token_types_BT)
        x_BTD = self.dropout(self.token_dropout(x_BTD.to(sum_dtype(x_BTD))))
        rotary = self.rotary(micro_batch.positions_BT, product_dtype(x_BTD))
        for block, seen in zip(self.blocks, micro_batch.cache or repeat(None)):  # noqa: B905
            x_BTD = block(x_BTD, rotary, micro_batch.scope, seen)
        out_BTD: Tensor = self.norm(x_BTD)
        return out_BTD

    @property
    def head_weight(self) -> Tensor | None:
        """The matrix of the head, (V, D); None if logits are more than `hidden @ head_weight.T`."""
        return self.embedding.weight if self.head is None else None

    @property
    def attention_width(self) -> int:
        """The width that attends, summed over layers."""
        return len(self.blocks) * self.norm.normalized_shape[0]

    def new_cache(self) -> list[KeyValues]:
        """Return an empty cache of keys and values, to generate text."""
        return [KeyValues() for _ in self.blocks]

    def repeated_blocks(self) -> Iterable[nn.Module]:
        """The block that every layer uses, to be compiled once."""
        return self.blocks

    def _initialize(self, layers: int) -> None:
        """Initialize as GPT-2: projections into the residual stream shrink with the number of
        layers."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            into_residual = name.endswith("_out.weight")
            std = INITIAL_STD / math.sqrt(2 * layers) if into_residual else INITIAL_STD
            nn.init.normal_(parameter, std=std)
        if self.pick is not None:
            nn.init.zeros_(self.pick.interest.weight)


def padded_vocabulary(head: Head) -> int:
    """Return the embeddings of a model for the ids of a head."""
    return round_up(head.vocabulary_size, _VOCABULARY_MULTIPLE)


def sum_dtype(x_BTD: Tensor) -> torch.dtype:
    """Return the dtype in which layers are added: that of products, but fp32 with fp16, whose range
    a sum could leave."""
    dtype = product_dtype(x_BTD)
    return torch.float32 if dtype == torch.float16 else dtype


class Norm(nn.LayerNorm):
    """A norm in the dtype of its input. Under autocast, a GPU would copy the input to fp32."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the norm of `input`."""
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        with torch.autocast(kind, enabled=False):
            weight = self.weight.to(input.dtype)
            return F.layer_norm(input, self.normalized_shape, weight, None, self.eps)


class _Block(nn.Module):
    """One layer: attention and a feed-forward network, each added to the residual stream."""

    fused: ClassVar = {"attention_in": 3}
    """Layers that contain several matrices side by side: queries, keys and values."""
    fuses_gelu = False
    """Whether the kernels of products apply GELU: see `fuse_gelu`."""

    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__()
        width = size.width
        self._heads = size.heads
        self.attention_norm = Norm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = Norm(width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        scope: Scope,
        seen: KeyValues | None = None,
    ) -> Tensor:
        x_BTD = x_BTD + self.dropout(self._attend(self.attention_norm(x_BTD), rotary, scope, seen))
        out_BTD: Tensor = x_BTD + self.dropout(self._feed(self.feed_norm(x_BTD)))
        return out_BTD

    def _feed(self, x_BTD: Tensor) -> Tensor:
        if self.fuses_gelu:
            from tokenfeed.trainer.models.gelu_products import feed_forward

            return feed_forward(x_BTD, self.feed_in.weight, self.feed_out.weight)
        out_BTD: Tensor = self.feed_out(F.gelu(self.feed_in(x_BTD), approximate="tanh"))
        return out_BTD

    def _attend(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        scope: Scope,
        seen: KeyValues | None,
    ) -> Tensor:
        query_BHTK, key_BHTK, value_BHTK = _Heads.apply(  # type: ignore[no-untyped-call]
            x_BTD, self.attention_in.weight, *rotary, self._heads
        )
        if seen is not None:
            key_BHTK, value_BHTK = seen.add(key_BHTK, value_BHTK)
        mixed_BHTK = attend(query_BHTK, key_BHTK, value_BHTK, scope)
        out_BTD: Tensor = self.attention_out(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


class Pick(nn.Module):
    """Makes one vector of a row. Each head takes a weighted mean of the tokens, and learns the
    weights, which are equal at first. In a plain mean, the few words that tell would be lost."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self._heads = size.heads
        self.interest = nn.Linear(size.width, size.heads, bias=False)

    def forward(self, x_BTD: Tensor, is_token_BT: Tensor | None) -> Tensor:
        """(B, D)."""
        assert is_token_BT is not None, "rows with one label are not packed"
        interest_BTH = self.interest(x_BTD).masked_fill(~is_token_BT[:, :, None], -math.inf)
        parts_BTHK = x_BTD.reshape(*x_BTD.shape[:2], self._heads, -1)
        picked_BHK: Tensor = (interest_BTH.softmax(1)[..., None] * parts_BTHK).sum(1)
        return picked_BHK.flatten(1)


class Rotary(nn.Module):
    """Return cosine and sine of every position's angles, (B, T, 1, 2, K / 2), in the dtype of the
    heads: the sine is negative for the first half of a head. Called once per forward."""

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self._head_width = head_width

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See the class."""
        steps = torch.arange(0, self._head_width, 2, device=positions_BT.device)
        angles_BT1K = positions_BT[:, :, None, None] * ROTARY_BASE ** -(steps / self._head_width)
        cosine, sine = angles_BT1K.cos(), angles_BT1K.sin()
        pairs = torch.stack((cosine, cosine), -2), torch.stack((-sine, sine), -2)
        return pairs[0].to(dtype), pairs[1].to(dtype)


def rotate(x_BTHK: Tensor, rotary: tuple[Tensor, Tensor], *, back: bool = False) -> Tensor:
    """Turn each pair (k, k + K/2) of a head by its position's angle, or turn it back."""
    cosine, sine = rotary
    halves: Tensor = x_BTHK.unflatten(-1, (2, -1))  # type: ignore[no-untyped-call]
    kept, crossed = halves * cosine, halves.flip(-2) * sine
    return (kept - crossed if back else kept + crossed).flatten(-2)


class _Heads(torch.autograd.Function):
    """Queries, keys and values of all heads, (B, H, T, K) each, from the input of a layer. Queries
    and keys are rotated.

    The values have a product of their own, which attention reads as it is. Heads are moved last, so
    that torch.compile writes each part as attention reads it. The gradient is joined by `cat`, for
    one product each: see `compile_model`.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_ED: Tensor, cosine: Tensor, sine: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, ctx.dtypes = product_dtype(x_BTD), (x_BTD.dtype, weight_ED.dtype)
        x_BTD, weight_ED = x_BTD.to(dtype), weight_ED.to(dtype)
        ctx.save_for_backward(x_BTD, weight_ED, cosine, sine)
        width = x_BTD.shape[-1]
        parts_BTHK = (
            F.linear(x_BTD, rows_ED).unflatten(-1, (-1, width // heads))  # type: ignore[no-untyped-call]
            for rows_ED in (weight_ED[: 2 * width], weight_ED[2 * width :])
        )
        both_BTHK, value_BTHK = parts_BTHK
        query_BTHK, key_BTHK = rotate(both_BTHK, (cosine, sine)).chunk(2, 2)
        return query_BTHK.transpose(1, 2), key_BTHK.transpose(1, 2), value_BTHK.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        query_BTHK, key_BTHK, value_BTHK = (grad_BHTK.transpose(1, 2) for grad_BHTK in grads_BHTK)
        x_BTD, weight_ED, cosine, sine = ctx.saved_tensors
        turned_BTHK = (rotate(each, (cosine, sine), back=True) for each in (query_BTHK, key_BTHK))
        parts_BTHK = (*turned_BTHK, value_BTHK)
        grad_BTE = torch.cat(parts_BTHK, 2).flatten(2)
        of_x, of_weight = ctx.dtypes
        grad_ED = grad_BTE.flatten(0, 1).t() @ x_BTD.flatten(0, 1)
        return (grad_BTE @ weight_ED).to(of_x), grad_ED.to(of_weight), None, None, None
