"""Order is a permutation, the same everywhere, whatever the size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import order_of_one

from tokenfeed.pipeline.planning.order import Draw, EpochOrder, MixturePhase
from tokenfeed.pipeline.planning.permutation import derive_key, evenly, evenly_inverse, permute
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.pipeline.planning.stages import PlannedStage, StagedOrder


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
    assert derive_key(1, 2, 3) == 7702586659592502839
    order = order_of_one(10, 3, seed=1, shuffle=True)
    assert [order.window(2, window).tolist() for window in range(3)] == [
        [0, 4, 8],
        [1, 3, 7],
        [2, 5, 6, 9],
    ]
    assert order.draw(10, 1) == Draw(derive_key(1, 10, 1), derive_key(1, 1, 1, 8), 2, 3)


def staged(count: int, window_tokens: int) -> StagedOrder:
    """Sources of 100 record batches with 1,000 tokens each, and equal weights."""
    data = tuple(f"{number:016x}" for number in range(count))
    stage = PlannedStage(0, None, window_tokens, dict.fromkeys(data, 1.0), Fixed(8))
    return StagedOrder((100,) * count, 1, True, data, (100_000,) * count, (stage,))


def test_order_of_stages_never_changes_between_releases() -> None:
    """Order is part of saved states: these values may only change with the state's version."""
    order = staged(2, 4_000)
    assert [order.window(0, window).tolist() for window in range(3)] == [
        [18, 68, 105, 158],
        [41, 96, 122, 165],
        [15, 50, 141, 191],
    ]


def test_many_sources_with_equal_weights_share_every_window() -> None:
    order = staged(200, 100_000)
    counts = [len(order.window(0, window)) for window in range(10)]
    assert sum(counts) == pytest.approx(1_000, abs=5)
    assert min(counts) > 60, "100 on average"


def test_every_place_gets_every_value_about_equally_often() -> None:
    counts = np.zeros((5, 5), np.int64)
    for seed in range(1000):
        counts[np.arange(5), permute(np.arange(5), 5, derive_key(seed))] += 1
    assert counts.min() > 145
    assert counts.max() < 255


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    """Some sources, and phases that go on where the one before ended."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple))
    begins, phases = (0,) * len(sizes), []
    for _ in range(draw(st.integers(1, 3))):
        batches = draw(st.tuples(*(st.integers(0, 50) for _ in sizes)).filter(any))
        phases.append(MixturePhase(begins, batches, draw(st.integers(1, max(batches)))))
        begins = tuple(np.add(begins, batches).tolist())
    return EpochOrder(sizes, draw(st.integers(0, 9)), draw(st.booleans()), tuple(phases))


@pytest.mark.slow
@given(orders(), st.integers(0, 3))
def test_a_source_that_begins_again_gives_no_batch_twice_before_all_others_once_more(
    order: EpochOrder, epoch: int
) -> None:
    counts = [np.zeros(size, np.int64) for size in order.sizes]
    edges = np.append(0, np.cumsum(order.sizes))
    for window in range(order.num_windows):
        batches = order.window(epoch, window)
        for count, first, end in zip(counts, edges[:-1], edges[1:], strict=True):
            mine = batches[(batches >= first) & (batches < end)] - first
            count += np.bincount(mine, minlength=len(count))
            assert np.ptp(count) <= 1
    assert [count.sum() for count in counts] == list(order.batches_read)


def test_epochs_seeds_sources_and_turns_differ_and_no_shuffle_is_file_order() -> None:
    first = order_of_one(1000, 10, seed=0, shuffle=True)
    other = order_of_one(1000, 10, seed=1, shuffle=True)
    assert first.window(0, 3).tolist() != first.window(1, 3).tolist()
    assert first.window(0, 3).tolist() != other.window(0, 3).tolist()
    assert first.draw(0, 3) != first.draw(1, 3)
    assert first.draw(0, 3) != first.draw(0, 4)
    assert first.draw(0, 3) != other.draw(0, 3)
    plain = order_of_one(1000, 10, seed=0, shuffle=False)
    assert plain.window(4, 3).tolist() == list(range(300, 400))
    twice = EpochOrder((50, 50), 0, True, (MixturePhase((0, 0), (100, 50), 10),))
    windows = [twice.window(0, window) for window in range(10)]
    turn, again = (np.concatenate(part) for part in (windows[:5], windows[5:]))
    source = np.concatenate(windows)
    assert turn[turn < 50].tolist() != again[again < 50].tolist()
    assert turn[turn < 50].tolist() != (source[source >= 50] - 50).tolist()


@pytest.mark.slow
@given(
    size=st.integers(1, 120),
    data=st.data(),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 9),
    shuffle=st.booleans(),
)
def test_windows_hold_every_record_batch_once_and_one_of_every_stratum(
    size: int, data: st.DataObject, seed: int, epoch: int, shuffle: bool
) -> None:
    num_windows = data.draw(st.integers(1, size))
    order = order_of_one(size, num_windows, seed=seed, shuffle=shuffle)
    windows = [order.window(epoch, window) for window in range(num_windows)]
    assert sorted(np.concatenate(windows).tolist()) == list(range(size))
    counts = [len(window) for window in windows]
    assert max(counts) - min(counts) <= 1
    if shuffle:
        assert any(
            all(
                len(np.unique((window - offset) % size // num_windows)) == len(window)
                for window in windows
            )
            for offset in range(size)
        )


@pytest.mark.slow
def test_every_record_batch_comes_in_every_window_about_equally_often() -> None:
    counts = np.zeros((4, 14), np.int64)
    for seed in range(250):
        order = order_of_one(14, 4, seed=seed, shuffle=True)
        for window in range(4):
            counts[window, order.window(0, window)] += 1
    expected = 250 * np.array([[3], [4], [3], [4]]) / 14
    assert (abs(counts / expected - 1) < 0.35).all()


def test_a_stretch_of_more_windows_than_a_source_has_batches_takes_them_in_any_order() -> None:
    order = EpochOrder((100, 5), 0, True, (MixturePhase((0, 0), (100, 5), 20),))
    firsts = [
        [batch for window in range(20) for batch in order.window(epoch, window) if batch >= 100]
        for epoch in range(20)
    ]
    assert len({tuple(first) for first in firsts}) > 15


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_even_places_are_the_inverse_of_even_values(size: int, key: int) -> None:
    for reading in range(2):
        places = np.arange(reading * size, (reading + 1) * size)
        even = evenly(places, size, key)
        assert sorted(even.tolist()) == list(range(size))
        assert evenly_inverse(even, size, key, reading).tolist() == places.tolist()


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 2**64 - 1)), min_size=1, max_size=9))
def test_even_orders_of_several_sources_equal_the_order_of_each(
    sources: list[tuple[int, int]],
) -> None:
    sizes = np.array([size for size, _ in sources]).repeat(7)
    keys = np.array([key for _, key in sources], np.uint64).repeat(7)
    places = np.arange(len(sizes)) * 5
    together = evenly(places, sizes, keys)
    for nth, (size, key) in enumerate(sources):
        own = slice(7 * nth, 7 * nth + 7)
        assert together[own].tolist() == evenly(places[own], size, key).tolist()


def test_even_order_never_changes_between_releases() -> None:
    """Order is part of saved states: these values may only change with the state's version."""
    assert evenly(np.arange(38, 46), 40, key=1).tolist() == [20, 0, 0, 36, 21, 5, 3, 18]


@pytest.mark.parametrize("count", [26, 88, 130, 300, 900])
def test_any_places_in_a_row_lie_more_evenly_than_in_rounds(count: int) -> None:
    """The rounds have 34 windows of 88 batches. A window takes fewer, as many or more."""

    def deviation(orders: list[np.ndarray]) -> float:
        found = []
        for batches in orders:
            of_tenths = np.cumsum((batches * 10 // 3000)[:, None] == np.arange(10), axis=0)
            found.append(np.std(of_tenths[count:] - of_tenths[:-count]))
        return float(np.mean(found))

    even = deviation([evenly(np.arange(3000), 3000, key) for key in range(20)])
    rng, rounds = np.random.default_rng(0), []
    for seed in range(20):
        order = order_of_one(3000, 34, seed=seed, shuffle=True)
        rounds.append(np.concatenate([rng.permutation(order.window(0, n)) for n in range(34)]))
    assert even < 0.6 * deviation(rounds)


def test_values_that_are_near_in_one_reading_are_apart_in_the_next() -> None:
    """Of the pairs that share a run of 88 places, about as many as by chance share one again."""
    places = np.arange(3 * 3000)
    runs = np.empty((3, 3000), np.int64)
    runs[places // 3000, evenly(places, 3000, 5)] = places % 3000 // 88
    same = [(runs[n][:, None] == runs[n]) & ~np.eye(3000, dtype=np.bool_) for n in range(3)]
    again = [(same[n] & same[n + 1]).sum() / same[n].sum() for n in range(2)]
    assert max(again) < 1.5 * 88 / 3000
