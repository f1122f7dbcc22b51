"""A rank slice: one rank's micro-batches of a window, one after the other, as a few flat arrays.

A worker makes a slice and writes it into one flat buffer. The training process reads the slice from
the buffer without a copy, and its micro-batches are views of it. So data crosses the process
boundary once per window, not once per batch or row. Torch-free.

Sizes: N tokens, P pieces, S sequences, M micro-batches (one per round).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod

import numpy as np

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.planning.batching import Round
from tokenfeed.pipeline.windows.layout import Layout, PieceIndex


@dataclass(frozen=True, slots=True)
class RoundIndex:
    """The round of each micro-batch, over all ranks; shape (M,) each."""

    filler: np.ndarray
    """Whether it repeats another rank's sequence, bool."""
    position: np.ndarray
    """Number of the window's micro-batches delivered once its round is complete, int64."""
    steps: np.ndarray
    """Number of steps that end with its round, int64."""
    digests: np.ndarray
    """Digest of its round, uint64; see `digests` in `batching`."""
    tokens: np.ndarray
    """Tokens of each source in its round, shape (M, sources), int64."""
    left_out: np.ndarray
    """Rows and tokens of the window that `last`="drop" left out, with its last round; 0 before.
    Shape (M, 2), int64."""


@dataclass(frozen=True, slots=True)
class Index:
    """All arrays of a slice except the tokens."""

    pieces: PieceIndex
    layout: Layout
    rounds: RoundIndex

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every array, with a name such as `pieces.lengths`."""
        for part in fields(self):
            record = getattr(self, part.name)
            for field in fields(record):
                if (array := getattr(record, field.name)) is not None:
                    yield f"{part.name}.{field.name}", array

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Index":
        """Build the index from the arrays that `arrays` yielded."""

        def of_part(part: str, kind: type) -> dict[str, np.ndarray | None]:
            return {field.name: arrays.get(f"{part}.{field.name}") for field in fields(kind)}

        return cls(
            PieceIndex(**of_part("pieces", PieceIndex)),  # type: ignore[arg-type]
            Layout(**of_part("layout", Layout)),  # type: ignore[arg-type]
            RoundIndex(**of_part("rounds", RoundIndex)),  # type: ignore[arg-type]
        )


TARGETS = "labels"
"""Name of the target column in a slice and in a batch, for every task."""
_ALIGNMENT = 64  # of each array: a cache line


@dataclass(frozen=True, slots=True)
class Header:
    """Description of a slice without its arrays: how to read it from a buffer."""

    num_per_token: int
    """Number of arrays with one value per token. They come first."""
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each array, in the order of the buffer."""


@dataclass(frozen=True, slots=True)
class RankSlice:
    """One rank's micro-batches of a window, as flat arrays."""

    per_token: dict[str, np.ndarray]
    """Columns with one value per token, shape (N,), in storage dtype: `input_ids`, the inputs of
    the task, and `TARGETS` if tokens have their own targets."""
    index: Index
    staged: Index
    """The index in the buffer, from which a device can copy. Without a buffer, the same as
    `index`."""

    @property
    def num_batches(self) -> int:
        """Number of micro-batches of this slice."""
        return len(self.index.layout.padded)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that `write` fills."""
        return sum(round_up(array.nbytes, _ALIGNMENT) for _, array in self._named())

    def write(self, buffer: memoryview) -> Header:
        """Write all arrays into a buffer of at least `num_bytes` bytes."""
        at, described = 0, []
        for name, array in self._named():
            described.append((name, array.dtype.str, array.shape))
            np.copyto(np.frombuffer(buffer, array.dtype, array.size, at), array.reshape(-1))
            at += round_up(array.nbytes, _ALIGNMENT)
        return Header(len(self.per_token), tuple(described))

    @classmethod
    def read(cls, header: Header, buffer: memoryview) -> "RankSlice":
        """Return the slice in a buffer. `index` is a copy; the other arrays are views, and become
        invalid when the buffer is written again."""
        at, arrays = 0, []
        for name, dtype, shape in header.arrays:
            array = np.frombuffer(buffer, dtype, prod(shape), at).reshape(shape)
            arrays.append((name, array))
            at += round_up(array.nbytes, _ALIGNMENT)
        per_token, staged = arrays[: header.num_per_token], dict(arrays[header.num_per_token :])
        index = {name: array.copy() for name, array in staged.items()}
        indexes = Index.from_arrays(index), Index.from_arrays(staged)
        return cls(dict(per_token), *indexes)

    def batches(self) -> Iterator["RaggedBatch"]:
        """Yield the micro-batches, as views, without padding."""
        return (RaggedBatch(self, number) for number in range(self.num_batches))

    def _named(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.per_token.items()
        yield from self.index.arrays()


class RaggedBatch:
    """A micro-batch before padding, as views of its slice: B sequences, P pieces, N tokens."""

    def __init__(self, rank_slice: RankSlice, number: int) -> None:
        index = rank_slice.index
        batches, layout = index.pieces.batches, index.layout
        self._index, self._number = index, number
        self._slice: RankSlice | None = rank_slice
        self._tokens = _between(layout.token_offsets, number)
        self._pieces = _between(layout.piece_offsets, number)
        self._sequences = slice(batches[number], batches[number + 1])
        self.token_columns = tuple(rank_slice.per_token)
        """Names of the columns with one value per token; see `RankSlice.per_token`."""
        self.sequence_lengths = layout.sequence_lengths[self._sequences]
        """Tokens of each sequence, shape (B,), int32."""
        self.padded_length = int(layout.padded[number])
        """T: tokens of the longest sequence, rounded up to the policy's `multiple_of`."""
        self.is_filler = bool(index.rounds.filler[number])
        """Whether this repeats a sequence of another rank, so that all ranks have a batch."""
        size: int = self._tokens.stop - self._tokens.start
        self.is_full = size == len(self.sequence_lengths) * self.padded_length
        """Whether the batch has no padding."""
        self.num_tokens = 0 if self.is_filler else size
        """Number of tokens; 0 for a filler."""
        self.num_targets = 0 if self.is_filler else int(layout.num_targets[number])
        """Number of labels that a loss counts; 0 for a filler."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return len(self.sequence_lengths), self.padded_length

    @property
    def is_packed(self) -> bool:
        """Whether a sequence may have several documents."""
        return self._index.layout.segments is not None

    @property
    def round(self) -> Round:
        """The round of this micro-batch, over all ranks."""
        rounds, number = self._index.rounds, self._number
        return Round(
            int(rounds.position[number]),
            number + 1 == len(rounds.position),
            int(rounds.digests[number]),
            tuple(rounds.tokens[number].tolist()),
            int(rounds.steps[number]),
            tuple(rounds.left_out[number].tolist()),
        )

    @property
    def is_last(self) -> bool:
        """Whether this is the last micro-batch of its window."""
        return self._number + 1 == len(self._index.layout.padded)

    @property
    def ends_step(self) -> bool:
        """Whether its round is the last round of a step."""
        return bool(self._index.rounds.steps[self._number])

    def of_tokens(self, name: str) -> np.ndarray:
        """Return a column with one value per token, shape (N,), in storage dtype."""
        assert self._slice, "the tokens were dropped"
        return self._slice.per_token[name][self._tokens]

    @property
    def rows(self) -> np.ndarray:
        """Number of the row of each piece, over all sources, shape (P,), int64."""
        return self._index.pieces.numbers[self._pieces]

    @property
    def piece_lengths(self) -> np.ndarray:
        """Tokens of each piece, shape (P,), int32."""
        return self._index.pieces.lengths[self._pieces]

    @property
    def starts(self) -> np.ndarray | None:
        """First token of each piece in its row, shape (P,), int64; None: all are 0."""
        starts = self._index.pieces.starts
        return None if starts is None else starts[self._pieces]

    @property
    def row_targets(self) -> np.ndarray | None:
        """Target of each row, shape (P,), in storage dtype; None: rows have no target."""
        return self._row_targets(self._index)

    @property
    def segments(self) -> np.ndarray:
        """Slots where a document or padding begins, and the end of the batch; packed only."""
        segments = self._segments(self._index)
        assert segments is not None, "not packed"
        return segments

    @property
    def ignored(self) -> np.ndarray | None:
        """Slots of tokens that are not targets, int32; None: only the first token of each piece."""
        return self._ignored(self._index)

    @property
    def sequence_offsets(self) -> np.ndarray:
        """Where each sequence begins among the pieces of the batch, shape (B + 1,), int64."""
        sequences = self._index.pieces.sequences
        if sequences is None:
            return np.arange(len(self.sequence_lengths) + 1)
        first, last = self._sequences.start, self._sequences.stop
        offsets: np.ndarray = sequences[first : last + 1] - self._pieces.start
        return offsets

    def staged(self) -> dict[str, np.ndarray]:
        """Return the arrays that a device needs besides the tokens, in memory it can copy from."""
        assert self._slice, "the tokens were dropped"
        index = self._slice.staged
        found = {
            "sequence_lengths": index.layout.sequence_lengths[self._sequences],
            "row_targets": self._row_targets(index),
            "segments": self._segments(index),
            "ignored": self._ignored(index),
        }
        return {name: values for name, values in found.items() if values is not None}

    def drop_tokens(self) -> None:
        """Drop the tokens after the batch was built, so that their buffer can be written again."""
        self._slice = None

    def _row_targets(self, index: Index) -> np.ndarray | None:
        targets = index.pieces.targets
        return None if targets is None else targets[self._pieces]

    def _segments(self, index: Index) -> np.ndarray | None:
        return _of_batch(index.layout.segments, index.layout.segment_offsets, self._number)

    def _ignored(self, index: Index) -> np.ndarray | None:
        return _of_batch(index.layout.ignored, index.layout.ignored_offsets, self._number)


def _of_batch(
    values: np.ndarray | None, offsets: np.ndarray | None, number: int
) -> np.ndarray | None:
    return None if values is None or offsets is None else values[_between(offsets, number)]


def _between(offsets: np.ndarray, number: int) -> slice:
    return slice(int(offsets[number]), int(offsets[number + 1]))
