"""A micro-batch: the tensors that model and loss take; and the output that a task needs.

Shapes: B rows, T slots of a row, S segments (documents and paddings) of the flattened batch.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tokenfeed.pipeline.feeding.batch import ATTENTION_MASK, POSITION_IDS, Batch
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, TOKEN_TYPE_IDS, no_target
from tokenfeed.pipeline.windows.rank_slice import TARGETS
from tokenfeed.trainer.data.attention import Scope, Separation, row_ends, size_only

HeadKind = Literal["vocabulary", "token", "row"]
"""What a model predicts.

    vocabulary   an id of the vocabulary for each token
    token        a tag for each token
    row          a class, or a number, for each row
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a task needs from a model."""

    kind: HeadKind
    outputs: int
    """Logits per token or row. A head of the vocabulary may have more."""
    vocabulary_size: int
    """Upper bound of the ids that the model is shown."""
    pairs: bool = False
    """Whether rows are pairs of texts. Then the model receives token types."""
    labels: tuple[str, ...] = ()
    """Names of tags or classes, by number."""
    pad_id: int | None = None
    """The id of padding; None if the tokenizer has no id for it alone."""
    end_id: int | None = None
    """The id at the end of a document; None if the tokenizer has none."""

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and the tokens before it."""
        return self.kind == "vocabulary"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward and backward pass."""

    ids_BT: Tensor
    targets: Tensor
    """What to predict at each slot, (B, T), or of each row, (B,). `IGNORED` without a target."""
    positions_BT: Tensor
    """Positions in the document, or in the row: (B, T), or (1, T) if equal for all rows."""
    scope: Scope
    """Which slots attend to each other."""
    is_token_BT: Tensor | None = None
    """True on tokens, False on padding; None if rows are packed. Their padding comes last and has
    no target."""
    token_types_BT: Tensor | None = None
    """0 or 1, the text of a pair that a token belongs to; None if rows are single texts."""
    cache: Any = None
    """The model's cache of keys and values, which holds the slots before these."""

    @classmethod
    def of_ids(cls, ids_BT: Tensor, *, causal: bool) -> "MicroBatch":
        """Return rows of one document each, all of one length, without targets: to use a model."""
        return cls(
            ids_BT=ids_BT,
            targets=torch.full_like(ids_BT, IGNORED),
            positions_BT=_count(ids_BT.shape[1], ids_BT.device),
            scope=Scope(causal=causal),
            is_token_BT=torch.ones_like(ids_BT, dtype=torch.bool),
            token_types_BT=torch.zeros_like(ids_BT),
        )

    @classmethod
    def to_continue(cls, ids_BT: Tensor, padding_B1: Tensor, new: int, cache: Any) -> "MicroBatch":
        """Return the last slots of rows that begin with padding, for a model with a cache.

        Args:
            ids_BT: Ids of all slots so far.
            padding_B1: Number of slots before the first token of each row.
            new: Number of slots that the cache lacks.
            cache: The model's cache.
        """
        slot_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        own_T1 = slot_T[-new:, None]
        is_seen_BTT = (slot_T <= own_T1) & (slot_T >= padding_B1[:, None])
        is_seen_BTT |= slot_T == own_T1  # a softmax over nothing is NaN, which would spread
        return replace(
            cls.of_ids(ids_BT[:, -new:], causal=True),
            positions_BT=(slot_T[-new:] - padding_B1).clamp(min=0),
            scope=Scope(causal=True, mask_BHTT=is_seen_BTT[:, None]),
            cache=cache,
        )

    @property
    def num_slots(self) -> int:
        """Token slots: B times T."""
        return self.ids_BT.numel()

    @property
    def is_plain(self) -> bool:
        """Whether micro-batches of this shape differ in ids, targets and positions only."""
        is_bare = self.is_token_BT is None and self.token_types_BT is None and self.cache is None
        return is_bare and self.scope == Scope(self.scope.causal)

    @property
    def targets_B(self) -> Tensor:
        """The number of targets of each row, int64."""
        targets = self.targets
        counted = ~targets.isnan() if targets.is_floating_point() else targets != IGNORED
        return counted.view(len(targets), -1).sum(1)

    def blank_like(self, rows: int, length: int) -> "MicroBatch":
        """Return an empty micro-batch of another shape, with the same fields and without
        targets."""
        targets = self.targets
        return MicroBatch(
            ids_BT=self.ids_BT.new_zeros((rows, length)),
            targets=targets.new_full((rows, length)[: targets.dim()], _none(targets)),
            positions_BT=self.positions_BT.new_zeros(
                (rows if len(self.positions_BT) > 1 else 1, length)
            ),
            scope=self.scope.blank_like(rows, length),
            is_token_BT=_filled_like(self.is_token_BT, rows, length, 1),
            token_types_BT=_filled_like(self.token_types_BT, rows, length, 0),
        )


@dataclass(frozen=True, slots=True)
class Shaper:
    """Makes micro-batches from a loader's batches."""

    causal: bool
    """Whether a token attends only to itself and the tokens before it. If so, the target of a slot
    is the next label."""
    apart: bool
    """Whether packed documents are separate. Otherwise attention crosses them within a row."""
    separation: Separation
    """What separates packed documents. `ends` also separate tokens from padding."""
    compiled: bool = False
    """Whether the model is compiled. Then batches are filled up with rows of padding."""
    _counts: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Positions of rows by length, made once: kernels of their own would cost more than they
    compute."""

    def __call__(self, batch: Batch) -> MicroBatch:
        """Return the micro-batch of a batch. Queues a few kernels; does not wait for the device."""
        packed, is_token_BT = ATTENTION_MASK not in batch, None
        if packed:
            scope = self._packed(batch)
        else:
            is_token_BT = batch[ATTENTION_MASK]
            if self.compiled:  # in a row of padding, attention would be a softmax over nothing
                is_token_BT = is_token_BT | ~is_token_BT[:, :1]
            scope = self._padded(is_token_BT)
        if self.compiled:
            scope.mark_dynamic()
        if packed and self.apart:
            positions_BT = batch[POSITION_IDS]
        else:
            positions_BT = self._positions(batch[INPUT_IDS].shape[1], batch.device)
        return MicroBatch(
            ids_BT=batch[INPUT_IDS],
            targets=batch.targets if self.causal else batch[TARGETS],
            positions_BT=positions_BT,
            scope=scope,
            is_token_BT=is_token_BT,
            token_types_BT=batch.get(TOKEN_TYPE_IDS),
        )

    def _positions(self, length: int, device: torch.device) -> Tensor:
        found = self._counts.get(length)
        if found is None or found._version:  # a model has changed it in place
            found = self._counts[length] = _count(length, device)
        return found

    def _padded(self, is_token_BT: Tensor) -> Scope:
        """Return the scope of padded rows. Causal tokens never see the padding, which comes
        last.

        Otherwise each row is a segment of tokens and a segment of padding.
        """
        if self.causal:
            return Scope(causal=True)
        rows, length = is_token_BT.shape
        mask_BHTT = is_token_BT.view(rows, 1, 1, length)
        if self.separation != "ends":
            return Scope(causal=False, mask_BHTT=mask_BHTT)
        ends = row_ends(rows, length, is_token_BT.device)
        pairs = torch.stack((ends[:-1], ends[:-1] + is_token_BT.sum(1)), dim=1).flatten()
        ends = torch.cat((pairs.int(), ends[-1:]))
        return Scope(False, mask_BHTT, ends, size_only(length, is_token_BT.device))

    def _packed(self, batch: Batch) -> Scope:
        if not self.apart:
            return Scope(causal=self.causal)
        ends = batch.cu_seqlens
        if self.separation != "mask":
            by_ends = self.separation == "ends"
            longest = size_only(batch.max_seqlen, ends.device) if by_ends else None
            return Scope(causal=self.causal, cu_seqlens=ends, longest=longest)
        segment_BT = batch["seq_idx"]
        mask_BHTT = segment_BT[:, None, :, None] == segment_BT[:, None, None, :]
        return Scope(causal=self.causal, mask_BHTT=mask_BHTT.tril() if self.causal else mask_BHTT)


def _filled_like(values: Tensor | None, rows: int, length: int, fill: int) -> Tensor | None:
    return None if values is None else values.new_full((rows, length), fill)


def _none(targets: Tensor) -> float:
    """Return the target that stands for no target."""
    return no_target(is_float=targets.is_floating_point())


def _count(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)[None]
