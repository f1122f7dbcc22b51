"""Matrix products that apply GELU, or its gradient, to their result: one Triton kernel for a GPU.

A GPU would else write the result of a product, read it, apply GELU, and write it again. These are
the largest activations of a layer. Elsewhere the same operators run as torch has them.

`fuse_gelu` tries the kernel when a model is compiled, and keeps it where it is faster.

Shapes: N tokens, D width, F width of the hidden activations.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.trainer.data.attention import product_dtype

triton: Any = None
tl: Any = None
if find_spec("triton"):  # builds of torch for the CPU come without
    triton, tl = import_module("triton"), import_module("triton.language")

_log = logging.getLogger(__name__)

BLOCK = 64
"""The kernel takes widths that are a multiple of it."""
TILES: tuple[dict[str, int], ...] = (
    {"ROWS": 128, "COLUMNS": 256, "num_warps": 8, "num_stages": 3},
    {"ROWS": 128, "COLUMNS": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    {"ROWS": 128, "COLUMNS": 128, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
)
"""Tiles of the result that the kernel is tried with. With the smaller ones, an H100 multiplies one
tile while it writes another."""
_LEAST_CAPABILITY = (8, 0)
_LEAST_GAIN = 1.02
_chosen: dict[bool, dict[str, int]] = {}
"""The fastest tiles, of the gradient's kernel and of the other one."""


class _FeedForward(torch.autograd.Function):
    """`F.linear(gelu(F.linear(x, first)), second)`."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, first_FD: Tensor, second_DF: Tensor) -> Tensor:
        dtype = product_dtype(x_BTD)
        ctx.dtypes = x_BTD.dtype, first_FD.dtype, second_DF.dtype
        x_ND = x_BTD.to(dtype).flatten(0, -2)
        first_FD, second_DF = first_FD.to(dtype), second_DF.to(dtype)
        before_NF, hidden_NF = torch.ops.tokenfeed.gelu_product(x_ND, first_FD)
        ctx.save_for_backward(x_ND, first_FD, second_DF, before_NF, hidden_NF)
        out_BTD: Tensor = F.linear(hidden_NF, second_DF).view(x_BTD.shape)
        return out_BTD

    @staticmethod
    def backward(ctx: Any, *grads_BTD: Tensor) -> tuple[Tensor, ...]:
        x_ND, first_FD, second_DF, before_NF, hidden_NF = ctx.saved_tensors
        grad_ND = grads_BTD[0].flatten(0, -2)
        grad_NF = torch.ops.tokenfeed.gelu_gradient_product(grad_ND, second_DF, before_NF)
        of_x, of_first, of_second = ctx.dtypes
        return (
            (grad_NF @ first_FD).view(grads_BTD[0].shape).to(of_x),
            (grad_NF.t() @ x_ND).to(of_first),
            (grad_ND.t() @ hidden_NF).to(of_second),
        )


def feed_forward(x_BTD: Tensor, first_FD: Tensor, second_DF: Tensor) -> Tensor:
    """Return `F.linear(gelu(F.linear(x, first)), second)`, without keeping a result twice."""
    out_BTD: Tensor = _FeedForward.apply(x_BTD, first_FD, second_DF)  # type: ignore[no-untyped-call]
    return out_BTD


@torch.library.custom_op("tokenfeed::gelu_product", mutates_args=())
def gelu_product(x_ND: Tensor, weight_FD: Tensor) -> tuple[Tensor, Tensor]:
    """Return `F.linear(x, weight)`, and GELU of it."""
    if not x_ND.is_cuda:
        before_NF = F.linear(x_ND, weight_FD)
        return before_NF, F.gelu(before_NF, approximate="tanh")
    before_NF = x_ND.new_empty(len(x_ND), len(weight_FD))
    hidden_NF = torch.empty_like(before_NF)
    launch(x_ND, weight_FD.t(), before_NF, hidden_NF, is_gradient=False)
    return before_NF, hidden_NF


@torch.library.custom_op("tokenfeed::gelu_gradient_product", mutates_args=())
def gelu_gradient_product(grad_ND: Tensor, weight_DF: Tensor, before_NF: Tensor) -> Tensor:
    """Return the gradient by the input of GELU, from that of a product of its output."""
    if not grad_ND.is_cuda:
        product_NF = grad_ND @ weight_DF
        slow_NF: Tensor = torch.ops.aten.gelu_backward(product_NF, before_NF, approximate="tanh")
        return slow_NF
    grad_NF = torch.empty_like(before_NF, memory_format=torch.contiguous_format)
    launch(grad_ND, weight_DF, before_NF.contiguous(), grad_NF, is_gradient=True)
    return grad_NF


@gelu_product.register_fake
def _(x_ND: Tensor, weight_FD: Tensor) -> tuple[Tensor, Tensor]:
    before_NF = x_ND.new_empty(len(x_ND), len(weight_FD))
    return before_NF, torch.empty_like(before_NF)


@gelu_gradient_product.register_fake
def _(grad_ND: Tensor, weight_DF: Tensor, before_NF: Tensor) -> Tensor:
    return torch.empty_like(before_NF)


def launch(
    left_NK: Tensor,
    right_KF: Tensor,
    before_NF: Tensor,
    out_NF: Tensor,
    *,
    is_gradient: bool,
    tiles: dict[str, int] | None = None,
) -> None:
    """Run the kernel. The widths are multiples of `BLOCK` and of the tiles'."""
    left_NK, tiles = left_NK.contiguous(), tiles or _chosen.get(is_gradient, TILES[-1])
    rows, inner = left_NK.shape
    columns = right_KF.shape[1]
    grid = (triton.cdiv(rows, tiles["ROWS"]) * (columns // tiles["COLUMNS"]),)
    strides = right_KF.stride()
    _kernel[grid](
        left_NK, right_KF, before_NF, out_NF, rows, columns, inner, *strides,
        IS_GRADIENT=is_gradient, BLOCK=BLOCK, GROUP=8, **tiles,
    )  # fmt: skip


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
        left, right, before, out, rows, columns, inner, right_inner, right_column,  # noqa: ANN001
        IS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # pyright: ignore[reportInvalidTypeForm]
    ):  # fmt: skip
        # Programs that run together share rows and columns in the cache: GROUP tiles high.
        number = tl.program_id(0)
        down, across = tl.cdiv(rows, ROWS), columns // COLUMNS
        first = number // (GROUP * across) * GROUP
        high = min(down - first, GROUP)
        row = (first + number % (GROUP * across) % high) * ROWS + tl.arange(0, ROWS)
        column = number % (GROUP * across) // high * COLUMNS + tl.arange(0, COLUMNS)
        part = tl.arange(0, BLOCK)
        # Rows behind the last one are computed from the first ones, and not written.
        lefts = left + (row % rows).to(tl.int64)[:, None] * inner + part[None, :]
        rights = right + part[:, None] * right_inner + column[None, :] * right_column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(0, inner, BLOCK):
            total = tl.dot(tl.load(lefts), tl.load(rights), total)
            lefts += BLOCK
            rights += BLOCK * right_inner
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        is_row = row[:, None] < rows
        dtype = out.dtype.element_ty
        if IS_GRADIENT:
            x = tl.load(before + place, mask=is_row, other=0.0).to(tl.float32)
        else:
            tl.store(before + place, total.to(dtype), mask=is_row)
            x = total.to(dtype).to(tl.float32)
        tanh = 2 * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)) - 1
        if IS_GRADIENT:
            slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
            x = total.to(dtype).to(tl.float32) * (
                0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope
            )
        else:
            x = 0.5 * x * (1 + tanh)
        tl.store(out + place, x.to(dtype), mask=is_row)


def fuse_gelu(model: nn.Module, tokens: int, dtype: torch.dtype) -> None:
    """Let the layers of a model use the kernel, if it is faster on their device.

    Args:
        model: Its layers have `fuses_gelu`, or it is left as it is.
        tokens: Tokens of a micro-batch.
        dtype: Of products.
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "fuses_gelu")]
    if not layers or not can_fuse(layers[0].feed_in.weight, dtype):
        return
    weight_FD = layers[0].feed_in.weight.detach().to(dtype)
    x_ND = torch.randn(tokens, weight_FD.shape[1], dtype=dtype, device=weight_FD.device)
    try:
        gains = [_try(x_ND, weight_FD, is_gradient=each) for each in (False, True)]
    except Exception as error:  # of a compiler that does not know this GPU
        _log.warning("GELU stays a kernel of its own: %s", error)
        return
    is_faster = min(gains) > _LEAST_GAIN
    _log.info(
        "GELU %s the products' kernels: %.2f and, of its gradient, %.2f times as fast as apart",
        "is in" if is_faster else "stays out of",
        *gains,
    )
    for layer in layers:
        layer.fuses_gelu = is_faster


def can_fuse(weight_FD: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs here, for products of a dtype."""
    if triton is None or not weight_FD.is_cuda or dtype not in (torch.bfloat16, torch.float16):
        return False
    largest = max(tiles["COLUMNS"] for tiles in TILES)
    fits = weight_FD.shape[0] % largest == 0 and weight_FD.shape[1] % BLOCK == 0
    return fits and torch.cuda.get_device_capability(weight_FD.device) >= _LEAST_CAPABILITY


def _try(x_ND: Tensor, weight_FD: Tensor, *, is_gradient: bool) -> float:
    """Choose the fastest tiles, and return how much faster the kernel is than two kernels."""
    right_DF = weight_FD.t() if not is_gradient else weight_FD.t().contiguous()
    before_NF, out_NF = x_ND @ right_DF, x_ND @ right_DF

    def apart() -> None:
        result_NF = x_ND @ right_DF
        if is_gradient:
            torch.ops.aten.gelu_backward(result_NF, before_NF, approximate="tanh")
        else:
            F.gelu(result_NF, approximate="tanh")

    def together(tiles: dict[str, int]) -> Callable[[], None]:
        return lambda: launch(
            x_ND, right_DF, before_NF, out_NF, is_gradient=is_gradient, tiles=tiles
        )

    took: dict[int, float] = {}
    for number, tiles in enumerate(TILES):
        try:
            took[number] = triton.testing.do_bench(together(tiles))
        except triton.runtime.errors.OutOfResources:  # a smaller GPU
            continue
    fastest = min(took, key=lambda number: took[number])
    _chosen[is_gradient] = TILES[fastest]
    return float(triton.testing.do_bench(apart)) / took[fastest]
