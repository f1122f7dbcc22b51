"""Attention: which slots attend to each other, and by which kernel.

On a GPU in half precision, documents are separated by their ends (`varlen_attn`), at no cost.
Elsewhere a mask separates them. A mask takes B x T x T bytes and excludes the fastest kernel.

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
    max_seqlen: int = 0
    """With `cu_seqlens`: upper bound of a segment's length."""
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
        if self.cu_seqlens is not None:
            return replace(self, causal=reach.causal, window=window)
        return Scope(reach.causal, self._narrowed_mask(reach, ids_BT))

    def blank_like(self, rows: int, length: int) -> "Scope":
        """Return a scope of the same form for another shape, without any limit but `causal`."""
        mask, ends = self.mask_BHTT, self.cu_seqlens
        if mask is not None:
            mask = mask.new_ones((rows, 1, length if mask.shape[2] > 1 else 1, length))
        if ends is not None:
            ends = F.pad(ends[:1], (0, len(ends) - 1), value=rows * length)
        return Scope(self.causal, mask, ends, length)

    def of_rows(self, start: int, stop: int, length: int) -> "Scope":
        """Return the scope of rows `start` to `stop` of a micro-batch. Segments do not cross
        rows."""
        mask, ends = self.mask_BHTT, self.cu_seqlens
        if mask is not None:
            mask = mask[start:stop]
        if ends is not None:
            ends = (ends - start * length).clamp(0, (stop - start) * length)
        return replace(self, mask_BHTT=mask, cu_seqlens=ends)

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


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `varlen_attn` works: CUDA of Ampere or later, half precision, torch 2.11."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    return knows_ends()


def knows_ends() -> bool:
    """Return whether this torch has `varlen_attn` with the arguments used here."""
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
    """Return softmax attention within `scope`, shape (B, H, T, K).

    Args:
        query_BHTK: Queries.
        key_BHTK: Keys. With fewer heads than queries, each serves several neighbouring query heads.
        value_BHTK: Values, with as many heads as the keys.
        scope: Which slots attend to each other.
        scale: Factor of the products. Default: 1 / sqrt(K).
        dropout: Share of weights set to 0. Only without `cu_seqlens`.
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
    window = (far, 0 if scope.causal else far)  # a tuple: as a list it would not count as causal
    mixed = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=window
    )
    assert isinstance(mixed, Tensor)
    return mixed.view(rows, -1, *mixed.shape[1:]).transpose(1, 2)


def _near(reach: Reach, length: int, device: torch.device) -> Tensor:
    """Return whether a query (first) reaches a key (second), shape (T, T)."""
    slot_T = torch.arange(length, device=device)
    behind_TT = slot_T[:, None] - slot_T
    near_TT = behind_TT.abs() <= (length if reach.window is None else reach.window)
    return near_TT & (behind_TT >= 0) if reach.causal else near_TT
