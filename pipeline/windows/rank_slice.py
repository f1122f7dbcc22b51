"""A rank slice: one rank's micro-batches of a window, as a few arrays in one buffer.

A worker makes a slice and writes it into a buffer of shared memory. The training process reads the
slice from the buffer without a copy, and its micro-batches are views of it. So data crosses the
process boundary once per window, not once per batch or row.

Tokens have no padding here. A slot is a place in a batch's flattened [B, T]. Example: a packed
batch of two sequences of 8 slots, with documents of 3 and 5 tokens, and of 2 and 4 tokens:

    slots      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15
    tokens     a a a b b b b b | c c d  d  d  d  .  .
    segments   0     3           8   10          14      and 16, the end

Torch-free. Sizes: N tokens, P pieces, S sequences, M micro-batches (one per round).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Self

import msgspec
import numpy as np

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.format.schema import INPUT_IDS, no_target
from tokenfeed.pipeline.planning.batching import Round

TARGETS = "labels"
"""Name of the target column in a slice and in a batch, for every task."""
IS_IGNORED = "ignored"
"""Name of the column of tokens that no loss counts, bool. A slice has it if prompts, kinds of
tokens or skipped rows decide. Otherwise every token but the first of each piece is a target."""
_ALIGNMENT = 64  # of each array: a cache line
_COLUMN = "columns."
_SIZE = 8  # bytes of the header's length


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlice:
    """One rank's micro-batches of a window, as flat arrays."""

    columns: dict[str, np.ndarray]
    """Columns with one value per token, shape (N,), in storage dtype: `input_ids`, inputs and kept
    columns, `TARGETS` if tokens have their own targets, and maybe `IS_IGNORED`."""
    rows: np.ndarray
    """Number of each piece's row over all sources, shape (P,), int64."""
    piece_lengths: np.ndarray
    """Tokens of each piece, without a begin token, shape (P,), int32."""
    starts: np.ndarray | None
    """First token of each piece in its row, shape (P,), int64; None: no row was cut."""
    row_targets: np.ndarray | None
    """Target of each piece's row, shape (P,), in storage dtype; None: rows have no target."""
    sequence_lengths: np.ndarray
    """Tokens of each sequence, shape (S,), int32. A sequence of 0 tokens is padding."""
    sequence_offsets: np.ndarray | None
    """Where each sequence begins among the pieces, shape (S + 1,), int64; None: every piece is a
    sequence."""
    batch_offsets: np.ndarray
    """Where each micro-batch begins among the sequences, shape (M + 1,), int64."""
    piece_offsets: np.ndarray
    """Where each micro-batch begins among the pieces, shape (M + 1,), int64."""
    token_offsets: np.ndarray
    """Where each micro-batch begins among the tokens, shape (M + 1,), int64."""
    padded_lengths: np.ndarray
    """T: tokens of the longest sequence of each micro-batch, rounded up to the policy's
    `multiple_of`, shape (M,), int64."""
    num_targets: np.ndarray
    """Labels of each micro-batch that a loss counts, shape (M,), int64."""
    segments: np.ndarray | None
    """Slots where a document or padding begins, and the end of each batch, int32; packed only."""
    segment_offsets: np.ndarray | None
    """Where each micro-batch begins in `segments`, shape (M + 1,), int64."""
    is_filler: np.ndarray
    """Whether each micro-batch repeats another rank's sequence, shape (M,), bool."""
    positions: np.ndarray
    """Number of the window's micro-batches delivered after each round, shape (M,), int64."""
    steps: np.ndarray
    """Number of steps that end with each round, shape (M,), int64."""
    digests: np.ndarray
    """Digest of each round, shape (M,), uint64; see `digests` in `batching`."""
    source_tokens: np.ndarray
    """Tokens of each source in each round, shape (M, sources), int64."""
    left_out: np.ndarray
    """Rows and tokens of the window that `last`="drop" left out, shape (2,), int64."""

    @classmethod
    def without_batches(cls, left_out: tuple[int, int], num_sources: int) -> Self:
        """Return the slice of a window that has too few rows for a step; see `left_out`."""
        arrays: dict[str, np.ndarray] = {field.name: np.zeros(0, np.int64) for field in fields(cls)}
        arrays["source_tokens"] = np.zeros((1, num_sources), np.int64)
        return cls(**arrays | {"columns": {}, "left_out": np.array(left_out)})  # type: ignore[arg-type]

    @property
    def num_batches(self) -> int:
        """Number of micro-batches of this slice."""
        return len(self.padded_lengths)

    def rounds(self) -> list[Round]:
        """Return the round of each micro-batch, over all ranks; without any, one that ends the
        window."""
        tokens, left_out = map(tuple, self.source_tokens.tolist()), tuple(self.left_out.tolist())
        if not self.num_batches:
            return [Round(0, True, 0, next(tokens), 0, left_out)]
        before = self.num_batches - 1
        made = map(
            Round,
            self.positions.tolist(),
            [*[False] * before, True],
            self.digests.tolist(),
            tokens,
            self.steps.tolist(),
            [*[(0, 0)] * before, left_out],
        )
        return list(made)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that `write` fills."""
        sizes = (round_up(array.nbytes, _ALIGNMENT) for _, array in self._arrays())
        return round_up(_SIZE + len(self._header()), _ALIGNMENT) + sum(sizes)

    def write(self, buffer: memoryview) -> None:
        """Write a header and all arrays into a buffer of at least `num_bytes` bytes."""
        header = self._header()
        at = round_up(_SIZE + len(header), _ALIGNMENT)
        buffer[: _SIZE + len(header)] = len(header).to_bytes(_SIZE, "little") + header
        for _, array in self._arrays():
            np.copyto(np.frombuffer(buffer, array.dtype, array.size, at), array.reshape(-1))
            at += round_up(array.nbytes, _ALIGNMENT)

    @classmethod
    def read(cls, buffer: memoryview) -> Self:
        """Return the slice in a buffer. Its arrays are views, and become invalid when the buffer is
        written again."""
        size = int.from_bytes(buffer[:_SIZE], "little")
        at = round_up(_SIZE + size, _ALIGNMENT)
        columns: dict[str, np.ndarray] = {}
        arrays: dict[str, np.ndarray | None] = {field.name: None for field in fields(cls)}
        for name, dtype, shape in msgspec.json.decode(buffer[_SIZE : _SIZE + size]):
            array = np.frombuffer(buffer, dtype, prod(shape), at).reshape(shape)
            if name.startswith(_COLUMN):
                columns[name.removeprefix(_COLUMN)] = array
            else:
                arrays[name] = array
            at += round_up(array.nbytes, _ALIGNMENT)
        return cls(**arrays | {"columns": columns})  # type: ignore[arg-type]

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every array with its name, the columns first."""
        for name, values in self.columns.items():
            yield _COLUMN + name, values
        for field in fields(self)[1:]:
            if (array := getattr(self, field.name)) is not None:
                yield field.name, array

    def _header(self) -> bytes:
        """Return name, dtype and shape of every array, as JSON."""
        described = [(name, array.dtype.str, array.shape) for name, array in self._arrays()]
        return msgspec.json.encode(described)


def between(offsets: np.ndarray, number: int) -> slice:
    """Return the range of item `number`, from offsets that have a leading 0."""
    return slice(int(offsets[number]), int(offsets[number + 1]))


def values_without_row(columns: Mapping[str, np.ndarray], token: int) -> dict[str, float]:
    """Return the value of each column in slots that no row fills: padding, and begin tokens, which
    have the id `token`."""
    found: dict[str, float] = dict.fromkeys(columns, 0)  # integers: a float would change a dtype
    found[INPUT_IDS] = token
    if IS_IGNORED in columns:
        found[IS_IGNORED] = True
    if TARGETS in columns:
        found[TARGETS] = no_target(is_float=columns[TARGETS].dtype.kind == "f")
    return found
