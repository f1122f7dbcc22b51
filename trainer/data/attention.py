"""Attention: which slots attend to each other, and by which kernel.

On a GPU in half precision, documents are separated by their ends (`varlen_attn`), at no cost. On a
CPU, each document is a call of its own. Elsewhere a mask separates documents: it takes B x T x T
bytes, excludes the fastest kernel, and products of all pairs of slots are computed.

Shapes: B rows, T slots, H heads, K width of a head, S segments.
"""

import importlib.util
import logging
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

_LEAST_CAPABILITY = (8, 0)
_HOPPER = 9
_FLASH_3 = "flash_attn_interface"
"""The module of FlashAttention 3, as its own build installs it."""
_HUB_FLASH_3 = "kernels-community/flash-attn3"
"""The same operators, built for many versions of torch, which the package `kernels` loads."""
_HUB_VERSION = 1
_VARLEN_TAKES_GROUPS = TorchVersion(torch.__version__) >= "2.12"

_log = logging.getLogger(__name__)

Separation = Literal["mask", "ends", "calls"]
"""What separates packed documents: a mask, `varlen_attn`, or a call for each document."""


class KeyValues:
    """Keys and values of all slots that a layer has seen, while a model generates text."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, ...] = ()

    def add(self, *new_BHTK: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of all slots, given those of the new slots."""
        pairs = zip(self._seen, new_BHTK, strict=True) if self._seen else ()
        self._seen = tuple(torch.cat(pair, dim=2) for pair in pairs) or new_BHTK
        return self._seen


class Reach(NamedTuple):
    """What a slot attends to in its document, in one layer of a model."""

    causal: bool
    """Whether a slot attends only to itself and slots before it."""
    window: int | None
    """How many slots back a slot attends, and forward unless causal. None: no limit."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which slots of a micro-batch attend to each other.

    Without `mask_BHTT` and `cu_seqlens`, a slot attends to its whole row, or to the row so far if
    causal.
    """

    causal: bool
    """Whether a slot attends only to itself and slots before it in its document."""
    mask_BHTT: Tensor | None = None
    """True where a query (third dimension) attends to a key (fourth). Includes `causal`."""
    cu_seqlens: Tensor | None = None
    """Offsets of segments in the flattened batch, with its end: shape (S + 1,), int32."""
    longest: Tensor | None = None
    """With `cu_seqlens`: no elements, and the length of the longest segment as its first size. A
    compiled model takes sizes of tensors as variables, and numbers as constants. None: each segment
    is a call of its own."""
    window: int | None = None
    """With `cu_seqlens`: how many slots back a slot attends, and forward unless causal. None: no
    limit."""

    def narrowed(self, reach: Reach, ids_BT: Tensor) -> "Scope":
        """Return the scope of a layer with a smaller reach. `ids_BT` has the shape of the rows."""
        window = reach.window
        if window is not None and window >= ids_BT.shape[1] - 1:
            window = None
        reach = Reach(self.causal or reach.causal, window)
        if reach == Reach(self.causal, None):
            return self
        if self.cu_seqlens is not None and self.mask_BHTT is None:
            return replace(self, causal=reach.causal, window=window)
        return Scope(reach.causal, self._narrowed_mask(reach, ids_BT))

    def blank_like(self, rows: int, length: int) -> "Scope":
        """Return a scope with the same fields set, for another shape, that limits nothing but
        `causal`."""
        mask, ends, longest = self.mask_BHTT, self.cu_seqlens, self.longest
        if mask is not None:
            mask = mask.new_ones((rows, 1, length if mask.shape[2] > 1 else 1, length))
        if ends is not None:
            ends = row_ends(rows, length, ends.device)
            longest = None if longest is None else size_only(length, ends.device)
        return Scope(self.causal, mask, ends, longest)

    def mark_dynamic(self) -> None:
        """Let the compiler make one graph for all numbers of segments, and all lengths of them."""
        for tensor in (self.cu_seqlens, self.longest):
            if tensor is not None:
                torch._dynamo.mark_dynamic(tensor, 0)

    def _narrowed_mask(self, reach: Reach, ids_BT: Tensor) -> Tensor | None:
        mask_BHTT = self.mask_BHTT
        if reach.causal and mask_BHTT is not None and mask_BHTT.shape[2] == 1:
            mask_BHTT = None  # it masks padding, which comes last: causal slots never see it
        if mask_BHTT is None and reach.window is None:
            return None
        near_11TT = _near(reach, ids_BT.shape[1], ids_BT.device)[None, None]
        if mask_BHTT is None:
            return near_11TT
        # Every slot attends to itself: a softmax over nothing is NaN, which would spread to others.
        itself_TT = torch.eye(ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device)
        return (mask_BHTT & near_11TT) | itself_TT


def row_ends(rows: int, length: int, device: torch.device) -> Tensor:
    """Return the offsets of rows that have one segment each: where each row begins, and the end."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * length


def size_only(length: int, device: torch.device) -> Tensor:
    """Return a tensor without elements that stands for a length. The compiler takes 0 and 1 as
    constants."""
    return torch.empty((max(length, 2), 0), device=device)


def separation(device: torch.device, dtype: torch.dtype, *, compiled: bool) -> Separation:
    """Return what separates documents fastest.

    `varlen_attn` needs CUDA of Ampere or later, half precision, and torch 2.11. A compiled model
    would be compiled again for every number of calls.
    """
    if device.type == "cpu" and not compiled:
        return "calls"
    return "ends" if _has_varlen(device, dtype) else "mask"


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return knows_ends() and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def knows_ends() -> bool:
    """Return whether this torch has `varlen_attn` with the arguments used here."""
    return bool(TorchVersion(torch.__version__) >= "2.11")


def choose_flash_attention(device: torch.device, dtype: torch.dtype, *, drops: bool) -> None:
    """Let torch use FlashAttention 3 where it works, else FlashAttention 2.

    Args:
        device: Needs compute capability 9, and FlashAttention 3 or the package `kernels`.
        dtype: Needs half precision.
        drops: Whether the model may set attention weights to 0, which FlashAttention 3 cannot do.
    """
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):  # an older torch
        return
    if attention.current_flash_attention_impl() is not None:  # chosen for another model
        attention.restore_flash_attention_impl()
    if not _has_varlen(device, dtype) or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return
    names = {_FLASH_3: "FA3", "kernels": _HUB_FLASH_3}
    found = next((name for module, name in names.items() if importlib.util.find_spec(module)), None)
    if drops or found is None:
        return
    attention.register_flash_attention_impl(_HUB_FLASH_3, register_fn=_flash_3_of_hub)
    try:
        attention.activate_flash_attention_impl(found)
    except Exception as error:  # made for another torch or CUDA; or the Hub cannot be reached
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        _log.warning("FlashAttention 3 is installed, but does not load (%s): %s", found, reason)


def _flash_3_of_hub() -> Any:
    """Let torch use the operators of FlashAttention 3 that `kernels` loads, which have another
    namespace than torch looks for."""
    from kernels import get_kernel  # type: ignore[import-not-found]
    from torch.nn.attention._fa3 import register_flash_attention_fa3

    module = get_kernel(_HUB_FLASH_3, version=_HUB_VERSION)
    torch.ops.flash_attn_3 = module._ops.ops  # type: ignore[attr-defined]
    return register_flash_attention_fa3(module.__name__)


def kernel_line(
    device: torch.device, dtype: torch.dtype, by: Separation | None, *, packed: bool, drops: bool
) -> str:
    """Return which kernel computes attention, and why no better one does.

    Args:
        device: Where the model computes.
        dtype: Of its products.
        by: What separates documents, or tokens from padding; None if nothing has to.
        packed: Whether rows hold several documents.
        drops: Whether the model may set attention weights to 0.
    """
    masked = " with a mask" if by is not None else ""
    if device.type == "cpu":
        calls = ", one call for each document" if by == "calls" and packed else masked
        return f"attention: the CPU kernel of torch{calls} (flash attention needs a GPU)"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        why = (
            "flash and variable-length attention need compute capability {}.{}, this GPU has {}.{}"
        )
        why = why.format(*_LEAST_CAPABILITY, *capability)
    elif dtype == torch.float32:
        why = "flash attention needs --precision bf16 or fp16"
    elif by is None:
        cudnn = " or cuDNN's, as torch prefers" if capability[0] >= _HOPPER else ""
        return f"attention: flash attention{cudnn}, over whole rows"
    elif drops:
        why = "the model drops attention weights, which variable-length attention cannot"
    elif by != "ends":
        why = "variable-length attention needs torch 2.11"
    else:
        return f"attention: variable-length flash attention, {_flash_version(capability[0])}"
    return f"attention: the memory-efficient kernel of torch{masked} ({why})"


def _flash_version(major: int) -> str:
    from torch.nn import attention

    active = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if active is not None:
        return f"version 3 ({active})" if active == _HUB_FLASH_3 else "version 3"
    needed = f" (version 3 needs the module {_FLASH_3} or kernels)" if major == _HOPPER else ""
    return f"version 2{needed}"


def attend(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    scope: Scope,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax attention within `scope`, shape (B, H, T, K).

    Args:
        query_BHTK: Queries. A single query is in the slot of the last key.
        key_BHTK: Keys. With fewer heads than queries, each serves several neighbouring query heads.
        value_BHTK: Values, with as many heads as the keys.
        scope: Which slots attend to each other. With a mask and `cu_seqlens`, both say the same.
        scale: Factor of the products. Default: 1 / sqrt(K).
        dropout: Share of weights set to 0. Needs a mask if there is `longest`.
    """
    repeats = query_BHTK.shape[1] // key_BHTK.shape[1]
    if scope.cu_seqlens is not None and scope.longest is None:
        return _attend_one_by_one(query_BHTK, key_BHTK, value_BHTK, scope, scale, dropout)
    if scope.cu_seqlens is not None and not dropout:
        return _attend_segments(query_BHTK, key_BHTK, value_BHTK, scope, scale, repeats)
    if repeats > 1 and not _takes_groups(query_BHTK, scope):
        key_BHTK, value_BHTK, repeats = *_repeated(key_BHTK, value_BHTK, repeats), 1
    return F.scaled_dot_product_attention(
        query_BHTK,
        key_BHTK,
        value_BHTK,
        attn_mask=scope.mask_BHTT,
        is_causal=scope.causal and scope.mask_BHTT is None and query_BHTK.shape[2] > 1,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=repeats > 1,
    )


def _takes_groups(query_BHTK: Tensor, scope: Scope) -> bool:
    """Return whether one key serves several queries in the kernel that torch chooses.

    The flash kernels do this. On a GPU they take half precision and no mask, and need an Ampere:
    there, half precision is usually bf16. Other kernels of a GPU leave the work to the slowest one.
    """
    if query_BHTK.device.type != "cuda":
        return True
    return query_BHTK.dtype == torch.bfloat16 and scope.mask_BHTT is None


def _repeated(key_BHTK: Tensor, value_BHTK: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    return key_BHTK.repeat_interleave(repeats, 1), value_BHTK.repeat_interleave(repeats, 1)


def _attend_segments(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    scope: Scope,
    scale: float | None,
    repeats: int,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert scope.cu_seqlens is not None
    assert scope.longest is not None
    settings: dict[str, Any] = {}
    if repeats > 1 and _VARLEN_TAKES_GROUPS:
        settings["enable_gqa"] = True
    elif repeats > 1:
        key_BHTK, value_BHTK = _repeated(key_BHTK, value_BHTK, repeats)
    ends, longest = scope.cu_seqlens, scope.longest.shape[0]
    query, key, value = (
        part.transpose(1, 2).flatten(0, 1) for part in (query_BHTK, key_BHTK, value_BHTK)
    )
    far = -1 if scope.window is None else scope.window
    window = (far, 0 if scope.causal else far)  # a tuple: as a list it would not count as causal
    mixed = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=window, **settings
    )
    assert isinstance(mixed, Tensor)
    return mixed.view(len(query_BHTK), -1, *mixed.shape[1:]).transpose(1, 2)


def _attend_one_by_one(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    scope: Scope,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Call the kernel for each segment: this computes no products between segments."""
    assert scope.cu_seqlens is not None
    sizes = np.diff(scope.cu_seqlens.numpy()).tolist()
    parts = (part.transpose(1, 2).flatten(0, 1) for part in (query_BHTK, key_BHTK, value_BHTK))
    mixed = []
    for segment in zip(*(torch.split(part, sizes) for part in parts), strict=True):
        length = len(segment[0])
        within = Scope(scope.causal)
        if scope.window is not None and scope.window < length - 1:
            reach = Reach(scope.causal, scope.window)
            within = Scope(scope.causal, _near(reach, length, query_BHTK.device)[None, None])
        query, key, value = (part.transpose(0, 1)[None] for part in segment)
        out = attend(query, key, value, within, scale=scale, dropout=dropout)
        mixed.append(out[0].transpose(0, 1))
    rows, _, length, _ = query_BHTK.shape
    return torch.cat(mixed).view(rows, length, *mixed[0].shape[1:]).transpose(1, 2)


def _near(reach: Reach, length: int, device: torch.device) -> Tensor:
    """Return whether a query (first) reaches a key (second), shape (T, T)."""
    slot_T = torch.arange(length, device=device)
    behind_TT = slot_T[:, None] - slot_T
    near_TT = behind_TT.abs() <= (length if reach.window is None else reach.window)
    return near_TT & (behind_TT >= 0) if reach.causal else near_TT


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: autocast's, or without autocast the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
