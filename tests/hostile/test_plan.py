"""Plans of hostile data: sums that are obviously right, and limits of time and memory."""

import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from conftest import MakeDataset
from delivery import open_loader
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed import Fixed, Padded
from tokenfeed.pipeline.planning import bands
from tokenfeed.pipeline.planning.batching import plan_window
from tokenfeed.pipeline.planning.order import Draw, EpochOrder, Stretch, stream_key
from tokenfeed.pipeline.planning.policy import Batching

SHORT = np.clip(np.random.default_rng(0).lognormal(3.0, 0.6, 300_000), 1, 512).astype(np.int64)
DRAW = Draw(1, 2, 3, num_windows=1)


def seconds(what: Callable[[], object]) -> float:
    """Processor time of the fastest of three calls."""
    taken = []
    for _ in range(3):
        begin = time.process_time()
        what()
        taken.append(time.process_time() - begin)
    return min(taken)


def test_narrow_bands_of_very_many_rows_are_planned_as_fast_as_strict_order() -> None:
    """A band is found in time that does not grow with the window."""
    draw = replace(DRAW, num_windows=400)

    def plan(spread: float) -> object:
        return plan_window(SHORT, Fixed(8, spread=spread), gang_size=1, draw=draw)

    assert seconds(lambda: plan(0.033)) < 25 * seconds(lambda: plan(0))


def test_very_many_classes_take_no_memory_of_their_own() -> None:
    """Peak memory goes with the rows, not with classes times micro-batches."""
    labels = np.random.default_rng(1).permutation(20_000) * 100_000 - 10**9
    tracemalloc.start()
    plan_window(SHORT[:20_000], Fixed(8), gang_size=1, draw=DRAW, labels=labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


@given(st.data(), st.integers(1, 60), st.integers(1, 5))
def test_label_variance_is_that_of_its_definition(data: st.DataObject, count: int, g: int) -> None:
    label = np.array(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)))
    label = np.unique(label, return_inverse=True)[1]
    pieces = np.array(data.draw(st.permutations(range(count))))
    inner = data.draw(st.sets(st.integers(1, count - 1), max_size=9)) if count > 1 else set()
    edges = [0, *sorted(inner), count]
    share = [float((label == value).mean()) for value in range(label.max() + 1)]
    found = sum(
        (float((label[pieces[start:stop]] == value).mean()) - p) ** 2 * (stop - start)
        for start, stop in pairwise(edges)
        for value, p in enumerate(share)
    )
    expected = (len(edges) - 1) * sum(p * (1 - p) for p in share)
    ratio = found / expected if len(share) > 1 else 1.0
    said = bands._label_variance(label, pieces, np.array(edges), g)
    assert said == pytest.approx(1 + (ratio - 1) / g)


def test_a_tiny_source_that_is_repeated_thousands_of_times_is_planned_at_once() -> None:
    order = EpochOrder((200, 1), (Stretch((0, 0), (200, 40_000), 2),), seed=0, shuffle=True)
    assert seconds(lambda: order.window(0, 0)) < 0.5


@given(
    size=st.integers(1, 40),
    windows=st.integers(1, 9),
    turns=st.integers(1, 6),
    seed=st.integers(-(2**70), 2**70),
)
def test_every_reading_of_a_source_has_each_record_batch_once(
    size: int, windows: int, turns: int, seed: int
) -> None:
    windows = min(windows, size * turns)
    order = EpochOrder((size,), (Stretch((0,), (size * turns,), windows),), seed, shuffle=True)
    places = [order._batches(0, 3, n * size, (n + 1) * size).tolist() for n in range(turns)]
    assert all(sorted(reading) == list(range(size)) for reading in places)
    delivered = Counter(b for w in range(windows) for b in order.window(3, w).tolist())
    assert set(delivered.values()) == {turns}
    assert stream_key(seed, 3) != stream_key(seed, 4)


@pytest.mark.parametrize(
    "batching", [Padded(2048, spread=1), Padded(2048, spread=0.3), Fixed(8, spread=0.5)]
)
def test_the_estimate_knows_what_bands_pad(make_dataset: MakeDataset, batching: Batching) -> None:
    lengths = np.clip(np.random.default_rng(3).lognormal(4, 0.7, 3_000), 1, 512).astype(int)
    with open_loader(make_dataset(lengths), batching, window_tokens=10**9) as loader:
        assert loader.estimated_batches == pytest.approx(len(loader), rel=0.1)
