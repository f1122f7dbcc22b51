"""Attention, the one place: which slots see each other, and by which kernel.

On a GPU in half precision documents are kept apart by where they end (`varlen_attn`), which costs
nothing; elsewhere by a mask, which costs B x T x T bytes and the fastest kernel.

Shapes: B rows, T slots, H heads, K width of a head, S segments.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

__all__ = ["Reach", "Scope", "attend", "has_varlen"]

_LEAST_CAPABILITY = (8, 0)


class Reach(NamedTuple):
    """What a layer sees of a document."""

    causal: bool
    """Whether a slot sees only itself and those before it."""
    window: int | None
    """How many slots before it, and where it is not causal behind it; None: all."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which slots of a micro-batch see each other.

    Without mask and ends all slots of a row do, or where it is causal those before.
    """

    causal: bool
    """Whether a slot sees only itself and those before it in its document."""
    mask_BHTT: Tensor | None = None
    """True where a query (third dimension) sees a key (fourth); `causal` is in it already."""
    cu_seqlens: Tensor | None = None
    """(S + 1,) int32: where segments begin in the flattened batch, and its end."""
    max_seqlen: int = 0
    """Bound of a segment's length, where there are `cu_seqlens`."""
    window: int | None = None
    """With `cu_seqlens`: how many slots before it, and where it is not causal behind it, a slot
    sees; None: all."""

    def narrowed(self, reach: Reach, ids_BT: Tensor) -> "Scope":
        """The same for a layer that sees less; `ids_BT` tells how long rows are, and where."""
        window = reach.window
        if window is not None and window >= ids_BT.shape[1] - 1:
            window = None
        reach = Reach(self.causal or reach.causal, window)
        if reach == Reach(self.causal, None):
            return self
        if self.cu_seqlens is not None:
            return replace(self, causal=reach.causal, window=window)
        return Scope(reach.causal, self._narrowed_mask(reach, ids_BT))

    def blank_like(self, rows: int, length: int) -> "Scope":
        """One of the same make for another shape, where every slot sees all it may."""
        mask, ends = self.mask_BHTT, self.cu_seqlens
        if mask is not None:
            mask = mask.new_ones((rows, 1, length if mask.shape[2] > 1 else 1, length))
        if ends is not None:
            ends = F.pad(ends[:1], (0, len(ends) - 1), value=rows * length)
        return Scope(self.causal, mask, ends, length)

    def of_rows(self, start: int, stop: int, length: int) -> "Scope":
        """That of some rows of a micro-batch; no segment goes over the end of a row."""
        mask, ends = self.mask_BHTT, self.cu_seqlens
        if mask is not None:
            mask = mask[start:stop]
        if ends is not None:
            ends = (ends - start * length).clamp(0, (stop - start) * length)
        return replace(self, mask_BHTT=mask, cu_seqlens=ends)

    def _narrowed_mask(self, reach: Reach, ids_BT: Tensor) -> Tensor | None:
        mask_BHTT = self.mask_BHTT
        if reach.causal and mask_BHTT is not None and mask_BHTT.shape[2] == 1:
            mask_BHTT = None  # of padding, which comes last in a row
        if mask_BHTT is None and reach.window is None:
            return None
        near_11TT = _near(reach, ids_BT.shape[1], ids_BT.device)[None, None]
        if mask_BHTT is None:
            return near_11TT
        # All see themselves: a softmax of nothing would spoil what is beside it in the next layer.
        itself_TT = torch.eye(ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device)
        return (mask_BHTT & near_11TT) | itself_TT


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `varlen_attn` works there: CUDA of Ampere or later, half precision, torch 2.11."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    return knows_ends()


def knows_ends() -> bool:
    """Whether this torch has `varlen_attn` as it is used here."""
    return bool(TorchVersion(torch.__version__) >= "2.11")


def attend(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    scope: Scope,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention within `scope`: (B, H, T, K).

    Args:
        query_BHTK: Queries.
        key_BHTK: Keys; of fewer heads, each serves several neighbouring query heads.
        value_BHTK: Values, of as many heads as the keys.
        scope: Which slots see each other.
        scale: Factor of the products; by default 1 / sqrt(K).
        dropout: Share of weights set to 0; only without `cu_seqlens`.
    """
    if scope.cu_seqlens is not None:
        return _attend_segments(query_BHTK, key_BHTK, value_BHTK, scope, scale)
    return F.scaled_dot_product_attention(
        query_BHTK,
        key_BHTK,
        value_BHTK,
        attn_mask=scope.mask_BHTT,
        is_causal=scope.causal and scope.mask_BHTT is None,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=query_BHTK.shape[1] != key_BHTK.shape[1],
    )


def _attend_segments(
    query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, scope: Scope, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert scope.cu_seqlens is not None
    rows, heads, _, _ = query_BHTK.shape
    repeats = heads // key_BHTK.shape[1]
    if repeats > 1:
        key_BHTK = key_BHTK.repeat_interleave(repeats, dim=1)
        value_BHTK = value_BHTK.repeat_interleave(repeats, dim=1)
    ends, longest = scope.cu_seqlens, scope.max_seqlen
    query, key, value = (
        part.transpose(1, 2).flatten(0, 1) for part in (query_BHTK, key_BHTK, value_BHTK)
    )
    far = -1 if scope.window is None else scope.window
    window = (far, 0 if scope.causal else far)  # a list would not be understood as causal
    mixed = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=window
    )
    assert isinstance(mixed, Tensor)
    return mixed.view(rows, -1, *mixed.shape[1:]).transpose(1, 2)


def _near(reach: Reach, length: int, device: torch.device) -> Tensor:
    """(T, T): whether a query (first) reaches a key (second)."""
    slot_T = torch.arange(length, device=device)
    behind_TT = slot_T[:, None] - slot_T
    near_TT = behind_TT.abs() <= (length if reach.window is None else reach.window)
    return near_TT & (behind_TT >= 0) if reach.causal else near_TT
