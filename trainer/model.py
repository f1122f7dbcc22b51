"""The built-in model: a decoder-only transformer in a few sizes.

Pre-norm, causal attention through `scaled_dot_product_attention`, tied embeddings, no biases, no
dropout. Positions are rotary: a packed row starts documents anywhere, so only the distance between
two tokens means something, and no parameter ties a checkpoint to a length. The price is two
multiplications more per attention input than with learned positions.
A document may attend to those packed before it in its row; padding comes last in a row, where
causal attention hides it from every real token, so neither needs a mask.

Shapes: B rows, T tokens, D width, H heads, K width of a head, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.trainer.config import ModelName

__all__ = ["SIZES", "ModelSize", "Transformer"]

_INITIAL_STD = 0.02
_ROTARY_BASE = 10_000.0
_VOCABULARY_MULTIPLE = 64
"""Logits this wide keep the largest matrix product of the model on tensor cores' tiles. The extra
ids occur in no text, so they are only ever pushed down; their weights do not count as a cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The numbers that make a model tiny or large."""

    layers: int
    width: int
    heads: int


SIZES: dict[ModelName, ModelSize] = {
    "tiny": ModelSize(layers=6, width=128, heads=4),
    "mini": ModelSize(layers=6, width=384, heads=6),
    "small": ModelSize(layers=8, width=512, heads=8),
    "gpt2": ModelSize(layers=12, width=768, heads=12),
}


class Transformer(nn.Module):
    """Token ids to the logits of the next token."""

    def __init__(self, size: ModelSize, vocabulary_size: int) -> None:
        super().__init__()
        padded = math.ceil(vocabulary_size / _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        self.embedding = nn.Embedding(padded, size.width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self._head_width = size.width // size.heads
        self._initialize(size.layers)

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        """Logits, shape (B, T, V) with V padded up; the last of a row have no target."""
        rotary = _rotary_angles(input_ids_BT.shape[1], self._head_width, input_ids_BT.device)
        x_BTD = self.embedding(input_ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary)
        return F.linear(self.norm(x_BTD), self.embedding.weight)

    @property
    def num_parameters(self) -> int:
        """Parameters, the shared embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialize(self, layers: int) -> None:
        """GPT-2's: the projections into the residual stream shrink with the number of its terms."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            into_residual = name.endswith("_out.weight")
            std = _INITIAL_STD / math.sqrt(2 * layers) if into_residual else _INITIAL_STD
            nn.init.normal_(parameter, std=std)


class _Block(nn.Module):
    """One layer: attention and a feed-forward network, each added to the residual stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.width
        self._heads = size.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD), rotary)
        hidden = F.gelu(self.feed_in(self.feed_norm(x_BTD)), approximate="tanh")
        feed_BTD: Tensor = self.feed_out(hidden)
        return x_BTD + feed_BTD

    def _attend(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads_BTHK = self.attention_in(x_BTD).unflatten(-1, (3 * self._heads, -1))
        query_BHTK, key_BHTK, value_BHTK = heads_BTHK.transpose(1, 2).chunk(3, dim=1)
        mixed_BHTK = F.scaled_dot_product_attention(
            _rotate(query_BHTK, rotary), _rotate(key_BHTK, rotary), value_BHTK, is_causal=True
        )
        out_BTD: Tensor = self.attention_out(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


def _rotary_angles(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, shape (T, K / 2), once per forward."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, _ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def _rotate(x_BHTK: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (k, k + K/2) of a head by its position's angle."""
    cosine, sine = (part.to(x_BHTK.dtype) for part in rotary)
    left, right = x_BHTK.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
