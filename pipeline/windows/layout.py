"""Where the pieces of a slice stand in its batches: sequences, rows of padding, and segments.

`rank_slice` has an example. Torch-free. Sizes: P pieces, S sequences, M micro-batches.
"""

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of


def sequence_sizes(lengths: np.ndarray, sequence_offsets: np.ndarray | None) -> np.ndarray:
    """Return the tokens of each sequence, shape (S,). `lengths` are those of the pieces."""
    if sequence_offsets is None:
        return lengths
    return np.diff(offsets_of(lengths)[sequence_offsets])


def with_empty(
    batch_offsets: np.ndarray, sequence_offsets: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return both offsets with empty sequences at the end of micro-batches that have fewer than
    `rows` sequences, shape (M,)."""
    counts = np.diff(batch_offsets)
    missing = np.maximum(rows - counts, 0)
    ends = np.repeat(batch_offsets[1:], missing)
    return offsets_of(counts + missing), np.insert(sequence_offsets, ends, sequence_offsets[ends])


def segments_of(
    lengths: np.ndarray,
    sequence_offsets: np.ndarray,
    batch_offsets: np.ndarray,
    padded_lengths: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots where documents and paddings begin and each batch ends, int32, and where
    each batch begins among them, shape (M + 1,).

    Documents and paddings are the parts of a batch. Their lengths in order of slots give their
    slots. In the example of `rank_slice`, the parts have 3, 5, 2, 4 and 2 slots.

    Args:
        lengths: Tokens of each document, shape (P,).
        sequence_offsets: Where each sequence begins among the documents, shape (S + 1,).
        batch_offsets: Where each batch begins among the sequences, shape (M + 1,).
        padded_lengths: Slots of each sequence of a batch, shape (M,).
    """
    ends = sequence_offsets[1:]
    padding = np.repeat(padded_lengths, np.diff(batch_offsets))
    padding -= sequence_sizes(lengths, sequence_offsets)
    is_padded = padding > 0
    parts = np.insert(lengths, ends[is_padded], padding[is_padded])
    bounds = np.append(0, ends + np.cumsum(is_padded))[batch_offsets]  # of batches among the parts
    slots = offsets_of(parts)
    begins = slots[:-1] - np.repeat(slots[bounds[:-1]], np.diff(bounds))
    segments = np.insert(begins, bounds[1:], np.diff(slots[bounds]))
    return segments.astype(np.int32), bounds + np.arange(len(bounds))
