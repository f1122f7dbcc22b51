"""Build a micro-batch on a device with torch: widen, pad and label the copied tokens.

Nothing synchronises, because the host knows every shape. Ids and labels are built at once. Masks,
positions and `seq_idx` are built on first use, on the current stream, from tensors of the batch.

Shapes: B sequences, T padded length, N tokens, S segments.
"""

from collections.abc import Callable

import torch

from tokenfeed.pipeline.feeding.batch import (
    ATTENTION_MASK,
    POSITION_IDS,
    SEGMENTS,
    SEQ_IDX,
    Batch,
    BatchForm,
    Tensors,
    paddings,
)
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, no_target
from tokenfeed.pipeline.windows.rank_slice import TARGETS, RaggedBatch

_LENGTHS = "sequence_lengths"


def device_inputs(ragged: RaggedBatch) -> Tensors:
    """Return the host tensors to copy to the device, as views where possible.

    These are the columns with one value per token, shape (N,), in storage dtype, and those of
    `sequence_lengths`, `segments`, `ignored` and `row_targets` that the batch needs.
    """
    inputs = {name: torch.from_numpy(ragged.of_tokens(name)) for name in ragged.token_columns}
    ids = ragged.of_tokens(INPUT_IDS)  # torch supports few operations on unsigned integers
    inputs[INPUT_IDS] = torch.from_numpy(ids.view(f"i{ids.itemsize}"))
    for name, values in ragged.staged().items():
        if name != _LENGTHS or not ragged.is_full:
            inputs[name] = torch.from_numpy(values)
    return inputs


def build_on_device(inputs: Tensors, ragged: RaggedBatch, form: BatchForm) -> Batch:
    """Widen, pad and label on the device of `inputs`. Queues a few kernels and never synchronises.

    Args:
        inputs: The result of `device_inputs` for this micro-batch, copied to the device.
        ragged: The micro-batch on the host, for shapes and row numbers.
        form: How the values are represented.

    Returns:
        The batch, with tensors on the device of `inputs`.
    """
    mask_BT, source_BT = (None, None) if ragged.is_full else _slots_of(inputs, ragged)
    unsigned = (1 << 8 * inputs[INPUT_IDS].element_size()) - 1
    tensors: Tensors = {}
    for name, fill in paddings(ragged, form.pad_id).items():
        values_N = _widened(inputs[name])
        if name == INPUT_IDS:
            values_N &= unsigned
        if mask_BT is None:
            tensors[name] = values_N.view(ragged.shape)
        else:
            tensors[name] = torch.where(mask_BT, values_N[source_BT], fill)
    if "row_targets" in inputs:
        labels = _widened(inputs["row_targets"])
        none = no_target(is_float=labels.is_floating_point())
        added = len(ragged.sequence_lengths) - len(labels)  # rows of padding
        tensors[TARGETS] = torch.nn.functional.pad(labels, (0, added), value=none)
    elif TARGETS not in tensors:
        ids_BT = tensors[INPUT_IDS]
        tensors[TARGETS] = (
            ids_BT.clone() if mask_BT is None else torch.where(mask_BT, ids_BT, IGNORED)
        )
        _ignore_without_context(tensors[TARGETS], inputs)
    if ragged.is_filler:
        labels = tensors[TARGETS]
        none = no_target(is_float=labels.is_floating_point())
        tensors[TARGETS] = torch.full_like(labels, none)
    if form.id_dtype == "int32":
        tensors[INPUT_IDS] = tensors[INPUT_IDS].int()
    if SEGMENTS in inputs:
        tensors[SEGMENTS] = inputs[SEGMENTS]
    elif mask_BT is not None:
        tensors[ATTENTION_MASK] = mask_BT
    return Batch(ragged, tensors, _build, form.ignore_index)


def _slots_of(inputs: Tensors, ragged: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots of a batch with padding have a token, [B, T] bool, and the index of this
    token, [B, T]; any index for padding."""
    lengths_B = inputs[_LENGTHS].long()
    column_T = torch.arange(ragged.padded_length, device=lengths_B.device)
    first_B = torch.cumsum(lengths_B, 0) - lengths_B
    source_BT = (first_B[:, None] + column_T).clamp_(max=len(inputs[INPUT_IDS]) - 1)
    return column_T < lengths_B[:, None], source_BT


def _widened(values: torch.Tensor) -> torch.Tensor:
    """Return integers as int64, floats unchanged."""
    return values if values.is_floating_point() else values.long()


def _ignore_without_context(labels_BT: torch.Tensor, inputs: Tensors) -> None:
    """Set the labels of prompts and of tokens without context to -100."""
    if "ignored" in inputs:
        labels_BT.view(-1).index_fill_(0, inputs["ignored"].long(), IGNORED)
    elif SEGMENTS in inputs:
        labels_BT.view(-1).index_fill_(0, inputs[SEGMENTS][:-1].long(), IGNORED)
    else:
        labels_BT[:, 0] = IGNORED


def _attention_mask(ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    """Return the mask of a batch without padding. Other batches have one from the start."""
    return torch.ones(ragged.shape, dtype=torch.bool, device=tensors[INPUT_IDS].device)


def _seq_idx(ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    segments = tensors[SEGMENTS]
    rows, length = ragged.shape
    slots = torch.arange(rows * length, dtype=torch.int32, device=segments.device)
    documents = torch.bucketize(slots, segments[1:], right=True, out_int32=True)
    return documents.view(ragged.shape)


def _position_ids(ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    if SEQ_IDX not in tensors:
        tensors[SEQ_IDX] = _seq_idx(ragged, tensors)
    rows, length = ragged.shape
    slots = torch.arange(rows * length, device=tensors[SEGMENTS].device)
    begins: torch.Tensor = tensors[SEGMENTS][tensors[SEQ_IDX]]
    return slots.view(ragged.shape) - begins


def _build(name: str, ragged: RaggedBatch, tensors: Tensors) -> torch.Tensor:
    with torch.inference_mode(False):  # the tensor is kept and may be used in training later
        return _BUILT_WHEN_ASKED[name](ragged, tensors)


_BUILT_WHEN_ASKED: dict[str, Callable[[RaggedBatch, Tensors], torch.Tensor]] = {
    ATTENTION_MASK: _attention_mask,
    POSITION_IDS: _position_ids,
    SEQ_IDX: _seq_idx,
}
