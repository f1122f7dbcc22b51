"""Places of tokens, documents and padding in the padded batches of a slice.

A slot is a place in a batch's flattened [B, T]. A device needs the tokens, the lengths and these
slots; then padding, labels and positions are a few kernels with shapes that the host knows. The
layout is computed once for all batches of a slice. Example: a packed batch of two sequences of 8
slots, with documents of 3 and 5 tokens, and of 2 and 4 tokens:

    slots      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15
    tokens     a a a b b b b b | c c d  d  d  d  .  .
    segments   0     3           8   10          14      and 16, the end

Without prompts, no loss counts the first token of each document: 3 + 5 + 2 + 4 tokens in 4
documents have 10 targets. With prompts of 1, 2, 1 and 1 tokens, `ignored` is the slots
0 | 3 4 | 8 | 10, and 14 - 5 = 9 targets are left.

Torch-free. Sizes: P pieces, S sequences, M micro-batches.
"""

from dataclasses import dataclass, replace

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of, ranges, round_up
from tokenfeed.pipeline.format.schema import is_target
from tokenfeed.pipeline.planning.policies import Batching


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths, offsets and slots of all micro-batches of a slice."""

    sequence_lengths: np.ndarray
    """Tokens of each sequence, shape (S,), int32."""
    padded: np.ndarray
    """T, the padded length of each micro-batch, shape (M,), int32."""
    piece_offsets: np.ndarray
    """Where each micro-batch begins among the pieces, shape (M + 1,), int64."""
    token_offsets: np.ndarray
    """Where each micro-batch begins among the tokens, shape (M + 1,), int64."""
    num_targets: np.ndarray
    """Number of labels of each micro-batch that a loss counts, shape (M,), int64."""
    segments: np.ndarray | None = None
    """Slots where a document or padding begins, and the end of the batch, int32; packed only."""
    segment_offsets: np.ndarray | None = None
    """Where each micro-batch begins in `segments`, shape (M + 1,), int64."""
    ignored: np.ndarray | None = None
    """Slots of tokens that are not targets, int32; None: only the first token of each piece."""
    ignored_offsets: np.ndarray | None = None
    """Where each micro-batch begins in `ignored`, shape (M + 1,), int64."""


@dataclass(frozen=True, slots=True)
class PieceIndex:
    """The pieces of a slice, and what belongs to each."""

    numbers: np.ndarray
    """Number of the row over all sources, shape (P,), int64."""
    lengths: np.ndarray
    """Tokens, shape (P,), int32."""
    batches: np.ndarray
    """Where each micro-batch begins among the sequences, shape (M + 1,), int64."""
    starts: np.ndarray | None = None
    """First token of the piece in its row, shape (P,), int64; None: no row was cut."""
    sequences: np.ndarray | None = None
    """Where each sequence begins among the pieces, shape (S + 1,), int64; a sequence without pieces
    is padding. None: every piece is a sequence."""
    targets: np.ndarray | None = None
    """Target of the row, shape (P,), in storage dtype; None: rows have no target."""

    def sizes(self) -> np.ndarray:
        """Return the tokens of each sequence, shape (S,)."""
        if self.sequences is None:
            return self.lengths
        ends = offsets_of(self.lengths)[self.sequences]
        return np.asarray(np.diff(ends), np.int32)

    def padded(self, multiple_of: int) -> np.ndarray:
        """Return the padded length of each micro-batch, shape (M,)."""
        longest = np.maximum.reduceat(self.sizes(), self.batches[:-1])
        return np.asarray(round_up(longest, multiple_of))

    def filled(self, batching: Batching) -> "PieceIndex":
        """Return the index with `batching.rows_to_fill` sequences in each micro-batch: empty ones
        follow those with tokens."""
        lengths, of_batch = np.unique(self.padded(batching.multiple_of), return_inverse=True)
        rows = np.array([batching.rows_to_fill(length) for length in lengths.tolist()])[of_batch]
        counts = np.diff(self.batches)
        missing = np.maximum(rows - counts, 0)
        if not missing.any():
            return self
        offsets = np.arange(len(self.lengths) + 1) if self.sequences is None else self.sequences
        ends = np.repeat(self.batches[1:], missing)
        filled = np.insert(offsets, ends, offsets[ends])
        return replace(self, batches=offsets_of(counts + missing), sequences=filled)


def lay_out(
    index: PieceIndex,
    multiple_of: int,
    *,
    packs: bool,
    token_targets: np.ndarray | None = None,
    context: np.ndarray | None = None,
    learned: np.ndarray | None = None,
) -> Layout:
    """Compute the layout of a slice.

    Args:
        index: The pieces, sequences and micro-batches of the slice.
        multiple_of: Padded lengths are rounded up to a multiple of this.
        packs: Whether a sequence may have several documents.
        token_targets: Target of each token, shape (N,), `no_target` for tokens without one. None if
            the target of a token is the next token.
        context: Number of leading tokens of each piece that are a prompt, not targets, shape (P,),
            int64. 0 or less counts as 1, because the first token has no context.
        learned: Which tokens are targets, shape (N,), bool. The first token of a piece is not.
    """
    sizes, batches = index.sizes(), index.batches
    padded = index.padded(multiple_of)
    pieces = batches if index.sequences is None else index.sequences[batches]
    tokens = offsets_of(np.add.reduceat(index.lengths, pieces[:-1], dtype=np.int64))
    segments = ignored = segment_offsets = ignored_offsets = None
    slots = _Slots(index, sizes, padded, pieces)
    if packs:
        segments, segment_offsets = slots.segments()
    if index.targets is not None:
        num_targets = np.diff(offsets_of(is_target(index.targets))[pieces])
    elif token_targets is not None:
        num_targets = np.diff(offsets_of(is_target(token_targets))[tokens])
    elif context is not None:
        given = np.clip(context, 1, index.lengths)  # the first token has no context
        ignored = ranges(slots.of_pieces(), given).astype(np.int32)
        ignored_offsets = offsets_of(given)[pieces]
        num_targets = np.diff(tokens) - np.diff(ignored_offsets)
    elif learned is not None:
        is_ignored = ~learned
        is_ignored[offsets_of(index.lengths)[:-1]] = True
        ignored = ranges(slots.of_pieces(), index.lengths)[is_ignored].astype(np.int32)
        ignored_offsets = offsets_of(is_ignored)[tokens]
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
    """Computes slots in the flattened batches."""

    index: PieceIndex
    sizes: np.ndarray
    padded: np.ndarray
    pieces: np.ndarray

    def of_sequences(self) -> np.ndarray:
        """Return the slot of each sequence's first token, shape (S,), int64.

        In a batch with padded length 8, sequence 0 begins at slot 0, sequence 1 at slot 8.
        """
        batches = self.index.batches
        counts = np.diff(batches)
        nth = np.arange(batches[-1]) - np.repeat(batches[:-1], counts)
        return np.asarray(nth * np.repeat(self.padded, counts))

    def of_pieces(self) -> np.ndarray:
        """Return the slot of each piece's first token, shape (P,), int64.

        A piece begins at the slot of its sequence plus the tokens before it in the sequence: in
        the example of the module, at 0, 0 + 3, 8 and 8 + 2.
        """
        slots, offsets = self.of_sequences(), self.index.sequences
        if offsets is None:
            return slots
        shift = slots - offsets_of(self.sizes)[:-1]
        starts = offsets_of(self.index.lengths)[:-1] + np.repeat(shift, np.diff(offsets))
        return np.asarray(starts)

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots where documents and paddings begin and the batch ends, shape (K,), and
        where each batch begins among them, shape (M + 1,).

        One sort orders the slots of all batches. For that, slots are counted over the whole slice,
        with one extra slot per batch for its end: in the example, the next batch begins at 17, so
        the end of the first batch, 16, sorts before it.
        """
        counts = np.diff(self.index.batches)
        bases = offsets_of(counts * self.padded + 1)
        length = np.repeat(self.padded, counts)
        open_ended = self.sizes < length
        paddings = self.of_sequences() + self.sizes + np.repeat(bases[:-1], counts)
        documents = self.of_pieces() + np.repeat(bases[:-1], np.diff(self.pieces))
        marks = np.concatenate([documents, paddings[open_ended], bases[1:] - 1])
        marks.sort(kind="stable")  # three sorted runs, which a stable sort merges fast
        offsets = np.searchsorted(marks, bases)
        marks -= np.repeat(bases[:-1], np.diff(offsets))
        return marks.astype(np.int32), offsets
