"""A micro-batch, and the two ways to build it: on the host with numpy, on a device with torch.

Both start from ragged tokens in storage dtype and give the same tensors. On the host numpy fills
through a boolean mask, and what nobody asks for is never built; on a device torch gathers, which
needs no synchronisation because every shape is known on the host.

Shapes: B sequences, T padded length, N tokens, P pieces, S segments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import lru_cache

import numpy as np
import torch

from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, LABEL, LABELS, TOKEN_TYPE_IDS
from tokenfeed.pipeline.planning.share import RaggedBatch

__all__ = ["Batch", "DeviceInputs", "build_on_device", "build_on_host", "device_inputs"]

ATTENTION_MASK, POSITION_IDS = "attention_mask", "position_ids"
_TABLE_LENGTH = 256  # longer masks are as quick to compare as to look up
_FEW_ROWS = 16  # copied one by one: quicker than to build a mask and to fill through it

DeviceInputs = dict[str, torch.Tensor]
"""What crosses to the device: columns with a value a token (ragged, storage dtype), and the host's
`sequence_lengths`, `segments`, `ignored` and classes where the batch has them."""


class Batch(Mapping[str, torch.Tensor]):
    """One micro-batch; as a Mapping it goes straight into a transformers model.

    Tensors, on the loader's device:
        input_ids: [B, T] int64.
        attention_mask: [B, T] bool, true on tokens. Not in packed batches.
        position_ids: [B, T] int64, counted from the beginning of each document. Only in packed
            batches: transformers (4.53 and later) keeps attention inside documents by them, if it
            gets no mask and the model's config says `use_cache=False`.
        token_type_ids: [B, T] int64, where rows are pairs of texts.
        labels: [B, T] int64, -100 where no loss counts. Language modelling: the ids, unshifted (the
            model compares position t + 1 with t), without the first token of every piece, which has
            no context, and without prompts. Tagging: the tags. Classification: [B] int64, a class.
    """

    def __init__(self, ragged: RaggedBatch, tensors: dict[str, torch.Tensor]) -> None:
        self._ragged = ragged
        self._tensors = tensors
        self._keys = _keys(ragged)
        self.lengths = ragged.sequence_lengths
        """Tokens of each sequence, numpy, [B]."""
        self.is_filler = ragged.is_filler
        """Whether this repeats another rank's sequence, so that no rank stands idle."""
        self.num_tokens = ragged.num_tokens
        """Tokens delivered; 0 for a filler."""
        self.num_targets = ragged.num_targets
        """Labels that a loss counts; 0 for a filler."""
        rows, length = ragged.shape
        self.num_slots = rows * length
        """B times T: tokens and padding."""

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._tensors:
            if key not in self._keys:
                raise KeyError(key)
            self._tensors[key] = _BUILT_WHEN_ASKED[key](self._ragged, self._tensors[INPUT_IDS])
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        rows, length = self._ragged.shape
        return f"Batch([{rows}, {length}], {self.num_tokens:,} tokens, {self.device})"

    def tensors(self) -> Iterable[torch.Tensor]:
        """All tensors that there are so far."""
        return self._tensors.values()

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._tensors[INPUT_IDS].device

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> "Batch":
        """The same on another device; itself where it is there already."""
        if self.device == torch.device(device):
            return self
        tensors = {key: self[key] for key in self}
        if self._ragged.has("segments"):
            tensors["segments"] = self.cu_seqlens
        moved = copy(self)
        moved._tensors = {
            key: tensor.to(device, non_blocking=non_blocking) for key, tensor in tensors.items()
        }
        return moved

    @property
    def ends_gang(self) -> bool:
        """Whether a gang ends with it: the place for an optimizer step that any number of ranks
        makes from the same rows."""
        return bool(self._ragged.of_round("ends_gang"))

    @property
    def rows(self) -> np.ndarray:
        """Row each piece comes from, counted over all sources, numpy, [P]; unpacked, P = B."""
        return self._ragged.of_pieces("numbers")

    @property
    def piece_lengths(self) -> np.ndarray:
        """Tokens of each piece, numpy, [P]."""
        return self._ragged.of_pieces("lengths")

    @property
    def starts(self) -> np.ndarray:
        """First token of each piece within its row, numpy, [P]: 0 unless the row was cut."""
        if self._ragged.has("starts"):
            return self._ragged.of_pieces("starts")
        return np.zeros(len(self.rows), np.int64)

    @property
    def num_cut_pieces(self) -> int:
        """Pieces that continue a row which was too long."""
        return int(np.count_nonzero(self.starts)) if self._ragged.has("starts") else 0

    @property
    def sequence_offsets(self) -> np.ndarray:
        """Where each sequence begins among the pieces, numpy, [B + 1]."""
        return self._ragged.sequence_offsets

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Packed batches: where documents and paddings begin in the flattened batch, and its end,
        [S + 1] int32 on the device, as variable-length attention takes it."""
        if "segments" not in self._tensors:
            self._tensors["segments"] = torch.from_numpy(self._ragged.slots("segments").copy())
        return self._tensors["segments"]

    @property
    def max_seqlen(self) -> int:
        """Packed batches: the longest segment."""
        return int(np.diff(self._ragged.slots("segments")).max())

    @property
    def document_ids(self) -> torch.Tensor:
        """Packed batches: which segment each slot belongs to, [B, T] int64."""
        slots = torch.arange(self.num_slots, dtype=torch.int32, device=self.device)
        documents = torch.bucketize(slots, self.cu_seqlens[1:], right=True)
        return documents.view(self._ragged.shape)


def build_on_host(ragged: RaggedBatch, pad_id: int) -> Batch:
    """Pad a micro-batch into CPU tensors; masks, labels and positions are built when asked for."""
    few = len(ragged.sequence_lengths) <= _FEW_ROWS
    mask = None if ragged.is_full or few else _mask(ragged)
    tensors = {INPUT_IDS: _padded(ragged, INPUT_IDS, pad_id, mask)}
    if ragged.has(TOKEN_TYPE_IDS):
        tensors[TOKEN_TYPE_IDS] = _padded(ragged, TOKEN_TYPE_IDS, 0, mask)
    if ragged.has(LABELS):
        labels = _padded(ragged, LABELS, IGNORED, mask)
        tensors[LABELS] = labels.fill_(IGNORED) if ragged.is_filler else labels
    if mask is not None and not ragged.has("segments"):
        tensors[ATTENTION_MASK] = torch.from_numpy(mask)
    batch = Batch(ragged, tensors)
    ragged.drop_tokens()
    return batch


def device_inputs(ragged: RaggedBatch) -> DeviceInputs:
    """What has to cross to the device, as host tensors: views where they can be."""
    ids = ragged.of_tokens(INPUT_IDS)
    inputs = {INPUT_IDS: torch.from_numpy(ids.view(f"i{ids.itemsize}"))}  # torch computes little
    for name in (TOKEN_TYPE_IDS, LABELS):  # with unsigned integers
        if ragged.has(name):
            inputs[name] = torch.from_numpy(ragged.of_tokens(name))
    for name, values in ragged.staged().items():
        inputs[name] = torch.from_numpy(values)
    return inputs


def build_on_device(inputs: DeviceInputs, ragged: RaggedBatch, pad_id: int) -> Batch:
    """Widen, pad and label on the device of `inputs`; queues a few kernels, never synchronises.

    Args:
        inputs: `device_inputs` of the same micro-batch, copied.
        ragged: The micro-batch on the host, for shapes and tracing.
        pad_id: Fills the padding of input_ids.
    """
    ids_N = inputs[INPUT_IDS]
    lengths_B = inputs["sequence_lengths"].long()
    column_T = torch.arange(ragged.padded_length, device=ids_N.device)
    mask_BT = column_T < lengths_B[:, None]
    first_B = torch.cumsum(lengths_B, 0) - lengths_B
    source_BT = (first_B[:, None] + column_T).clamp_(max=len(ids_N) - 1)
    unsigned = (1 << 8 * ids_N.element_size()) - 1
    ids_BT = ids_N[source_BT].long() & unsigned

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.where(mask_BT, inputs[name][source_BT].long(), fill)

    tensors = {INPUT_IDS: torch.where(mask_BT, ids_BT, pad_id)}
    if TOKEN_TYPE_IDS in inputs:
        tensors[TOKEN_TYPE_IDS] = padded(TOKEN_TYPE_IDS, 0)
    if "segments" in inputs:
        tensors["segments"] = segments = inputs["segments"]
        slots = torch.arange(mask_BT.numel(), dtype=torch.int32, device=ids_N.device)
        start = segments[torch.bucketize(slots, segments[1:], right=True)]
        tensors[POSITION_IDS] = (slots - start).long().view_as(mask_BT)
    else:
        tensors[ATTENTION_MASK] = mask_BT
    if LABEL in inputs:
        labels = inputs[LABEL].long()
    elif LABELS in inputs:
        labels = padded(LABELS, IGNORED)
    else:
        labels = torch.where(mask_BT, ids_BT, IGNORED)
        _ignore_without_context(labels, inputs)
    tensors[LABELS] = labels.fill_(IGNORED) if ragged.is_filler else labels
    return Batch(ragged, tensors)


def _ignore_without_context(labels_BT: torch.Tensor, inputs: DeviceInputs) -> None:
    """Take from the labels what has no context, or is a prompt."""
    if "ignored" in inputs:
        labels_BT.view(-1).index_fill_(0, inputs["ignored"].long(), IGNORED)
    elif "segments" in inputs:
        labels_BT.view(-1).index_fill_(0, inputs["segments"][:-1].long(), IGNORED)
    else:
        labels_BT[:, 0] = IGNORED


def _keys(ragged: RaggedBatch) -> tuple[str, ...]:
    types = (TOKEN_TYPE_IDS,) if ragged.has(TOKEN_TYPE_IDS) else ()
    packed = ragged.has("segments")
    return (INPUT_IDS, POSITION_IDS if packed else ATTENTION_MASK, *types, LABELS)


def _padded(ragged: RaggedBatch, name: str, fill: int, mask_BT: np.ndarray | None) -> torch.Tensor:
    """A column with a value a token, widened and padded: [B, T] int64."""
    values = ragged.of_tokens(name)
    if ragged.is_full:
        return torch.from_numpy(values.astype(np.int64).reshape(ragged.shape))
    if mask_BT is None:
        return torch.from_numpy(_copied_rows(ragged, values, fill))
    padded = np.full(ragged.shape, fill, np.int64)
    padded[mask_BT] = values
    return torch.from_numpy(padded)


def _copied_rows(ragged: RaggedBatch, values: np.ndarray, fill: int) -> np.ndarray:
    """Pad a few long rows, each with a copy of its own."""
    padded = np.empty(ragged.shape, np.int64)
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
    """Row k is true on the first k of `length` columns."""
    return np.tri(length + 1, length, -1, dtype=np.bool_)


def _attention_mask(ragged: RaggedBatch, input_ids: torch.Tensor) -> torch.Tensor:
    if ragged.is_full:
        return torch.ones(ragged.shape, dtype=torch.bool)
    return torch.from_numpy(_mask(ragged))


def _position_ids(ragged: RaggedBatch, input_ids: torch.Tensor) -> torch.Tensor:
    segments = ragged.slots("segments")
    steps = np.ones(segments[-1], np.int64)  # from one slot's position to the next one's
    steps[0] = 0
    steps[segments[1:-1]] -= np.diff(segments)[:-1]
    return torch.from_numpy(np.cumsum(steps, out=steps).reshape(ragged.shape))


def _labels(ragged: RaggedBatch, input_ids: torch.Tensor) -> torch.Tensor:
    if ragged.has(LABEL):
        labels = torch.from_numpy(ragged.of_pieces(LABEL).astype(np.int64))
        return labels.fill_(IGNORED) if ragged.is_filler else labels
    if ragged.is_filler:
        return torch.full_like(input_ids, IGNORED)
    labels_BT = input_ids.numpy().copy()
    if not ragged.is_full:
        np.copyto(labels_BT, IGNORED, where=~_mask(ragged))
    if ragged.has("ignored"):
        labels_BT.reshape(-1)[ragged.slots("ignored")] = IGNORED
    elif ragged.has("segments"):
        labels_BT.reshape(-1)[ragged.slots("segments")[:-1]] = IGNORED
    else:
        labels_BT[:, 0] = IGNORED
    return torch.from_numpy(labels_BT)


_Recipe = Callable[[RaggedBatch, torch.Tensor], torch.Tensor]
_BUILT_WHEN_ASKED: dict[str, _Recipe] = {
    ATTENTION_MASK: _attention_mask,
    POSITION_IDS: _position_ids,
    LABELS: _labels,
}
"""How the host builds a tensor from the padded ids; token columns were built before."""
