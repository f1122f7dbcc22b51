"""The step without its rewrites, to be measured beside it: what `speed without X` leaves out.

Each function puts one part of the step back to what it was, in this process.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenfeed.trainer.models import build, gelu_products, gpt
from tokenfeed.trainer.tasks import vocabulary_loss

__all__ = ["REWRITES", "leave_out"]


def _former_heads() -> None:
    """One product gives queries, keys and values. Heads are moved before they are rotated, values
    copied, and gradients written part by part."""
    for name in ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs"):
        build.CHOICES.pop(name, None)

    class Former:
        @staticmethod
        def apply(x_BTD: Tensor, weight_ED: Tensor, *rest: Any) -> Any:
            return _Heads.apply(F.linear(x_BTD, weight_ED), *rest)  # type: ignore[no-untyped-call]

    gpt._Heads = Former  # type: ignore[misc, assignment]


def _former_softmax() -> None:
    """The compiler finds maximum and sum of a softmax at once."""
    build.CHOICES.pop("online_softmax", None)


def _former_product() -> None:
    """Products for the head's gradient are rounded, written, and added."""
    vocabulary_loss.adds_in_fp32 = lambda sum_VD, left_VC: False


def _former_gelu() -> None:
    """GELU and its gradient are kernels of their own."""
    gelu_products.can_fuse = lambda *_: False


REWRITES: dict[str, Callable[[], None]] = {
    "heads": _former_heads,
    "softmax": _former_softmax,
    "head gradient": _former_product,
    "GELU": _former_gelu,
}


def leave_out(names: list[str]) -> None:
    """Put these parts back to what they were."""
    for name in names:
        REWRITES[name]()


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product_BTD: Tensor, cosine: Tensor, sine: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        query_BHTK, key_BHTK, value_BHTK = (
            part_BTD.unflatten(-1, (heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for part_BTD in product_BTD.chunk(3, dim=-1)
        )
        rotary = cosine.transpose(1, 2), sine.transpose(1, 2)
        rotated = gpt.rotate(query_BHTK, rotary), gpt.rotate(key_BHTK, rotary)
        return *rotated, value_BHTK.clone()

    @staticmethod
    def backward(ctx: Any, *grads_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTK, key_BHTK, value_BHTK = grads_BHTK
        cosine, sine = (part.transpose(1, 2) for part in ctx.saved_tensors)
        rows, heads, length, width = value_BHTK.shape
        grad_BT3HK = value_BHTK.new_empty((rows, length, 3, heads, width))
        grad_BT3HK[:, :, 0] = gpt.rotate(query_BHTK, (cosine, -sine)).transpose(1, 2)
        grad_BT3HK[:, :, 1] = gpt.rotate(key_BHTK, (cosine, -sine)).transpose(1, 2)
        grad_BT3HK[:, :, 2] = value_BHTK.transpose(1, 2)
        return grad_BT3HK.flatten(2), None, None, None
