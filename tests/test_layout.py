"""A rank_slice says where everything stands, and a buffer gives it back as it was."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import plan_in_memory, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfeed.pipeline.format.schema import Task
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policy import Batching, Fixed, Packed, Padded, round_up
from tokenfeed.pipeline.windows.layout import lay_out
from tokenfeed.pipeline.windows.rank_slice import RankSlice

DTYPES = ["u1", "i2", "u2", "i4", "u4", "i8", "u8", "?"]


def slice_of(
    lengths: list[int], batching: Batching, task: Task = "lm", rank: int = 0, world_size: int = 1
) -> RankSlice:
    plan, reader = plan_in_memory(
        [random_rows(np.array(lengths), task)], batching, micro_batches_per_step=3
    )
    return plan.read_slice(reader, Position(0, 0, 0), rank, world_size)


SHARES = st.builds(
    slice_of,
    st.lists(st.integers(1, 25), min_size=1, max_size=30),
    st.sampled_from([Padded(30, 8), Fixed(3), Packed(20, 2), Packed(20, 2, split=True)]),
    st.sampled_from(["lm", "tag", "complete"]),
    st.integers(0, 1),
    st.just(2),
)


@settings(max_examples=50)
@given(SHARES)
def test_a_share_has_the_shapes_and_dtypes_it_documents(rank_slice: RankSlice) -> None:
    index, batches = rank_slice.index, rank_slice.num_batches
    tokens, pieces = len(rank_slice.per_token["input_ids"]), len(index["lengths"])
    sequences = len(index["sequence_lengths"])
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "lengths": ("int32", (pieces,)),
        "numbers": ("int64", (pieces,)),
        "starts": ("int64", (pieces,)),
        "sequences": ("int64", (sequences + 1,)),
        "sequence_lengths": ("int32", (sequences,)),
        "padded": ("int32", (batches,)),
        "targets": ("int64", (batches,)),
        "filler": ("bool", (batches,)),
        "position": ("int64", (batches,)),
        "ends_step": ("bool", (batches,)),
        "digests": ("uint64", (batches,)),
        "tokens": ("int64", (batches, 1)),
        "batches": ("int64", (batches + 1,)),
        "piece_offsets": ("int64", (batches + 1,)),
        "token_offsets": ("int64", (batches + 1,)),
        "segment_offsets": ("int64", (batches + 1,)),
        "ignored_offsets": ("int64", (batches + 1,)),
    }
    described = {name: (str(a.dtype), a.shape) for name, a in index.items() if name in expected}
    assert described == {name: expected[name] for name in described}
    for name in ("segments", "ignored"):
        if name in index:
            assert index[name].dtype == np.int32
            assert index[f"{name.removesuffix('s')}_offsets"][-1] == len(index[name])
    assert {a.shape for a in rank_slice.per_token.values()} == {(tokens,)}
    assert index["token_offsets"][-1] == tokens
    assert index["piece_offsets"][-1] == pieces
    assert index["batches"][-1] == sequences


@settings(max_examples=50)
@given(SHARES, st.sampled_from([1, 8, 30]))
def test_micro_batches_are_padded_to_their_longest_sequence_rounded_up(
    rank_slice: RankSlice, multiple_of: int
) -> None:
    made = lay_out(rank_slice.per_token, rank_slice.index, Fixed(9, multiple_of))
    lengths = rank_slice.index["lengths"].tolist()
    cuts = rank_slice.index.get("sequences", np.arange(len(lengths) + 1)).tolist()
    sequences = [sum(lengths[start:stop]) for start, stop in pairwise(cuts)]
    assert made["sequence_lengths"].tolist() == sequences
    assert made["padded"].tolist() == [
        round_up(max(sequences[start:stop]), multiple_of)
        for start, stop in pairwise(rank_slice.index["batches"].tolist())
    ]


def test_segments_begin_at_documents_and_at_padding_and_end_with_the_batch() -> None:
    made = lay_out(
        {},
        {
            "lengths": np.array([3, 5, 8, 2, 4], np.int32),
            "sequences": np.array([0, 2, 3, 5]),
            "batches": np.array([0, 2, 3]),
        },
        Packed(8, 2),
    )
    assert made["segments"].tolist() == [0, 3, 8, 16, 0, 2, 6, 8]
    assert made["segment_offsets"].tolist() == [0, 4, 8]
    assert made["targets"].tolist() == [16 - 3, 6 - 2]


@pytest.mark.parametrize(
    ("prompts", "starts", "ignored"),
    [
        ([0, 2, 9], None, [0, 4, 5, 8, 9, 10, 11]),
        ([2, 6, 5], [0, 4, 4], [0, 1, 4, 5, 8]),
    ],
)
def test_ignored_are_prompts_and_what_has_no_context(
    prompts: list[int], starts: list[int] | None, ignored: list[int]
) -> None:
    arrays = {
        "lengths": np.array([2, 3, 4], np.int32),
        "batches": np.array([0, 3]),
        "prompt_length": np.array(prompts, np.uint32),
    }
    made = lay_out({}, arrays | ({"starts": np.array(starts)} if starts else {}), Padded(12))
    assert made["ignored"].tolist() == ignored
    assert made["targets"].tolist() == [9 - len(ignored)]


def arrays(*, most: int = 4) -> st.SearchStrategy[dict[str, np.ndarray]]:
    shapes = st.tuples(st.integers(0, 70)) | st.tuples(st.integers(1, 20), st.integers(1, 3))
    one = st.builds(
        lambda dtype, shape, fill: np.full(shape, fill, dtype) + np.zeros(shape, dtype),
        st.sampled_from(DTYPES),
        shapes,
        st.integers(0, 100),
    )
    return st.dictionaries(st.text(max_size=5), one, max_size=most)


@given(arrays(), arrays(), st.integers(0, 100))
def test_a_buffer_gives_a_share_back(
    per_token: dict[str, np.ndarray], index: dict[str, np.ndarray], spare: int
) -> None:
    rank_slice = RankSlice(3, 5, per_token, index, index)
    buffer = memoryview(bytearray(rank_slice.num_bytes + spare))
    header = rank_slice.write(buffer)
    read = RankSlice.read(header, buffer)
    assert (read.epoch, read.window) == (3, 5)
    for ours, theirs in ((per_token, read.per_token), (index, read.index), (index, read.staged)):
        assert list(ours) == list(theirs)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            assert np.array_equal(ours[name], theirs[name])


@settings(max_examples=50)
@given(SHARES)
def test_what_is_read_is_a_view_of_the_buffer_except_the_index(rank_slice: RankSlice) -> None:
    buffer = np.zeros(rank_slice.num_bytes, np.uint8)
    read = RankSlice.read(rank_slice.write(buffer.data), buffer.data)
    views: dict[str, Any] = read.per_token | read.staged
    assert all(np.shares_memory(array, buffer) for array in views.values())
    assert not any(np.shares_memory(array, buffer) for array in read.index.values())
    starts = [array.ctypes.data - buffer.ctypes.data for array in views.values()]
    assert not np.any(np.array(starts) % 64), "arrays rank_slice a cache line"
