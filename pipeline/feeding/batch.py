"""A micro-batch, and how its tensors are made.

A slice has columns without padding, in the dtype of the shards. `padding` widens and pads them at
once. Masks, positions and labels are made when they are first used, from the padded columns, the
lengths, and the slots where documents begin. On the CPU numpy makes masks, labels and positions in
half of the time. Nothing synchronises with the device, because the host knows every shape. Torch is
imported for the first batch: a worker makes none.

Shapes: B sequences, T padded length, P pieces, S segments.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import numpy as np

from tokenfeed.pipeline.errors import ConfigError, memory_explained
from tokenfeed.pipeline.feeding.padding import (
    host_mask,
    pad_on_device,
    pad_on_host,
    widened,
)
from tokenfeed.pipeline.format.schema import (
    IGNORED,
    INPUT_IDS,
    TOKEN_TYPE_IDS,
    is_kept,
    no_target,
    role_of,
)
from tokenfeed.pipeline.planning.batching import Round
from tokenfeed.pipeline.windows.rank_slice import (
    IS_IGNORED,
    TARGETS,
    RankSlice,
    values_without_row,
)

if TYPE_CHECKING:
    import torch


ATTENTION_MASK, POSITION_IDS, SEQ_IDX = "attention_mask", "position_ids", "seq_idx"
_ENDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_USE_CACHE = "use_cache"
_OF_PACKED = (POSITION_IDS, *_ENDS, *_LONGEST, SEQ_IDX, _USE_CACHE)

LENGTHS, ROW_TARGETS, SEGMENTS = "sequence_lengths", "row_targets", "segments"
_NONE = np.empty(0, np.int32)

Tensors = dict[str, Any]
"""Tensors by name."""


@dataclass(frozen=True, slots=True)
class BatchForm:
    """How the values of a batch are represented."""

    pad_id: int
    """Id that fills the padding of `input_ids`."""
    ignore_index: int = IGNORED
    """Value of `Batch.targets` where no loss counts."""


class _Common(NamedTuple):
    """What all batches of a slice have in common."""

    keys: tuple[str, ...]
    """Keys of a batch."""
    kept: tuple[str, ...]
    """Columns that are kept for the user."""
    is_packed: bool
    is_next: bool
    """Whether the target of a slot is the label of the next slot."""
    form: BatchForm


class _Part(NamedTuple):
    """What belongs to one micro-batch of a slice."""

    sequences: slice
    pieces: slice
    tokens: slice
    segments: slice | None
    shape: tuple[int, int]
    """(B, T)."""
    num_slots: int
    is_full: bool
    """Whether it has no padding."""
    is_filler: bool
    num_tokens: int
    """0 for a filler, as `num_targets`."""
    num_targets: int
    ends_step: bool


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

    def __init__(self, made: RankSlice, part: _Part, common: _Common) -> None:
        """Copy all but the columns of a micro-batch. `make_batches` adds the columns.

        `_tensors` are the columns and the keys made so far. `_inputs` are what other keys are made
        from when they are used.
        """
        pieces = part.pieces
        self._common, self._shape, self._is_full = common, part.shape, part.is_full
        self._tensors: Tensors = {}
        self._inputs: Tensors = {}
        self._targets: Any = None
        self._starts = None if made.starts is None else made.starts[pieces].copy()
        self._segments = _NONE
        if made.segments is not None:
            self._segments = made.segments[part.segments].copy()
        self._sequence_offsets = None
        if (offsets := made.sequence_offsets) is not None:
            first, end = part.sequences.start, part.sequences.stop
            self._sequence_offsets = offsets[first : end + 1] - pieces.start
        self.lengths: np.ndarray = made.sequence_lengths[part.sequences].copy()
        """Tokens of each sequence, numpy, [B]."""
        self.rows: np.ndarray = made.rows[pieces].copy()
        """Number of the row of each piece, over all sources, numpy, [P] int64; without packing P =
        B."""
        self.piece_lengths: np.ndarray = made.piece_lengths[pieces].copy()
        """Tokens of each piece, numpy, [P]; without `Packed.begin_token`."""
        self.num_slots = part.num_slots
        """Number of slots, B times T: tokens and padding."""
        self.is_filler = part.is_filler
        """Whether this repeats a sequence of another rank, so that all ranks have a batch."""
        self.num_tokens = part.num_tokens
        """Number of tokens; 0 for a filler."""
        self.num_targets = part.num_targets
        """Number of labels that a loss counts; 0 for a filler."""
        self.ends_step = part.ends_step
        """Whether this is the last micro-batch of a step of this rank: call the optimizer now. The
        step has the same rows on any number of ranks."""

    @overload
    def __getitem__(  # type: ignore[overload-overlap]
        self, key: Literal["max_length_q", "max_length_k", "use_cache"]
    ) -> int: ...
    @overload
    def __getitem__(self, key: str) -> "torch.Tensor": ...
    def __getitem__(self, key: str) -> Any:
        if key not in self._tensors:
            if key not in self._common.keys:
                raise KeyError(key)
            if key in _ENDS:
                return self.cu_seqlens
            if key in _LONGEST:
                return self._shape[1]
            if key == _USE_CACHE:
                return False
            with _trainable():
                self._tensors[key] = _MAKERS[key](self)
        return self._tensors[key]

    def __getattr__(self, name: str) -> Any:
        common = self.__dict__.get("_common")  # None while a copy is being made
        keys = (*common.keys, *common.kept) if common else ()
        if name in keys:
            return self[name]
        hint = " A Batch is read-only: change a copy, `dict(batch)`." if hasattr(dict, name) else ""
        raise AttributeError(
            f"Batch has no attribute {name!r}. Its keys are {', '.join(keys)}.{hint}",
            name=name,
            obj=self,
        )

    def __contains__(self, key: object) -> bool:
        # the default of Mapping would build the tensor
        return key in self._common.keys or key in self._common.kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._common.keys)

    def __len__(self) -> int:
        return len(self._common.keys)

    def __repr__(self) -> str:
        rows, length = self._shape
        return f"Batch([{rows}, {length}], {self.num_tokens:,} tokens, {self.device})"

    def tensors(self) -> Iterable[Any]:
        """Return all tensors made so far, and what others are made from."""
        return (*self._tensors.values(), *self._inputs.values())

    @property
    def device(self) -> "torch.device":
        """Device of the tensors."""
        device: torch.device = self._tensors[INPUT_IDS].device
        return device

    def to(self, device: "str | torch.device", *, non_blocking: bool = False) -> "Batch":
        """Return the batch on another device, or itself if it is there already.

        Raises:
            ConfigError: The value is a dtype, which would change ids.
        """
        if type(device).__name__ == "dtype":
            raise ConfigError(
                f"`to`({device}): a Batch keeps its dtypes, because ids are whole numbers. Pass a "
                "device, and choose the precision of the model, or use `torch.autocast`."
            )
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
            self[key]  # everything is made here, in one place
        changed = copy(self)
        changed._tensors = {key: change(tensor) for key, tensor in self._tensors.items()}
        changed._inputs = {key: change(tensor) for key, tensor in self._inputs.items()}
        changed._targets = None  # made again there
        return changed

    @property
    def targets(self) -> "torch.Tensor":
        """What the model should predict at each slot: [B, T] int64, contiguous, `ignore_index` of
        the loader where no loss counts. For losses outside of `transformers`.

        Language modelling: the next token, which is the label of the next slot. Tagging,
        classification and regression: the labels.
        """
        if self._targets is None:
            form, is_next = self._common.form, self._common.is_next
            self._targets = _targets(self[TARGETS], form.ignore_index, is_next=is_next)
        targets: torch.Tensor = self._targets
        return targets

    @property
    def starts(self) -> np.ndarray:
        """First token of each piece in its row, numpy, [P]: 0 unless the row was cut."""
        return np.zeros(len(self.rows), np.int64) if self._starts is None else self._starts

    @property
    def sequence_offsets(self) -> np.ndarray:
        """Where each sequence begins among the pieces, numpy, [B + 1]."""
        offsets = self._sequence_offsets
        return np.arange(len(self.lengths) + 1) if offsets is None else offsets

    @property
    def cu_seqlens(self) -> "torch.Tensor":
        """Packed batches: where documents and paddings begin in the flattened batch, and its end,
        [S + 1] int32 on the device, for variable-length attention.

        Raises:
            ConfigError: The batch is not packed.
        """
        self._check_packed("cu_seqlens")
        segments: torch.Tensor = self._inputs[SEGMENTS]
        return segments

    @property
    def max_seqlen(self) -> int:
        """Packed batches: tokens of the longest segment."""
        self._check_packed("max_seqlen")
        return int(np.diff(self._segments).max())

    def _check_packed(self, name: str) -> None:
        if not self._common.is_packed:
            raise ConfigError(
                f"`{name}`: only packed batches have this attribute; here every row is a single "
                "document. Use `attention_mask`, or make the loader with `batching=Packed(...)`."
            )

    # The rest runs on any device.

    def _mask(self) -> "torch.Tensor":
        """Return true on tokens: [B, T] bool."""
        import torch

        length = self._shape[1]
        if self._is_full:
            return torch.ones(self._shape, dtype=torch.bool, device=self.device)
        if LENGTHS not in self._inputs:  # on the CPU: up to 8 times as fast
            return torch.from_numpy(host_mask(self.lengths, length))
        lengths = self._inputs[LENGTHS]
        mask: torch.Tensor = torch.arange(length, device=lengths.device) < lengths[:, None]
        return mask

    def _labels(self) -> "torch.Tensor":
        """Return the labels of rows, or the ids without those that no loss counts."""
        import torch

        if ROW_TARGETS in self._inputs:
            labels = widened(self._inputs[ROW_TARGETS])
            none = no_target(is_float=labels.is_floating_point())
            if added := len(self.lengths) - len(labels):  # rows of padding
                labels = torch.nn.functional.pad(labels, (0, added), value=none)
            return torch.full_like(labels, none) if self.is_filler else labels
        ids = self._tensors[INPUT_IDS]
        if self.is_filler:
            return torch.full_like(ids, IGNORED)
        if LENGTHS not in self._inputs:  # on the CPU
            return torch.from_numpy(self._host_labels(ids.numpy()))
        if IS_IGNORED in self._inputs:
            return torch.where(self._inputs[IS_IGNORED], IGNORED, ids)
        if self._is_full:
            labels = ids.clone()
        else:
            mask = self._mask() if self._common.is_packed else self[ATTENTION_MASK]
            labels = torch.where(mask, ids, IGNORED)
        if self._common.is_packed:
            labels.view(-1).index_fill_(0, self._inputs[SEGMENTS][:-1].long(), IGNORED)
        else:
            labels[:, 0] = IGNORED
        return labels

    def _host_labels(self, ids: np.ndarray) -> np.ndarray:
        """Return the same in half of the time, by numpy: all else is too small to matter."""
        labels = ids.copy()
        if IS_IGNORED in self._inputs:
            labels[self._inputs[IS_IGNORED].numpy()] = IGNORED
            return labels
        if not self._is_full:
            np.copyto(labels, IGNORED, where=~host_mask(self.lengths, self._shape[1]))
        if self._common.is_packed:
            labels.reshape(-1)[self._inputs[SEGMENTS].numpy()[:-1]] = IGNORED
        else:
            labels[:, 0] = IGNORED
        return labels

    def _position_ids(self) -> "torch.Tensor":
        """Return a running total of 1, which goes back to 0 where a segment begins."""
        import torch

        if LENGTHS not in self._inputs:  # on the CPU: in half of the time
            positions = np.arange(self.num_slots)
            positions -= np.repeat(self._segments[:-1], np.diff(self._segments))
            return torch.from_numpy(positions.reshape(self._shape))
        segments = self._inputs[SEGMENTS]
        steps = torch.ones(self.num_slots, dtype=torch.int64, device=segments.device)
        steps[:1].zero_()  # an index would copy a number from the host, and wait
        sizes = segments.diff()[:-1].long()
        steps.index_add_(0, segments[1:-1], sizes, alpha=-1)
        return steps.cumsum_(0).view(self._shape)

    def _seq_idx(self) -> "torch.Tensor":
        """Return a running total of 0, which goes up by 1 where a segment begins."""
        import torch

        segments = self._inputs[SEGMENTS]
        steps = torch.zeros(self.num_slots, dtype=torch.int32, device=segments.device)
        steps.index_fill_(0, segments[1:-1].long(), 1)
        return steps.cumsum_(0).view(self._shape)


_MAKERS: dict[str, Callable[[Batch], Any]] = {
    ATTENTION_MASK: Batch._mask,
    POSITION_IDS: Batch._position_ids,
    SEQ_IDX: Batch._seq_idx,
    TARGETS: Batch._labels,
}
"""What makes each key that is no column."""


class _Key:
    """A key as an attribute that cannot be set, because the mapping would keep its tensor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, batch: Batch | None, _: type[Batch] | None = None) -> Any:
        return self if batch is None else batch.__getattr__(self._name)

    def __set__(self, batch: Batch, _: object) -> NoReturn:
        raise AttributeError(
            f"`{self._name}` of a Batch cannot be set: `model(**batch)` would not use the value. "
            f"Change the tensor in place, or pass {{**batch, {self._name!r}: ...}}."
        )


for _name in (INPUT_IDS, TARGETS, TOKEN_TYPE_IDS, ATTENTION_MASK, *_OF_PACKED):
    setattr(Batch, _name, _Key(_name))


Made = tuple[Batch | None, Round]
"""A micro-batch and its round. None: `last`="drop" left out all rows of the window."""


def make_batches(
    made: RankSlice, form: BatchForm, device: "torch.device | None" = None
) -> Iterator[Made]:
    """Yield all micro-batches of a slice, and their rounds. Each is copied, widened and padded.
    A slice without micro-batches yields None, and the round that ends the window.

    Args:
        made: The slice, maybe in a buffer that is written again after the last micro-batch.
        form: How values are represented.
        device: Device to copy to on the current stream; None for the CPU.
    """
    import torch

    if not made.num_batches:
        yield None, made.rounds()[0]
        return
    common, fills = _common(made, form), values_without_row(made.columns, form.pad_id)
    for part, done in zip(_parts(made), made.rounds(), strict=True):
        batch = Batch(made, part, common)
        inputs, lengths, shape = batch._inputs, batch.lengths, part.shape
        columns = {name: values[part.tokens] for name, values in made.columns.items()}
        with _trainable():
            if made.row_targets is not None:
                inputs[ROW_TARGETS] = _copied(made.row_targets[part.pieces], device)
            if device is None:
                if common.is_packed:
                    inputs[SEGMENTS] = torch.from_numpy(batch._segments)
                try:
                    padded, filled = pad_on_host(columns, fills, lengths, shape)
                except MemoryError:
                    with memory_explained(f"a batch of {shape[0]:,} x {shape[1]:,} tokens"):
                        raise
                tensors: Tensors = {name: torch.from_numpy(each) for name, each in padded.items()}
                mask = None if filled is None else torch.from_numpy(filled)
            else:
                if made.segments is not None:
                    inputs[SEGMENTS] = _copied(made.segments[part.segments], device)
                inputs[LENGTHS] = _copied(made.sequence_lengths[part.sequences], device)
                mask = None
                if not part.is_full:
                    mask = torch.arange(shape[1], device=device) < inputs[LENGTHS][:, None]
                copies = {name: _copied(values, device) for name, values in columns.items()}
                tensors = pad_on_device(copies, fills, inputs[LENGTHS], shape, mask)
            if mask is not None and not common.is_packed:
                tensors[ATTENTION_MASK] = mask
            if IS_IGNORED in tensors:
                inputs[IS_IGNORED] = tensors.pop(IS_IGNORED)
            if part.is_filler and TARGETS in tensors:
                tensors[TARGETS].fill_(fills[TARGETS])
        batch._tensors = tensors
        yield batch, done


def _parts(made: RankSlice) -> Iterator[_Part]:
    """Yield what belongs to each micro-batch. To read a list takes a tenth of the time of reading
    numbers of arrays one by one."""
    rows, tokens = np.diff(made.batch_offsets), np.diff(made.token_offsets)
    slots, is_real = rows * made.padded_lengths, ~made.is_filler
    segments = made.segment_offsets
    return map(
        _Part,
        _ranges(made.batch_offsets),
        _ranges(made.piece_offsets),
        _ranges(made.token_offsets),
        itertools.repeat(None) if segments is None else _ranges(segments),
        zip(rows.tolist(), made.padded_lengths.tolist(), strict=True),
        slots.tolist(),
        (tokens == slots).tolist(),
        made.is_filler.tolist(),
        (tokens * is_real).tolist(),
        (made.num_targets * is_real).tolist(),
        made.steps.astype(np.bool_).tolist(),
    )


def _ranges(offsets: np.ndarray) -> Iterator[slice]:
    return itertools.starmap(slice, itertools.pairwise(offsets.tolist()))


def _copied(array: np.ndarray, device: "torch.device | None") -> "torch.Tensor":
    """Return a copy of an array of a slice, on a device or the CPU."""
    import torch

    if device is None:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).to(device, non_blocking=True)


def _trainable() -> Any:
    """Return a context whose tensors may be used in training, also in inference mode."""
    import torch

    # to enter the context takes longer than to make most batches
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(False)


def _targets(labels: Any, ignore_index: int, *, is_next: bool) -> Any:
    """Return the targets of labels. With `is_next`, a slot gets the label of the next slot, and the
    last slot of a row gets the first label, which is never a target. Scores keep their values."""
    with _trainable():
        moved = labels.roll(-1, 1) if is_next else labels.clone()
        if moved.is_floating_point():
            return moved
        return moved.masked_fill_(moved == IGNORED, ignore_index)


def _common(made: RankSlice, form: BatchForm) -> _Common:
    """Return what the batches of a slice have in common."""
    columns = [name for name in made.columns if name != IS_IGNORED]
    is_packed = made.segments is not None
    return _Common(
        keys=(
            INPUT_IDS,
            *(_OF_PACKED if is_packed else (ATTENTION_MASK,)),
            *(name for name in columns if role_of(name) == "input"),
            TARGETS,
        ),
        kept=tuple(filter(is_kept, columns)),
        is_packed=is_packed,
        is_next=TARGETS not in columns and made.row_targets is None,
        form=form,
    )
