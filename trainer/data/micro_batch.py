"""A micro-batch as model and loss take it: of a shape that comes again, with its documents known.

A compiled model is compiled anew for every shape it meets, for seconds to minutes. So a batch of
few rows is filled up with empty ones, whose labels no loss counts.

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
from tokenfeed.trainer.data.attention import Scope

__all__ = ["MicroBatch", "Shaper"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What is trained at once."""

    ids_BT: Tensor
    labels: Tensor
    """(B, T), or (B,) where a row has one label; `IGNORED` where none is due."""
    positions_BT: Tensor
    """Counted from the beginning of what attention reaches: (B, T), or (1, T) for all rows."""
    scope: Scope
    """Which slots attention may reach."""
    is_token_BT: Tensor | None = None
    """True on tokens; None where rows are packed: their padding comes last and has no label."""
    token_types_BT: Tensor | None = None
    """Which text of a pair a token belongs to; None where rows are single texts."""

    @classmethod
    def of_ids(cls, ids_BT: Tensor, *, causal: bool) -> "MicroBatch":
        """Rows of one document each, all of the same length, and no labels: to use a model."""
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
        """B times T."""
        return self.ids_BT.numel()

    @property
    def _counts_rows(self) -> bool:
        """Whether positions differ from row to row."""
        return len(self.positions_BT) > 1

    def without_targets(self) -> "MicroBatch":
        """The same rows, of which nothing is asked."""
        return replace(self, labels=torch.full_like(self.labels, _none(self.labels)))

    def blank_like(self, rows: int, length: int) -> "MicroBatch":
        """One of the same make and another shape, of which nothing can be learnt."""
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
    """Makes micro-batches of a loader's batches."""

    causal: bool
    """Whether a token sees only those before it."""
    apart: bool
    """Whether packed documents are kept apart; else they see those before them in their row."""
    varlen: bool
    """Whether attention takes the ends of documents instead of a mask."""
    rows_of: Callable[[int], int] | None = None
    """How many rows a batch of some padded length is filled up to; None fills nothing."""

    def __call__(self, batch: Batch) -> MicroBatch:
        """A batch with its documents; queues a few kernels, and never waits for the device."""
        filling = self._missing_rows(batch)
        rows = {key: _with_rows(batch[key], filling, fill) for key, fill in _FILLS if key in batch}
        labels = batch[TARGETS]
        packed, length = ATTENTION_MASK not in batch, batch[INPUT_IDS].shape[1]
        by_document = packed and self.apart
        return MicroBatch(
            ids_BT=rows[INPUT_IDS],
            labels=_with_rows(labels, filling, _none(labels)),
            positions_BT=rows[POSITION_IDS] if by_document else _count(length, batch.device),
            scope=self._packed(batch, filling) if packed else self._padded(rows[ATTENTION_MASK]),
            is_token_BT=None if packed else rows[ATTENTION_MASK],
            token_types_BT=rows.get(TOKEN_TYPE_IDS),
        )

    def _missing_rows(self, batch: Batch) -> int:
        length = batch[INPUT_IDS].shape[1]
        return max(0, self.rows_of(length) - len(batch.lengths)) if self.rows_of else 0

    def _padded(self, is_token_BT: Tensor) -> Scope:
        """Padding comes last in a row, where a causal model's tokens never see it."""
        if self.causal:
            return Scope(causal=True)
        return Scope(causal=False, mask_BHTT=is_token_BT[:, None, None, :])

    def _packed(self, batch: Batch, filling: int) -> Scope:
        if not self.apart:
            return Scope(causal=self.causal)
        length = batch[INPUT_IDS].shape[1]
        slots = batch.num_slots + filling * length
        ends = _of_lasting_length(batch.cu_seqlens, batch.num_slots, slots)
        if self.varlen:
            return Scope(causal=self.causal, cu_seqlens=ends, max_seqlen=length)
        mask_BHTT = _same_document(ends, slots // length, length)
        if self.causal:
            mask_BHTT = mask_BHTT.tril()
        return Scope(causal=self.causal, mask_BHTT=mask_BHTT)


_FILLS: tuple[tuple[str, int], ...] = (
    (INPUT_IDS, 0),
    (POSITION_IDS, 0),
    (ATTENTION_MASK, 1),  # a row that sees nothing at all would be a softmax of nothing
    (TOKEN_TYPE_IDS, 0),
)


def _filled_like(values: Tensor | None, rows: int, length: int, fill: int) -> Tensor | None:
    return None if values is None else values.new_full((rows, length), fill)


def _none(labels: Tensor) -> float:
    """The label of a row or token that has none."""
    return no_target(is_float=labels.is_floating_point())


def _with_rows(values: Tensor, missing: int, fill: float) -> Tensor:
    """The same with `missing` more rows at the end."""
    if not missing:
        return values
    return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, missing), value=fill)


def _count(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)[None]


def _of_lasting_length(cu_seqlens: Tensor, end: int, slots: int) -> Tensor:
    """Offsets of segments, filled up to a power of four: a shape that comes again.

    The last of them is a segment of all slots that were added; behind it come empty ones.
    """
    wanted = cu_seqlens.numel() + (slots > end)
    number = 4 ** ((wanted - 1).bit_length() + 1 >> 1)
    return F.pad(cu_seqlens, (0, number - cu_seqlens.numel()), value=slots)


def _same_document(cu_seqlens: Tensor, rows: int, length: int) -> Tensor:
    """(B, 1, T, T): whether two slots of a row belong to the same segment."""
    slots = torch.arange(rows * length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    segment_BT = torch.bucketize(slots, cu_seqlens[1:], right=True).view(rows, length)
    return segment_BT[:, None, :, None] == segment_BT[:, None, None, :]
