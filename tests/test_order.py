"""Order is a permutation, the same everywhere, whatever the size."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfeed.pipeline.planning.order import EpochOrder, Stretch, permute, stream_key


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(st.integers(1, 10**12), st.integers(0, 2**32))
def test_permute_of_a_few_positions_stays_in_a_huge_range(size: int, key: int) -> None:
    positions = np.unique(np.linspace(0, size - 1, 20).astype(np.int64))
    sent = permute(positions, size, key)
    assert sent.min() >= 0
    assert sent.max() < size
    assert len(np.unique(sent)) == len(positions)


def test_order_never_changes_between_releases() -> None:
    """Order is part of saved states: these values may only change with the state's version."""
    assert permute(np.arange(10), 10, 1).tolist() == [1, 0, 8, 4, 6, 3, 7, 9, 5, 2]
    assert stream_key(1, 2, 3) == 7702586659592502839
    order = EpochOrder.of_one(10, 3, seed=1, shuffle=True)
    assert [order.window(2, window).tolist() for window in range(3)] == [
        [1, 7, 4],
        [0, 5, 8],
        [3, 9, 2, 6],
    ]
    assert order.window_key(2, 1) == stream_key(1, 2, 1)


def test_every_place_gets_every_value_about_equally_often() -> None:
    counts = np.zeros((5, 5), np.int64)
    for seed in range(1000):
        counts[np.arange(5), permute(np.arange(5), 5, stream_key(seed))] += 1
    assert counts.min() > 145
    assert counts.max() < 255


@settings(max_examples=50)
@given(
    num_batches=st.integers(1, 500),
    data=st.data(),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_windows_of_an_epoch_hold_every_record_batch_once(
    num_batches: int, data: st.DataObject, epoch: int, shuffle: bool
) -> None:
    num_windows = data.draw(st.integers(1, num_batches))
    order = EpochOrder.of_one(num_batches, num_windows, seed=7, shuffle=shuffle)
    assert order.num_windows == num_windows
    windows = [order.window(epoch, window) for window in range(num_windows)]
    assert sorted(np.concatenate(windows).tolist()) == list(range(num_batches))
    sizes = [len(window) for window in windows]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) >= 1


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    """Some sources, and stretches that go on where the one before ended."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple))
    begins, stretches = (0,) * len(sizes), []
    for _ in range(draw(st.integers(1, 3))):
        batches = draw(st.tuples(*(st.integers(0, 50) for _ in sizes)).filter(any))
        stretches.append(Stretch(begins, batches, draw(st.integers(1, max(batches)))))
        begins = tuple(np.add(begins, batches).tolist())
    return EpochOrder(sizes, tuple(stretches), draw(st.integers(0, 9)), draw(st.booleans()))


@given(orders(), st.integers(0, 3))
def test_a_source_that_begins_again_gives_no_batch_twice_before_all_others_once_more(
    order: EpochOrder, epoch: int
) -> None:
    seen = np.concatenate([order.window(epoch, window) for window in range(order.num_windows)])
    first = 0
    for source, size in enumerate(order.sizes):
        mine = seen[(seen >= first) & (seen < first + size)]
        assert len(mine) == sum(stretch.batches[source] for stretch in order.stretches)
        for turn in range(0, len(mine), size):
            assert set(Counter(mine[turn : turn + size].tolist()).values()) == {1}
        first += size
    assert seen.max() < first


@settings(max_examples=50)
@given(orders())
def test_no_window_is_empty_and_those_of_a_stretch_are_even_in_every_source(
    order: EpochOrder,
) -> None:
    edges = np.append(0, np.cumsum(order.sizes))
    number = 0
    for stretch in order.stretches:
        counts = []
        for _ in range(stretch.num_windows):
            counts.append(np.histogram(order.window(0, number), edges)[0])
            number += 1
        assert min(count.sum() for count in counts) >= 1
        assert np.ptp(counts, axis=0).max() <= 1


def test_epochs_seeds_sources_and_turns_differ_and_no_shuffle_is_file_order() -> None:
    first = EpochOrder.of_one(1000, 10, seed=0, shuffle=True)
    other = EpochOrder.of_one(1000, 10, seed=1, shuffle=True)
    assert first.window(0, 3).tolist() != first.window(1, 3).tolist()
    assert first.window(0, 3).tolist() != other.window(0, 3).tolist()
    assert first.window_key(0, 3) != first.window_key(1, 3)
    assert first.window_key(0, 3) != first.window_key(0, 4)
    assert first.window_key(0, 3) != other.window_key(0, 3)
    plain = EpochOrder.of_one(1000, 10, seed=0, shuffle=False)
    assert plain.window(4, 3).tolist() == list(range(300, 400))
    twice = EpochOrder((50, 50), (Stretch((0, 0), (100, 50), 1),), seed=0, shuffle=True)
    turn, again, source = np.split(twice.window(0, 0), 3)
    assert turn.tolist() != again.tolist()
    assert turn.tolist() != (source - 50).tolist()
