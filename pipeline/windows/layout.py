"""Where everything stands in the padded batches of a share, computed once for the whole share.

A slot is a place in a batch's flattened [B, T]. What a device needs besides the tokens is lengths
and slots, so that padding, labels and positions are a few kernels with shapes known on the host.
Torch-free.
"""

import numpy as np

from tokenfeed.pipeline.format.schema import IGNORED, LABEL, LABELS, PROMPT_LENGTH
from tokenfeed.pipeline.planning.batching import offsets_of
from tokenfeed.pipeline.planning.policy import Batching, Packed

__all__ = ["lay_out"]


def lay_out(
    per_token: dict[str, np.ndarray], arrays: dict[str, np.ndarray], batching: Batching
) -> dict[str, np.ndarray]:
    """Compute what `RankSlice` documents of sequences, micro-batches and slots.

    Args:
        per_token: Values a token; see `gather`.
        arrays: What stands beside them; see `gather`.
        batching: The policy; decides how far sequences are padded.
    """
    lengths, batches = arrays["lengths"], arrays["batches"]
    sequences = arrays.get("sequences")
    of_sequence = lengths if sequences is None else np.add.reduceat(lengths, sequences[:-1])
    longest = np.maximum.reduceat(of_sequence, batches[:-1])
    padded = -(-longest // batching.multiple_of) * batching.multiple_of
    piece_batches = batches if sequences is None else sequences[batches]
    tokens = offsets_of(lengths)[piece_batches]
    made = {
        "sequence_lengths": of_sequence.astype(np.int32, copy=False),
        "padded": padded.astype(np.int32),
        "piece_offsets": piece_batches,
        "token_offsets": tokens,
        "targets": np.diff(tokens) - np.diff(piece_batches),
    }
    if LABEL in arrays:
        return made | {"targets": np.diff(piece_batches)}
    if isinstance(batching, Packed):
        made |= _segments(arrays, of_sequence, padded)
    if LABELS in per_token:
        labelled = offsets_of(per_token[LABELS] != IGNORED)
        made["targets"] = np.diff(labelled[tokens])
    if PROMPT_LENGTH in arrays:
        context = _context(arrays)
        ignored = _ranges(_piece_slots(arrays, of_sequence, padded), context)
        counts = offsets_of(context)[piece_batches]
        made |= {"ignored": ignored.astype(np.int32), "ignored_offsets": counts}
        made["targets"] = np.diff(tokens) - np.diff(counts)
    return made


def _segments(
    arrays: dict[str, np.ndarray], of_sequence: np.ndarray, padded: np.ndarray
) -> dict[str, np.ndarray]:
    """Slots where a document or the padding after the last one begins, and the end of the batch."""
    batches, sequences = arrays["batches"], arrays["sequences"]
    sizes = np.diff(batches)
    length = np.repeat(padded, sizes)
    nth = np.arange(batches[-1]) - np.repeat(batches[:-1], sizes)
    open_ended = of_sequence < length
    # One place a piece, one for each padding, one for the end of each batch.
    own = np.diff(sequences) + open_ended
    ends = np.zeros(len(own), np.int64)
    ends[batches[1:] - 1] = 1
    offsets = offsets_of(own + ends)
    segments = np.empty(offsets[-1], np.int32)
    segments[offsets[batches[1:]] - 1] = sizes * padded
    segments[(offsets[:-1] + own - 1)[open_ended]] = (nth * length + of_sequence)[open_ended]
    place = np.arange(sequences[-1]) + np.repeat(offsets[:-1] - sequences[:-1], np.diff(sequences))
    segments[place] = _piece_slots(arrays, of_sequence, padded)
    return {"segments": segments, "segment_offsets": offsets[batches]}


def _piece_slots(
    arrays: dict[str, np.ndarray], of_sequence: np.ndarray, padded: np.ndarray
) -> np.ndarray:
    """The slot of each piece's first token, shape (P,), int64."""
    batches = arrays["batches"]
    sizes = np.diff(batches)
    nth = np.arange(batches[-1]) - np.repeat(batches[:-1], sizes)
    slots = nth * np.repeat(padded, sizes)
    sequences = arrays.get("sequences")
    if sequences is None:
        return np.asarray(slots)
    shift = slots - offsets_of(of_sequence)[:-1]
    starts: np.ndarray = offsets_of(arrays["lengths"])[:-1] + np.repeat(shift, np.diff(sequences))
    return starts


def _context(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Leading tokens of each piece that are no target: the prompt, and always the first one."""
    prompt = arrays[PROMPT_LENGTH].astype(np.int64) - arrays.get("starts", 0)
    context: np.ndarray = np.clip(prompt, 1, arrays["lengths"])
    return context


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """All integers of several ranges, one range after the other."""
    ends = np.cumsum(sizes)
    ranges: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
    return ranges
