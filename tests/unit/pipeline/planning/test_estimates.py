"""The number of batches is estimated within a tenth, whatever the lengths and the policy are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.delivery import MakeDataset, open_loader, realistic_lengths

from tokenfeed import Fixed, Mixture, Packed, Padded, ShardLoader
from tokenfeed.pipeline.format.manifest import SplitInfo, length_histogram
from tokenfeed.pipeline.planning.estimates import likely_lengths
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Batching

RNG = np.random.default_rng(0)


def lognormal(mean: float, width: float, longest: int, count: int = 1500) -> np.ndarray:
    return np.clip(RNG.lognormal(mean, width, count), 1, longest).astype(int)


LENGTHS: dict[str, np.ndarray] = {
    "texts": realistic_lengths(3000),
    "reviews": lognormal(6.6, 0.45, 3000),
    "reviews of one size": lognormal(6.9, 0.25, 2500),
    "documents": lognormal(6.0, 0.9, 8000),
    "lines": lognormal(2.4, 0.5, 200),
    "cut at 512": lognormal(5.5, 1.0, 512),
    "all 128": np.full(1500, 128),
    "all 1000": np.full(1500, 1000),
    "short and long": np.append(np.full(900, 40), np.full(900, 900)),
    "uniform": RNG.integers(1, 2001, 1500),
    "bell": RNG.normal(600, 80, 1500).astype(int),
}
POLICIES: list[Batching] = [
    *(Padded(700), Padded(2048, 64), Padded(4096)),
    *(Packed(1024, 4), Packed(512, 1, split=True), Fixed(6)),
]


def exact(loader: ShardLoader) -> int:
    """Batches of an epoch, by planning every window of it."""
    maker, windows = loader._window_maker(loader._plan), loader.state_dict()["plan"]["windows"]
    return sum(maker.make(Position(0, window, 0)).num_batches for window in range(windows))


def check(loader: ShardLoader) -> None:
    expected = exact(loader)
    estimated = loader.estimated_batches / (loader.epochs or 1)
    assert abs(estimated - expected) <= max(1, expected / 10)


@pytest.mark.parametrize("name", LENGTHS)
def test_batches_of_every_policy_are_counted_within_a_tenth(
    make_dataset: MakeDataset, name: str
) -> None:
    folder = make_dataset(LENGTHS[name])
    for batching in POLICIES:
        check(open_loader(folder, batching, window_tokens=None))


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 1, "world_size": 3},
        {"rank": 0, "world_size": 4, "micro_batches_per_step": 2},
        {"micro_batches_per_step": 8},
        {"epochs": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["reviews", "documents", "bell"])
def test_ranks_steps_and_windows_are_counted(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 20_000)
    options = {"window_tokens": 200_000} | options
    check(open_loader(make_dataset(LENGTHS[name]), Padded(2048), **options))


@pytest.mark.parametrize("exhausted", ["repeat", "stop", "continue"])
def test_a_mixture_is_counted_by_what_is_read_of_each_source(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, exhausted: Any
) -> None:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 20_000)
    folders: dict[str | Path, float] = {
        make_dataset(LENGTHS["reviews"]): 0.7,
        make_dataset(LENGTHS["texts"]): 0.3,
    }
    mixture = Mixture(folders, exhausted)
    check(ShardLoader(mixture, batching=Padded(2048), num_workers=0))


def split_of(lengths: np.ndarray) -> SplitInfo:
    shard: Any = type("Shard", (), {})()
    shard.rows, shard.tokens = len(lengths), int(lengths.sum())
    shard.batches, shard.longest_row = 1, int(lengths.max())
    histogram = tuple(length_histogram(lengths).tolist())
    return SplitInfo(shards=(shard,), length_histogram=histogram)


@pytest.mark.parametrize("name", [*LENGTHS, "one row", "rows of one"])
def test_likely_lengths_have_the_histogram_and_the_tokens_of_the_split(name: str) -> None:
    lengths = (LENGTHS | {"one row": np.array([7]), "rows of one": np.ones(9, int)})[name]
    made = likely_lengths(split_of(lengths), len(lengths))
    assert length_histogram(made).tolist() == length_histogram(lengths).tolist()
    assert made.max() <= lengths.max()
    assert made.sum() == pytest.approx(lengths.sum(), rel=0.01)
    assert (np.diff(made) >= 0).all()
