"""A slice says where everything stands, and a buffer gives it back as it was."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import plan_in_memory, random_rows

from tokenfeed.pipeline.arithmetic import offsets_of, round_up
from tokenfeed.pipeline.format.schema import Task
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Fixed, Packed, Padded
from tokenfeed.pipeline.planning.policy import Batching
from tokenfeed.pipeline.windows.layout import PieceIndex, lay_out
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice


def slice_of(
    lengths: list[int], batching: Batching, task: Task = "lm", rank: int = 0, world_size: int = 1
) -> RankSlice:
    plan, reader = plan_in_memory(
        [random_rows(np.array(lengths), task)], batching, micro_batches_per_step=3
    )
    return WindowMaker(plan, reader, rank, world_size).make(Position(0, 0, 0))


FILLED = Packed(20, 4, fill=True)
SLICES = st.builds(
    slice_of,
    st.lists(st.integers(1, 25), min_size=1, max_size=30),
    st.sampled_from([Padded(30, 8), Fixed(3), Packed(20, 2), Packed(20, 2, split=True), FILLED]),
    st.sampled_from(["lm", "tag", "complete"]),
    st.integers(0, 1),
    st.just(2),
)


@given(SLICES)
def test_a_slice_has_the_shapes_and_dtypes_it_documents(rank_slice: RankSlice) -> None:
    index, batches = dict(rank_slice.index.arrays()), rank_slice.num_batches
    tokens, pieces = len(rank_slice.per_token["input_ids"]), len(index["pieces.lengths"])
    sequences = len(index["layout.sequence_lengths"])
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "pieces.lengths": ("int32", (pieces,)),
        "pieces.numbers": ("int64", (pieces,)),
        "pieces.starts": ("int64", (pieces,)),
        "pieces.sequences": ("int64", (sequences + 1,)),
        "pieces.batches": ("int64", (batches + 1,)),
        "layout.sequence_lengths": ("int32", (sequences,)),
        "layout.padded": ("int32", (batches,)),
        "layout.num_targets": ("int64", (batches,)),
        "layout.piece_offsets": ("int64", (batches + 1,)),
        "layout.token_offsets": ("int64", (batches + 1,)),
        "layout.segment_offsets": ("int64", (batches + 1,)),
        "layout.ignored_offsets": ("int64", (batches + 1,)),
        "rounds.filler": ("bool", (batches,)),
        "rounds.position": ("int64", (batches,)),
        "rounds.steps": ("int64", (batches,)),
        "rounds.digests": ("uint64", (batches,)),
        "rounds.tokens": ("int64", (batches, 1)),
    }
    described = {name: (str(a.dtype), a.shape) for name, a in index.items() if name in expected}
    assert described == {name: expected[name] for name in described}
    assert index.keys() - expected.keys() <= {"layout.segments", "layout.ignored"}
    for name in ("layout.segments", "layout.ignored"):
        if name in index:
            assert index[name].dtype == np.int32
            assert index[f"{name.removesuffix('s')}_offsets"][-1] == len(index[name])
    assert {a.shape for a in rank_slice.per_token.values()} == {(tokens,)}
    assert index["layout.token_offsets"][-1] == tokens
    assert index["layout.piece_offsets"][-1] == pieces
    assert index["pieces.batches"][-1] == sequences


@given(SLICES, st.sampled_from([1, 8, 30]))
def test_micro_batches_are_padded_to_their_longest_sequence_rounded_up(
    rank_slice: RankSlice, multiple_of: int
) -> None:
    pieces = rank_slice.index.pieces
    made = lay_out(pieces, multiple_of, packs=False)
    lengths = pieces.lengths.tolist()
    cuts = np.arange(len(lengths) + 1) if pieces.sequences is None else pieces.sequences
    sequences = [sum(lengths[start:stop]) for start, stop in pairwise(cuts.tolist())]
    assert made.sequence_lengths.tolist() == sequences
    assert made.padded.tolist() == [
        round_up(max(sequences[start:stop]), multiple_of)
        for start, stop in pairwise(pieces.batches.tolist())
    ]


def slow_segments(lengths: list[list[list[int]]], capacity: int) -> tuple[list[int], list[int]]:
    """Of micro-batches of sequences of documents, mark by mark."""
    segments, offsets = [], [0]
    for batch in lengths:
        for number, sequence in enumerate(batch):
            slot = number * capacity
            for length in sequence:
                segments.append(slot)
                slot += length
            if slot < (number + 1) * capacity:
                segments.append(slot)
        segments.append(len(batch) * capacity)
        offsets.append(len(segments))
    return segments, offsets


@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    )
)
def test_segments_begin_at_documents_and_at_padding_and_end_with_the_batch(
    batches: list[list[list[int]]],
) -> None:
    sequences = [sequence for batch in batches for sequence in batch]
    lengths = np.array([length for sequence in sequences for length in sequence], np.int32)
    index = PieceIndex(
        np.arange(len(lengths)),
        lengths,
        batches=offsets_of(np.array([len(batch) for batch in batches])),
        sequences=offsets_of(np.array([len(sequence) for sequence in sequences])),
    )
    made = lay_out(index, 12, packs=True)
    assert made.segments is not None
    assert made.segment_offsets is not None
    assert (made.segments.tolist(), made.segment_offsets.tolist()) == slow_segments(batches, 12)
    assert made.num_targets.tolist() == [
        sum(length - 1 for sequence in batch for length in sequence) for batch in batches
    ]


@pytest.mark.parametrize(
    ("context", "ignored"),
    [
        ([0, 2, 9], [0, 4, 5, 8, 9, 10, 11]),
        ([2, 2, 1], [0, 1, 4, 5, 8]),
        ([-3, 1, -1], [0, 4, 8]),
    ],
)
def test_ignored_are_prompts_and_what_has_no_context(
    context: list[int], ignored: list[int]
) -> None:
    index = PieceIndex(np.arange(3), np.array([2, 3, 4], np.int32), np.array([0, 3]))
    made = lay_out(index, 1, packs=False, context=np.array(context))
    assert made.ignored is not None
    assert made.ignored.tolist() == ignored
    assert made.num_targets.tolist() == [9 - len(ignored)]


@given(SLICES, st.integers(0, 100))
def test_a_buffer_gives_a_slice_back(rank_slice: RankSlice, spare: int) -> None:
    buffer = memoryview(bytearray(rank_slice.num_bytes + spare))
    read = RankSlice.read(rank_slice.write(buffer), buffer)
    ours = dict(rank_slice.index.arrays())
    for was, now in (
        (rank_slice.per_token, read.per_token),
        (ours, dict(read.index.arrays())),
        (ours, dict(read.staged.arrays())),
    ):
        assert list(was) == list(now)
        for name in was:
            assert was[name].dtype == now[name].dtype
            assert np.array_equal(was[name], now[name])


@given(SLICES)
def test_what_is_read_is_a_view_of_the_buffer_except_the_index(rank_slice: RankSlice) -> None:
    buffer = np.zeros(rank_slice.num_bytes, np.uint8)
    read = RankSlice.read(rank_slice.write(buffer.data), buffer.data)
    views = read.per_token | dict(read.staged.arrays())
    assert all(np.shares_memory(array, buffer) for array in views.values())
    assert not any(np.shares_memory(array, buffer) for _, array in read.index.arrays())
    starts = [array.ctypes.data - buffer.ctypes.data for array in views.values()]
    assert not np.any(np.array(starts) % 64), "two arrays are in one cache line"
