"""What is said of mixing is about what comes of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.data_sets import order_of_one, rows_of, source_of

from tokenfeed import Fixed, Padded, ShardLoader
from tokenfeed.pipeline.planning.estimates import STEP_TOKENS, deviation, unmixed


def plan_of(source: Any, places: int, *, shuffle: bool = True) -> Any:
    """A plan whose windows have so many record batches."""
    windows = max(1, source.batches // places)
    return SimpleNamespace(order=order_of_one(source.batches, windows, seed=0, shuffle=shuffle))


def strayed(lengths: np.ndarray, plan: Any) -> float:
    """The same as `deviation`, measured: rows of a window in random order, in steps."""
    rng = np.random.default_rng(1)
    ends = np.cumsum(lengths)
    tenth = (ends - lengths) * 10 // ends[-1]
    batch = (ends - lengths) * plan.order.sources[0].batches // ends[-1]
    first = np.searchsorted(batch, np.arange(plan.order.sources[0].batches + 1))

    def shares(order: np.ndarray) -> np.ndarray:
        step = (np.cumsum(lengths[order]) // STEP_TOKENS)[:-1]
        tokens = np.bincount(step * 10 + tenth[order][:-1], lengths[order][:-1])
        return tokens[: step[-1] * 10].reshape(-1, 10).T / STEP_TOKENS

    parts = []
    for window in range(plan.order.num_windows):
        rows = [np.arange(first[b], first[b + 1]) for b in plan.order.window(0, window)]
        parts.append(rng.permutation(np.concatenate(rows)))
    ours, full = shares(np.concatenate(parts)), shares(rng.permutation(len(lengths)))
    return float((ours.std(axis=1).mean()) / full.std(axis=1).mean())


SHORT = pytest.param(24, 0.6, 40, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mean", "spread", "places"), [*((600, 1.0, places) for places in (12, 40, 128)), SHORT]
)
def test_the_estimate_is_about_what_is_measured(mean: float, spread: float, places: int) -> None:
    lengths = rows_of(mean, spread)
    source = source_of(lengths)
    plan = plan_of(source, places)
    said = deviation(plan, (source,))
    assert said is not None
    assert strayed(lengths, plan) == pytest.approx(said, rel=0.35)


def test_more_places_mix_better_and_one_window_is_a_full_shuffle() -> None:
    source = source_of(rows_of(600, 1.0))
    said = [deviation(plan_of(source, places), (source,)) for places in (4, 16, 64, 256, 10_000)]
    assert said == sorted(said, reverse=True)  # type: ignore[type-var]
    assert said[-1] == 1.0
    assert deviation(plan_of(source, 16, shuffle=False), (source,)) is None


def test_a_large_epoch_far_from_mixed_is_warned_of_with_the_remedy() -> None:
    source = source_of(rows_of(600, 1.0))
    warning = unmixed(plan_of(source, 2), (source,))
    assert warning is not None
    assert "from only 2 places" in warning
    assert "Raise `window_tokens`" in warning
    assert unmixed(plan_of(source, 128), (source,)) is None
    small = source_of(rows_of(600, 1.0)[:10_000])
    assert unmixed(plan_of(small, 2), (small,)) is None


def test_the_loader_says_how_far_rows_are_mixed(make_dataset: Any) -> None:
    folder = make_dataset([100] * 400, num_shards=4)
    with ShardLoader(folder, batching=Padded(1000), num_workers=0) as loader:
        assert loader.stats().mixing == 1.0
    with ShardLoader(folder, batching=Fixed(4), num_workers=0, window_tokens=10_000) as loader:
        mixing = loader.stats().mixing
    assert mixing is not None
    assert mixing > 5  # a window is one of four record batches
    with ShardLoader(folder, batching=Fixed(4), num_workers=0, shuffle=False) as loader:
        assert loader.stats().mixing is None
