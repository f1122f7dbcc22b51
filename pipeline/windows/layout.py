"""Where everything stands in the padded batches of a slice, computed once for the whole slice.

A slot is a place in a batch's flattened [B, T]. What a device needs besides the tokens is lengths
and slots, so that padding, labels and positions are a few kernels with shapes known on the host.
A packed batch of two sequences of 8 slots, with documents of 3 and 5, and of 2 and 4 tokens:

    slots      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15
    tokens     a a a b b b b b | c c d  d  d  d  .  .
    segments   0     3           8   10          14      and 16, the end

Torch-free. Sizes: P pieces, S sequences, M micro-batches.
"""

from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of, ranges, round_up
from tokenfeed.pipeline.format.schema import is_target

__all__ = ["Layout", "Sequences", "lay_out"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences, micro-batches and slots."""

    sequence_lengths: np.ndarray
    """Tokens of each sequence, shape (S,), int32."""
    padded: np.ndarray
    """T, the padded length of each micro-batch, shape (M,), int32."""
    piece_offsets: np.ndarray
    """Where each micro-batch begins among the pieces, shape (M + 1,), int64."""
    token_offsets: np.ndarray
    """Where each micro-batch begins among the tokens, shape (M + 1,), int64."""
    num_targets: np.ndarray
    """Labels of each micro-batch that a loss counts, shape (M,), int64."""
    segments: np.ndarray | None = None
    """Slots where a document or padding begins, and the end of the batch, int32; packed only."""
    segment_offsets: np.ndarray | None = None
    """Where each micro-batch begins in `segments`, shape (M + 1,), int64."""
    ignored: np.ndarray | None = None
    """Slots of tokens that are no target, int32; None: the first of each piece, no others."""
    ignored_offsets: np.ndarray | None = None
    """Where each micro-batch begins in `ignored`, shape (M + 1,), int64."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Pieces joined to sequences, and sequences to micro-batches."""

    lengths: np.ndarray
    """Tokens of each piece, shape (P,), int32."""
    batches: np.ndarray
    """Where each micro-batch begins among the sequences, shape (M + 1,), int64."""
    offsets: np.ndarray | None = None
    """Where each sequence begins among the pieces, shape (S + 1,), int64; None: each is one."""

    def sizes(self) -> np.ndarray:
        """Tokens of each sequence, shape (S,)."""
        if self.offsets is None:
            return self.lengths
        return np.asarray(np.add.reduceat(self.lengths, self.offsets[:-1]))


def lay_out(
    sequences: Sequences,
    multiple_of: int,
    *,
    packs: bool,
    row_targets: bool = False,
    token_targets: np.ndarray | None = None,
    context: np.ndarray | None = None,
) -> Layout:
    """Compute where everything stands.

    Args:
        sequences: What the micro-batches are made of.
        multiple_of: Padded lengths are rounded up to this.
        packs: Whether sequences hold several documents.
        row_targets: Whether a row has one target, and its tokens none.
        token_targets: The target of each token, shape (N,), `no_target` where it has none; None for
            the token after it.
        context: Leading tokens of each piece that are given and no target, shape (P,).
    """
    sizes, batches = sequences.sizes(), sequences.batches
    longest = np.maximum.reduceat(sizes, batches[:-1])
    padded = round_up(longest, multiple_of)
    pieces = batches if sequences.offsets is None else sequences.offsets[batches]
    tokens = offsets_of(np.add.reduceat(sequences.lengths, pieces[:-1], dtype=np.int64))
    segments = ignored = segment_offsets = ignored_offsets = None
    slots = _Slots(sequences, sizes, padded, pieces)
    if packs:
        segments, segment_offsets = slots.segments()
    if row_targets:
        num_targets = np.diff(pieces)
    elif token_targets is not None:
        num_targets = np.diff(offsets_of(is_target(token_targets))[tokens])
    elif context is not None:
        given = np.clip(context, 1, sequences.lengths)  # the first token never has a context
        ignored = ranges(slots.of_pieces(), given).astype(np.int32)
        ignored_offsets = offsets_of(given)[pieces]
        num_targets = np.diff(tokens) - np.diff(ignored_offsets)
    else:
        num_targets = np.diff(tokens) - np.diff(pieces)
    return Layout(
        sizes.astype(np.int32, copy=False),
        padded.astype(np.int32),
        pieces,
        tokens,
        num_targets,
        segments,
        segment_offsets,
        ignored,
        ignored_offsets,
    )


@dataclass(frozen=True, slots=True)
class _Slots:
    """Places in the flattened batches."""

    sequences: Sequences
    sizes: np.ndarray
    padded: np.ndarray
    pieces: np.ndarray

    def of_sequences(self) -> np.ndarray:
        """The slot of each sequence's first token, shape (S,), int64."""
        batches = self.sequences.batches
        counts = np.diff(batches)
        nth = np.arange(batches[-1]) - np.repeat(batches[:-1], counts)
        return np.asarray(nth * np.repeat(self.padded, counts))

    def of_pieces(self) -> np.ndarray:
        """The slot of each piece's first token, shape (P,), int64."""
        slots, offsets = self.of_sequences(), self.sequences.offsets
        if offsets is None:
            return slots
        shift = slots - offsets_of(self.sizes)[:-1]
        starts = offsets_of(self.sequences.lengths)[:-1] + np.repeat(shift, np.diff(offsets))
        return np.asarray(starts)

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots where documents, paddings and the end of the batch begin, and their offsets.

        All are sorted at once: in slots of the whole slice, where each batch has one slot more, so
        that its end comes before the next one's beginning.
        """
        counts = np.diff(self.sequences.batches)
        bases = offsets_of(counts * self.padded + 1)
        length = np.repeat(self.padded, counts)
        open_ended = self.sizes < length
        paddings = self.of_sequences() + self.sizes + np.repeat(bases[:-1], counts)
        documents = self.of_pieces() + np.repeat(bases[:-1], np.diff(self.pieces))
        marks = np.concatenate([documents, paddings[open_ended], bases[1:] - 1])
        marks.sort(kind="stable")  # runs that are in order already
        offsets = np.searchsorted(marks, bases)
        marks -= np.repeat(bases[:-1], np.diff(offsets))
        return marks.astype(np.int32), offsets
