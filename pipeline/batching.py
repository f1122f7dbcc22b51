"""From the row lengths of a window to micro-batches dealt to ranks: pure functions.

    rows -> pieces      a row longer than a sequence may be is cut, never dropped
    pieces -> sequences one piece each (padded), or several (packed)
    sequences -> gangs  neighbours in length; all ranks consume one gang at the same time
    gang -> micro-batch every world_size-th sequence, one micro-batch per rank

Because a gang is dealt like cards in order of length, the micro-batches of its ranks differ by at
most one row, and in tokens by at most one row's length. A window's tail is an ordinary gang with
fewer sequences; where there are fewer than ranks, the others get a filler that no loss counts.
Every result depends on the arguments only: lengths, policy, world size and key. Torch-free.
"""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.order import mix64
from tokenfeed.pipeline.packing import pack

__all__ = ["Batching", "Fixed", "Packed", "Padded", "Share", "WindowPlan", "plan_window"]


@dataclass(frozen=True, slots=True)
class Padded:
    """Rows of like length side by side, as many as a token budget allows."""

    max_tokens: int
    """Rows x padded length of a micro-batch never exceed this; a longer row is cut into pieces."""
    multiple_of: int = 1
    """Padded lengths are rounded up to this; 8 suits tensor cores, at some padding."""

    def __post_init__(self) -> None:
        _require_positive(self, "multiple_of")
        if self.max_tokens < self.multiple_of:
            raise ConfigError(
                f"`max_tokens`={self.max_tokens} is smaller than `multiple_of`={self.multiple_of}. "
                "Raise it."
            )

    @property
    def longest_piece(self) -> int:
        """Rows are cut into pieces of this many tokens."""
        return self.max_tokens // self.multiple_of * self.multiple_of

    def rows_of(self, longest: int) -> int:
        """Rows of a micro-batch whose longest row is `longest`."""
        return self.max_tokens // round_up(longest, self.multiple_of)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed number of rows of like length; rows are never cut, so memory follows the longest."""

    rows: int
    multiple_of: int = 1
    """Padded lengths are rounded up to this."""

    def __post_init__(self) -> None:
        _require_positive(self, "rows", "multiple_of")

    @property
    def longest_piece(self) -> int:
        """Rows are not cut."""
        return np.iinfo(np.int32).max

    def rows_of(self, longest: int) -> int:
        """Rows of a micro-batch, whatever their length."""
        return self.rows


@dataclass(frozen=True, slots=True)
class Packed:
    """Documents packed best-fit into sequences of one length; longer documents are cut."""

    sequence_length: int
    rows: int
    """Sequences of a micro-batch; fewer at a window's tail."""

    def __post_init__(self) -> None:
        _require_positive(self, "sequence_length", "rows")

    @property
    def longest_piece(self) -> int:
        """Documents are cut into pieces of this many tokens."""
        return self.sequence_length

    @property
    def multiple_of(self) -> int:
        """Every sequence is padded to the one length."""
        return self.sequence_length


Batching = Padded | Packed | Fixed
"""How micro-batches are made: a policy, hashable and part of a saved state."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a window: its micro-batches, one per gang, as index arrays."""

    pieces: np.ndarray
    """Pieces of the window in the order of delivery, shape (P,), int64."""
    sequence_offsets: np.ndarray
    """Where each sequence begins in `pieces`, shape (S + 1,), int64."""
    batch_offsets: np.ndarray
    """Where each micro-batch begins among the sequences, shape (gangs + 1,), int64."""
    filler: np.ndarray
    """Micro-batches that repeat another rank's sequence and must not be learnt, (gangs,), bool."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """All micro-batches of a window, for all ranks."""

    piece_offsets: np.ndarray
    """Where the pieces cut the window's tokens, in the order of the rows, shape (P + 1,), int64."""
    piece_rows: np.ndarray
    """Row of the window each piece is cut from, shape (P,), int64."""
    pieces: np.ndarray
    """All pieces in the order of delivery, shape (P,), int64."""
    sequence_offsets: np.ndarray
    """Where each sequence begins in `pieces`, shape (S + 1,), int64."""
    gang_offsets: np.ndarray
    """Where each gang begins among the sequences, shape (gangs + 1,), int64."""

    def share(self, rank: int, world_size: int) -> Share:
        """Deal: sequence j of a gang goes to rank j modulo `world_size`."""
        sizes = np.diff(self.gang_offsets)
        counts = (sizes - rank + world_size - 1) // world_size
        filler = counts < 1
        first = self.gang_offsets[:-1] + np.where(filler, 0, rank)
        counts = np.maximum(counts, 1)
        batch_offsets = _offsets(counts)
        nth = np.arange(batch_offsets[-1]) - np.repeat(batch_offsets[:-1], counts)
        sequences = np.repeat(first, counts) + nth * world_size
        lengths = np.diff(self.sequence_offsets)[sequences]
        picked = _ranges(self.sequence_offsets[:-1][sequences], lengths)
        return Share(self.pieces[picked], _offsets(lengths), batch_offsets, filler)


def plan_window(
    lengths: np.ndarray, batching: Batching, *, world_size: int, key: int, shuffle: bool
) -> WindowPlan:
    """Plan the micro-batches of one window.

    Args:
        lengths: Tokens of each row of the window, shape (R,), every value at least 1.
        batching: The policy.
        world_size: Ranks that share a gang.
        key: 64 bits of randomness; same key, same plan.
        shuffle: Whether rows of equal length, and the gangs, are shuffled.

    Cost: O(R log R), one sort; a Python step per gang or per distinct length, none per row.
    """
    piece_rows, piece_offsets = _cut(lengths, batching.longest_piece)
    piece_lengths = np.diff(piece_offsets)
    by_length = _sort_by_length(piece_lengths, key, shuffle)
    if isinstance(batching, Packed):
        order, sequence_offsets = pack(piece_lengths[by_length][::-1], batching.sequence_length)
        pieces = by_length[::-1][order]
        num_sequences = len(sequence_offsets) - 1
        if shuffle:
            pieces, sequence_offsets = _shuffle_groups(pieces, sequence_offsets, key ^ 1)
        gang_offsets = _even_gangs(num_sequences, batching.rows * world_size)
    else:
        pieces = by_length
        gang_offsets = _length_gangs(piece_lengths[by_length], batching, world_size)
        if shuffle:
            pieces, gang_offsets = _shuffle_groups(pieces, gang_offsets, key ^ 2)
        sequence_offsets = np.arange(len(pieces) + 1)
    return WindowPlan(piece_offsets, piece_rows, pieces, sequence_offsets, gang_offsets)


def round_up(length: int, multiple_of: int) -> int:
    """The smallest multiple of `multiple_of` that is at least `length`."""
    return -(-length // multiple_of) * multiple_of


def _cut(lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows into pieces of at most `longest` tokens: (row of each piece, piece offsets)."""
    counts = -(-lengths // longest)
    rows = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.cumsum(lengths) - lengths)[rows] + nth * longest
    return rows, np.append(starts, lengths.sum())


def _sort_by_length(lengths: np.ndarray, key: int, shuffle: bool) -> np.ndarray:
    """Indices by ascending length, ties in random order.

    Sorts one 64-bit word each: length, then random bits, then the index itself, which breaks the
    last ties and is read back from the sorted words: faster than an argsort, and the same on every
    machine.
    """
    index_bits = max(len(lengths) - 1, 1).bit_length()
    length_bits = int(lengths.max()).bit_length()
    index = np.arange(len(lengths), dtype=np.uint64)
    words = lengths.astype(np.uint64) << np.uint64(64 - length_bits)
    if shuffle:
        random = mix64(index ^ np.uint64(key)) >> np.uint64(length_bits)
        words |= random >> np.uint64(index_bits) << np.uint64(index_bits)
    words |= index
    words.sort()
    return (words & np.uint64((1 << index_bits) - 1)).astype(np.int64)


def _length_gangs(lengths: np.ndarray, batching: Padded | Fixed, world_size: int) -> np.ndarray:
    """Gang offsets over pieces in ascending length, cut from the longest down."""
    edges = [len(lengths)]
    while edges[-1] > 0:
        rows = world_size * batching.rows_of(int(lengths[edges[-1] - 1]))
        edges.append(max(0, edges[-1] - rows))
    return np.array(edges[::-1])


def _even_gangs(num_sequences: int, rows: int) -> np.ndarray:
    """Gang offsets over sequences of one length."""
    return np.append(np.arange(0, num_sequences, rows), num_sequences)


def _shuffle_groups(
    items: np.ndarray, offsets: np.ndarray, key: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reorder groups of consecutive items at random, keeping the order inside each."""
    sizes = np.diff(offsets)
    order = np.argsort(
        mix64(np.arange(len(sizes), dtype=np.uint64) ^ np.uint64(key)), kind="stable"
    )
    return items[_ranges(offsets[:-1][order], sizes[order])], _offsets(sizes[order])


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """All indices of several ranges, one range after the other."""
    ends = np.cumsum(sizes)
    indices: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
    return indices


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """Running total of sizes, with a leading 0."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _require_positive(policy: Padded | Packed | Fixed, *names: str) -> None:
    for name in names:
        if (value := getattr(policy, name)) < 1:
            raise ConfigError(f"`{name}`={value} must be at least 1.")
