"""A micro-batch: the tensors that model and loss take, in few different shapes.

A compiled model is compiled again for each new shape, which takes seconds to minutes. So with
--compile, a batch with few rows is filled up with empty rows. Their labels do not count in the
loss.

Shapes: B rows, T slots of a row, S segments (documents and paddings) of the flattened batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenfeed.pipeline.feeding.batch import ATTENTION_MASK, POSITION_IDS, Batch
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, TOKEN_TYPE_IDS, no_target
from tokenfeed.pipeline.windows.rank_slice import TARGETS
from tokenfeed.trainer.data.attention import Scope, row_ends, size_only

__all__ = ["MicroBatch", "Shaper"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward and backward pass."""

    ids_BT: Tensor
    labels: Tensor
    """(B, T), or (B,) if each row has one label. `IGNORED` where there is no target."""
    positions_BT: Tensor
    """Positions in the document, or in the row: (B, T), or (1, T) if equal for all rows."""
    scope: Scope
    """Which slots attend to each other."""
    is_token_BT: Tensor | None = None
    """True on tokens, False on padding; None if rows are packed. Their padding comes last and has
    no label."""
    token_types_BT: Tensor | None = None
    """0 or 1, the text of a pair that a token belongs to; None if rows are single texts."""

    @classmethod
    def of_ids(cls, ids_BT: Tensor, *, causal: bool) -> "MicroBatch":
        """Return rows of one document each, all of one length, without labels: to use a model."""
        return cls(
            ids_BT=ids_BT,
            labels=torch.full_like(ids_BT, IGNORED),
            positions_BT=_count(ids_BT.shape[1], ids_BT.device),
            scope=Scope(causal=causal),
            is_token_BT=torch.ones_like(ids_BT, dtype=torch.bool),
            token_types_BT=torch.zeros_like(ids_BT),
        )

    @property
    def num_slots(self) -> int:
        """Token slots: B times T."""
        return self.ids_BT.numel()

    @property
    def _counts_rows(self) -> bool:
        """Whether positions differ between rows."""
        return len(self.positions_BT) > 1

    def without_targets(self) -> "MicroBatch":
        """Return the same rows without targets."""
        return replace(self, labels=torch.full_like(self.labels, _none(self.labels)))

    def blank_like(self, rows: int, length: int) -> "MicroBatch":
        """Return an empty micro-batch of another shape, with the same fields and without
        targets."""
        return MicroBatch(
            ids_BT=self.ids_BT.new_zeros((rows, length)),
            labels=self.labels.new_full((rows, length)[: self.labels.dim()], _none(self.labels)),
            positions_BT=self.positions_BT.new_zeros((rows if self._counts_rows else 1, length)),
            scope=self.scope.blank_like(rows, length),
            is_token_BT=_filled_like(self.is_token_BT, rows, length, 1),
            token_types_BT=_filled_like(self.token_types_BT, rows, length, 0),
        )


@dataclass(frozen=True, slots=True)
class Shaper:
    """Makes micro-batches from a loader's batches."""

    causal: bool
    """Whether a token attends only to itself and the tokens before it."""
    apart: bool
    """Whether packed documents are separate. Otherwise attention crosses them within a row."""
    varlen: bool
    """Whether attention takes the ends of documents instead of a mask."""
    rows_of: Callable[[int], int] | None = None
    """Returns the number of rows to fill a batch of some padded length up to; None: do not fill."""

    def __call__(self, batch: Batch) -> MicroBatch:
        """Return the micro-batch of a batch. Queues a few kernels; does not wait for the device."""
        filling = self._missing_rows(batch)
        rows = {key: _with_rows(batch[key], filling, fill) for key, fill in _FILLS if key in batch}
        packed = ATTENTION_MASK not in batch
        scope = self._packed(batch, filling) if packed else self._padded(rows[ATTENTION_MASK])
        if self.rows_of is not None:
            scope.mark_dynamic()
        labels = batch[TARGETS]
        length = batch[INPUT_IDS].shape[1]
        by_document = packed and self.apart
        return MicroBatch(
            ids_BT=rows[INPUT_IDS],
            labels=_with_rows(labels, filling, _none(labels)),
            positions_BT=rows[POSITION_IDS] if by_document else _count(length, batch.device),
            scope=scope,
            is_token_BT=None if packed else rows[ATTENTION_MASK],
            token_types_BT=rows.get(TOKEN_TYPE_IDS),
        )

    def _missing_rows(self, batch: Batch) -> int:
        length = batch[INPUT_IDS].shape[1]
        return max(0, self.rows_of(length) - len(batch.lengths)) if self.rows_of else 0

    def _padded(self, is_token_BT: Tensor) -> Scope:
        """Return the scope of padded rows. Causal tokens never see the padding, which comes
        last.

        Otherwise each row is a segment of tokens and a segment of padding.
        """
        if self.causal:
            return Scope(causal=True)
        mask_BHTT = is_token_BT[:, None, None, :]
        if not self.varlen:
            return Scope(causal=False, mask_BHTT=mask_BHTT)
        rows, length = is_token_BT.shape
        ends = row_ends(0, rows, length, is_token_BT.device)
        pairs = torch.stack((ends[:-1], ends[:-1] + is_token_BT.sum(1)), dim=1).flatten()
        ends = torch.cat((pairs.int(), ends[-1:]))
        return Scope(False, mask_BHTT, ends, size_only(length, is_token_BT.device))

    def _packed(self, batch: Batch, filling: int) -> Scope:
        if not self.apart:
            return Scope(causal=self.causal)
        length = batch[INPUT_IDS].shape[1]
        ends, slots = batch.cu_seqlens, batch.num_slots
        if filling:  # a segment for each added row
            ends = torch.cat((ends, row_ends(slots, filling, length, ends.device)[1:]))
        if self.varlen:
            longest = size_only(length if filling else batch.max_seqlen, ends.device)
            return Scope(causal=self.causal, cu_seqlens=ends, longest=longest)
        mask_BHTT = _same_document(ends, slots // length + filling, length)
        if self.causal:
            mask_BHTT = mask_BHTT.tril()
        return Scope(causal=self.causal, mask_BHTT=mask_BHTT)


_FILLS: tuple[tuple[str, int], ...] = (
    (INPUT_IDS, 0),
    (POSITION_IDS, 0),
    (ATTENTION_MASK, 1),  # with 0 everywhere, attention would be a softmax over nothing
    (TOKEN_TYPE_IDS, 0),
)


def _filled_like(values: Tensor | None, rows: int, length: int, fill: int) -> Tensor | None:
    return None if values is None else values.new_full((rows, length), fill)


def _none(labels: Tensor) -> float:
    """Return the label that stands for no target."""
    return no_target(is_float=labels.is_floating_point())


def _with_rows(values: Tensor, missing: int, fill: float) -> Tensor:
    """Return the values with `missing` more rows at the end."""
    if not missing:
        return values
    return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, missing), value=fill)


def _count(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)[None]


def _same_document(cu_seqlens: Tensor, rows: int, length: int) -> Tensor:
    """Return whether two slots of a row are in the same segment, shape (B, 1, T, T)."""
    slots = torch.arange(rows * length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    segment_BT = torch.bucketize(slots, cu_seqlens[1:], right=True).view(rows, length)
    return segment_BT[:, None, :, None] == segment_BT[:, None, None, :]
