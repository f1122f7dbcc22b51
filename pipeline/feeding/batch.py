"""A micro-batch, and how the host builds it with numpy. `transfer` builds the same with torch.

Both use ragged tokens in storage dtype. Masks, positions and labels (except tags) are built on
first use. Torch is imported for the first batch: a worker makes none.

Shapes: B sequences, T padded length, P pieces, S segments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, is_kept, no_target, role_of
from tokenfeed.pipeline.windows.rank_slice import TARGETS, RaggedBatch

if TYPE_CHECKING:
    import torch


ATTENTION_MASK, POSITION_IDS, SEQ_IDX = "attention_mask", "position_ids", "seq_idx"
SEGMENTS = "segments"
_ENDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_USE_CACHE = "use_cache"
_OF_PACKED = (POSITION_IDS, *_ENDS, *_LONGEST, SEQ_IDX, _USE_CACHE)
_TABLE_LENGTH = 256  # longer masks are as quick to compare as to look up
_FEW_ROWS = 16  # copied one by one: quicker than to build a mask and to fill through it

Tensors = dict[str, Any]
"""Tensors by name, or arrays that become tensors."""
Build = Callable[[str, RaggedBatch, Tensors], Any]
"""Builds the missing tensor of a name from the other tensors of a batch."""


@dataclass(frozen=True, slots=True)
class BatchForm:
    """How the values of a batch are represented."""

    pad_id: int
    """Id that fills the padding of `input_ids`."""
    ignore_index: int = IGNORED
    """Value of `Batch.targets` where no loss counts."""


class Batch(Mapping[str, Any]):
    """One micro-batch. It is a Mapping, so a transformers model takes it as `model(**batch)`.

    Each key is also an attribute: `batch.input_ids`. Shapes are of B sequences, T padded length,
    P pieces, S segments. Tensors are on the loader's device. Every batch has:

    - `input_ids`: [B, T] int64.
    - `labels`: [B, T] int64, -100 where no loss counts. Language modelling: the ids, unshifted (the
      model compares position t + 1 with t), without the first token of every piece, which has no
      context, and without prompts. Tagging: the tags. Classification: [B] int64, a class.
      Regression: [B] float32, a number; NaN in a filler.
    - `token_type_ids`: [B, T] int64, where rows are pairs of texts.

    Padded and fixed batches also have:

    - `attention_mask`: [B, T] bool, true on tokens.

    Packed batches instead have what keeps documents apart inside a transformers model:

    - `position_ids`: [B, T] int64, counted from the beginning of each document. Eager, SDPA and
      flex attention find the documents by them.
    - `cu_seq_lens_q`, `cu_seq_lens_k`: [S + 1] int32, where documents begin and the batch ends.
      `max_length_q`, `max_length_k`: T, an int that no document exceeds. FlashAttention finds the
      documents by these four.
    - `seq_idx`: [B, T] int32, the document of each slot. State-space layers find the documents by
      it if their kernels are installed, else transformers refuses them. Some ignore it: see
      `check_documents_apart`.
    - `use_cache`: False, because with a cache transformers does not look at `position_ids`.

    `batch[NAME]` and `batch.NAME` return a column of `pretokenize --keep NAME`: [B, T] int64 or
    float32, 0 on padding. `**batch` does not pass these columns, because models do not take them.
    """

    def __init__(
        self, ragged: RaggedBatch, tensors: Tensors, build: Build, ignore_index: int = IGNORED
    ) -> None:
        self._ragged = ragged
        self._tensors = tensors
        self._build = build
        self._ignore_index = ignore_index
        self._targets: Any = None
        self._keys, self._kept = _names(ragged.token_columns, ragged.is_packed)
        self.lengths = ragged.sequence_lengths
        """Tokens of each sequence, numpy, [B]."""
        self.is_filler = ragged.is_filler
        """Whether this repeats a sequence of another rank, so that all ranks have a batch."""
        self.num_tokens = ragged.num_tokens
        """Number of tokens; 0 for a filler."""
        self.num_targets = ragged.num_targets
        """Number of labels that a loss counts; 0 for a filler."""
        rows, length = ragged.shape
        self.num_slots = rows * length
        """Number of slots, B times T: tokens and padding."""

    @overload
    def __getitem__(  # type: ignore[overload-overlap]
        self, key: Literal["max_length_q", "max_length_k", "use_cache"]
    ) -> int: ...
    @overload
    def __getitem__(self, key: str) -> "torch.Tensor": ...
    def __getitem__(self, key: str) -> Any:
        if key not in self._tensors:
            if key not in self._keys:
                raise KeyError(key)
            if key in _ENDS:
                return self.cu_seqlens
            if key in _LONGEST:
                return self._ragged.padded_length
            if key == _USE_CACHE:
                return False
            self._tensors[key] = self._build(key, self._ragged, self._tensors)
        return self._tensors[key]

    def __getattr__(self, name: str) -> Any:
        made = self.__dict__  # empty while a copy is being made
        keys = (*made.get("_keys", ()), *made.get("_kept", ()))
        if name in keys:
            return self[name]
        raise AttributeError(
            f"Batch has no attribute {name!r}. Its keys are {', '.join(keys)}.", name=name, obj=self
        )

    def __contains__(self, key: object) -> bool:
        return (
            key in self._keys or key in self._kept
        )  # the default of Mapping would build the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        rows, length = self._ragged.shape
        return f"Batch([{rows}, {length}], {self.num_tokens:,} tokens, {self.device})"

    def tensors(self) -> Iterable[Any]:
        """Return all tensors built so far."""
        return self._tensors.values()

    @property
    def device(self) -> "torch.device":
        """Device of the tensors."""
        device: torch.device = self._tensors[INPUT_IDS].device
        return device

    def to(self, device: "str | torch.device", *, non_blocking: bool = False) -> "Batch":
        """Return the batch on another device, or itself if it is there already."""
        if str(self.device) == str(device):
            return self
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def without_targets(self) -> "Batch":
        """Return the batch as a filler: the same inputs, and labels that no loss counts."""
        filler = copy(self)
        labels = self[TARGETS]
        none = no_target(is_float=labels.is_floating_point())
        filler._tensors = {**self._tensors, TARGETS: labels * 0 + none}
        filler._targets = None
        filler.is_filler, filler.num_tokens, filler.num_targets = True, 0, 0
        return filler

    @property
    def real_rows(self) -> int:
        """Number of rows with data, which come first. A filler has none, and rows of padding at the
        end of a batch do not count."""
        return 0 if self.is_filler else int(np.count_nonzero(self.lengths))

    def _mapped(self, change: Callable[[Any], Any]) -> "Batch":
        for key in self:
            self[key]  # build everything now: it could not be built there later
        changed = copy(self)
        changed._tensors = {key: change(tensor) for key, tensor in self._tensors.items()}
        changed._targets = None  # built again there
        return changed

    @property
    def targets(self) -> "torch.Tensor":
        """What the model should predict at each slot: [B, T] int64, contiguous, `ignore_index` of
        the loader where no loss counts. For losses outside of `transformers`.

        Language modelling: the next token, which is the label of the next slot. Tagging,
        classification and regression: the labels.
        """
        if self._targets is None:
            ragged = self._ragged
            is_next = TARGETS not in ragged.token_columns and ragged.row_targets is None
            self._targets = _targets(self[TARGETS], self._ignore_index, is_next=is_next)
        targets: torch.Tensor = self._targets
        return targets

    @property
    def ends_step(self) -> bool:
        """Whether this is the last micro-batch of a step of this rank: call the optimizer now. The
        step has the same rows on any number of ranks."""
        return self._ragged.ends_step

    @property
    def rows(self) -> np.ndarray:
        """Number of the row of each piece, over all sources, numpy, [P] int64; without packing P =
        B."""
        return self._ragged.rows

    @property
    def piece_lengths(self) -> np.ndarray:
        """Tokens of each piece, numpy, [P]; without `Packed.begin_token`."""
        return self._ragged.piece_lengths

    @property
    def starts(self) -> np.ndarray:
        """First token of each piece in its row, numpy, [P]: 0 unless the row was cut."""
        starts = self._ragged.starts
        return np.zeros(len(self.rows), np.int64) if starts is None else starts

    @property
    def sequence_offsets(self) -> np.ndarray:
        """Where each sequence begins among the pieces, numpy, [B + 1]."""
        return self._ragged.sequence_offsets

    @property
    def cu_seqlens(self) -> "torch.Tensor":
        """Packed batches: where documents and paddings begin in the flattened batch, and its end,
        [S + 1] int32 on the device, for variable-length attention.

        Raises:
            ConfigError: The batch is not packed.
        """
        self._check_packed("cu_seqlens")
        if SEGMENTS not in self._tensors:
            self._tensors[SEGMENTS] = self._build(SEGMENTS, self._ragged, self._tensors)
        segments: torch.Tensor = self._tensors[SEGMENTS]
        return segments

    @property
    def max_seqlen(self) -> int:
        """Packed batches: tokens of the longest segment."""
        self._check_packed("max_seqlen")
        return int(np.diff(self._ragged.segments).max())

    def _check_packed(self, name: str) -> None:
        if not self._ragged.is_packed:
            raise ConfigError(
                f"`{name}`: only packed batches have this attribute; here every row is a single "
                "document. Use `attention_mask`, or make the loader with `batching=Packed(...)`."
            )


def build_on_host(ragged: RaggedBatch, form: BatchForm) -> Batch:
    """Build a batch of CPU tensors. Masks, labels and positions are built on first use."""
    few = len(ragged.sequence_lengths) <= _FEW_ROWS
    mask = None if ragged.is_full or few else _mask(ragged)
    arrays = {
        name: _padded(ragged, name, fill, mask)
        for name, fill in paddings(ragged, form.pad_id).items()
    }
    if ragged.is_filler and TARGETS in arrays:
        arrays[TARGETS] = _no_targets_like(arrays[TARGETS])
    if mask is not None and not ragged.is_packed:
        arrays[ATTENTION_MASK] = mask
    batch = Batch(ragged, _as_tensors(arrays), _tensor, form.ignore_index)
    ragged.drop_tokens()
    return batch


def paddings(ragged: RaggedBatch, pad_id: int) -> dict[str, float]:
    """Return the padding value of each column with one value per token."""
    special: dict[str, float] = {INPUT_IDS: pad_id}
    if TARGETS in ragged.token_columns:
        is_float = ragged.of_tokens(TARGETS).dtype.kind == "f"
        special[TARGETS] = no_target(is_float=is_float)
    return {name: special.get(name, 0) for name in ragged.token_columns}


def _no_targets_like(labels: np.ndarray) -> np.ndarray:
    """Return the labels of a filler: the same shape, and no loss counts them."""
    return np.full_like(labels, no_target(is_float=labels.dtype.kind == "f"))


def _targets(labels: Any, ignore_index: int, *, is_next: bool) -> Any:
    """Return the targets of labels. With `is_next`, a slot gets the label of the next slot, and the
    last slot of a row gets the first label, which is never a target. Scores keep their values."""
    import torch

    with torch.inference_mode(False):
        moved = labels.roll(-1, 1) if is_next else labels.clone()
        if moved.is_floating_point():
            return moved
        return moved.masked_fill_(moved == IGNORED, ignore_index)


def _tensor(name: str, ragged: RaggedBatch, tensors: Tensors) -> Any:
    return _as_tensors({name: _ARRAYS[name](ragged, tensors)})[name]


def _as_tensors(arrays: Tensors) -> Tensors:
    import torch

    if not torch.is_inference_mode_enabled():  # to leave the mode takes longer than all the rest
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.inference_mode(False):  # the tensors are kept and may be used in training later
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@cache
def _names(columns: tuple[str, ...], is_packed: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of a batch, and its kept columns."""
    inputs = (name for name in columns if role_of(name) == "input")
    where = _OF_PACKED if is_packed else (ATTENTION_MASK,)
    return (INPUT_IDS, *where, *inputs, TARGETS), tuple(filter(is_kept, columns))


def _padded(ragged: RaggedBatch, name: str, fill: float, mask_BT: np.ndarray | None) -> np.ndarray:
    """Return a column with one value per token, widened and padded: [B, T]."""
    values = ragged.of_tokens(name)
    dtype = _wide(values)
    if ragged.is_full:
        return values.astype(dtype).reshape(ragged.shape)
    if mask_BT is None:
        return _copied_rows(ragged, values, fill, dtype)
    padded = np.full(ragged.shape, fill, dtype)
    padded[mask_BT] = values
    return padded


def _wide(values: np.ndarray) -> np.dtype[Any]:
    """Return the dtype of values in a batch: int64 for integers, unchanged for floats."""
    return np.dtype(np.int64) if values.dtype.kind in "iu" else values.dtype


def _copied_rows(
    ragged: RaggedBatch, values: np.ndarray, fill: float, dtype: np.dtype[Any]
) -> np.ndarray:
    """Pad a few long rows with one copy each."""
    padded = np.empty(ragged.shape, dtype)
    start = 0
    for row, length in zip(padded, ragged.sequence_lengths.tolist(), strict=True):
        row[:length] = values[start : start + length]
        row[length:] = fill
        start += length
    return padded


def _mask(ragged: RaggedBatch) -> np.ndarray:
    """True on tokens: [B, T] bool."""
    length = ragged.padded_length
    if length <= _TABLE_LENGTH:
        return _prefixes(length).take(ragged.sequence_lengths, axis=0)
    return np.arange(length, dtype=np.int32) < ragged.sequence_lengths[:, None]


@lru_cache(maxsize=_TABLE_LENGTH)
def _prefixes(length: int) -> np.ndarray:
    """Return a table whose row k is true on the first k of `length` columns."""
    return np.tri(length + 1, length, -1, dtype=np.bool_)


def _attention_mask(ragged: RaggedBatch, arrays: Tensors) -> np.ndarray:
    if ragged.is_full:
        return np.ones(ragged.shape, np.bool_)
    return _mask(ragged)


def _position_ids(ragged: RaggedBatch, arrays: Tensors) -> np.ndarray:
    segments = ragged.segments
    steps = np.ones(segments[-1], np.int64)  # from one slot's position to the next one's
    steps[0] = 0
    steps[segments[1:-1]] -= np.diff(segments)[:-1]
    return np.cumsum(steps, out=steps).reshape(ragged.shape)


def _seq_idx(ragged: RaggedBatch, arrays: Tensors) -> np.ndarray:
    lengths = np.diff(ragged.segments)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return documents.reshape(ragged.shape)


def _labels(ragged: RaggedBatch, arrays: Tensors) -> np.ndarray:
    if (targets := ragged.row_targets) is not None:
        none = no_target(is_float=targets.dtype.kind == "f")
        labels = np.full(len(ragged.sequence_lengths), none, _wide(targets))
        labels[: len(targets)] = targets  # the rest is rows of padding
        return _no_targets_like(labels) if ragged.is_filler else labels
    labels_BT = np.asarray(arrays[INPUT_IDS]).astype(np.int64)
    if ragged.is_filler:
        return _no_targets_like(labels_BT)
    if not ragged.is_full:
        np.copyto(labels_BT, IGNORED, where=~_mask(ragged))
    if (ignored := ragged.ignored) is not None:
        labels_BT.reshape(-1)[ignored] = IGNORED
    elif ragged.is_packed:
        labels_BT.reshape(-1)[ragged.segments[:-1]] = IGNORED
    else:
        labels_BT[:, 0] = IGNORED
    return labels_BT


def _segments(ragged: RaggedBatch, arrays: Tensors) -> np.ndarray:
    return ragged.segments.copy()


_ARRAYS: dict[str, Callable[[RaggedBatch, Tensors], np.ndarray]] = {
    ATTENTION_MASK: _attention_mask,
    POSITION_IDS: _position_ids,
    SEGMENTS: _segments,
    SEQ_IDX: _seq_idx,
    TARGETS: _labels,
}
"""Builders of arrays on first use. Columns with one value per token are built at once."""
