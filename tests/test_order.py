"""Order is a permutation, the same everywhere, whatever the size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.order import EpochOrder, permute, stream_key


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


def test_permute_never_changes_between_releases() -> None:
    """Order is part of saved states: these values may only change with the state's version."""
    assert permute(np.arange(10), 10, 1).tolist() == [1, 0, 8, 4, 6, 3, 7, 9, 5, 2]
    assert stream_key(1, 2, 3) == 7702586659592502839


def test_every_place_gets_every_value_about_equally_often() -> None:
    counts = np.zeros((5, 5), np.int64)
    for seed in range(2000):
        counts[np.arange(5), permute(np.arange(5), 5, stream_key(seed))] += 1
    assert counts.min() > 310
    assert counts.max() < 490


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
    order = EpochOrder(num_batches, num_windows, seed=7, shuffle=shuffle)
    windows = [order.window(epoch, window) for window in range(num_windows)]
    assert sorted(np.concatenate(windows).tolist()) == list(range(num_batches))
    sizes = [len(window) for window in windows]
    assert max(sizes) - min(sizes) <= 1


def test_epochs_and_seeds_differ_and_no_shuffle_is_file_order() -> None:
    first = EpochOrder(1000, 10, seed=0, shuffle=True)
    other = EpochOrder(1000, 10, seed=1, shuffle=True)
    assert first.window(0, 3).tolist() != first.window(1, 3).tolist()
    assert first.window(0, 3).tolist() != other.window(0, 3).tolist()
    assert first.window_key(0, 3) != first.window_key(1, 3)
    plain = EpochOrder(1000, 10, seed=0, shuffle=False)
    assert plain.window(4, 3).tolist() == list(range(300, 400))
