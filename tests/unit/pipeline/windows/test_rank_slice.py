"""A slice says where everything stands, and a buffer gives it back as it was."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import plan_in_memory, random_rows

from tokenfeed.pipeline.format.schema import Task
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Batching, Fixed, Packed, Padded
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.rank_slice import RankSlice


def slice_of(
    lengths: list[int], batching: Batching, task: Task = "lm", rank: int = 0, world_size: int = 1
) -> RankSlice:
    plan, reader = plan_in_memory(
        [random_rows(np.array(lengths), task)], batching, micro_batches_per_step=3
    )
    return WindowMaker(plan, reader, rank, world_size).make(Position(0, 0, 0))


FILLED = Packed(20, 4, last="fill")
SLICES = st.builds(
    slice_of,
    st.lists(st.integers(1, 25), min_size=1, max_size=30),
    st.sampled_from([Padded(30, 8), Fixed(3), Packed(20, 2), Packed(20, 2, split=True), FILLED]),
    st.sampled_from(["lm", "tag", "complete"]),
    st.integers(0, 1),
    st.just(2),
)


@given(SLICES, st.integers(0, 100))
def test_a_buffer_gives_a_slice_back(rank_slice: RankSlice, spare: int) -> None:
    buffer = memoryview(bytearray(rank_slice.num_bytes + spare))
    rank_slice.write(buffer)
    was, now = (dict(each._arrays()) for each in (rank_slice, RankSlice.read(buffer)))
    assert list(was) == list(now)
    for name in was:
        assert was[name].dtype == now[name].dtype
        assert np.array_equal(was[name], now[name])


@given(SLICES)
def test_what_is_read_is_a_view_of_the_buffer(
    rank_slice: RankSlice,
) -> None:
    buffer = np.zeros(rank_slice.num_bytes, np.uint8)
    rank_slice.write(buffer.data)
    read = RankSlice.read(buffer.data)
    views = dict(read._arrays())
    assert all(np.shares_memory(array, buffer) for array in views.values())
    starts = [array.ctypes.data - buffer.ctypes.data for array in views.values()]
    assert not np.any(np.array(starts) % 64), "two arrays are in one cache line"
