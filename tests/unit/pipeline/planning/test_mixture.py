"""A mixture keeps its proportions, whatever the sizes, weights and policy."""

import dataclasses
import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import VOCABULARY_SIZE, random_rows, rows_of_ids, write_rows

from tokenfeed import ShardLoader, Stage
from tokenfeed.pipeline.errors import ConfigError, ManifestError, ResumeError
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.format.schema import task_columns
from tokenfeed.pipeline.format.store import LocalStore
from tokenfeed.pipeline.planning.mixture import Exhausted, Mixture, mix
from tokenfeed.pipeline.planning.order import EpochOrder
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.policies import Padded
from tokenfeed.pipeline.windows.reader import WindowReader

EXHAUSTED: tuple[Exhausted, ...] = ("repeat", "stop", "continue")
WEIGHTS = st.sampled_from([0.3, 0.5, 0.7, 1.0]) | st.floats(0.5, 3)


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A mixture of sources of which only the sizes are known."""

    sources: tuple[OpenedSplit, ...]
    weights: tuple[float, ...]
    exhausted: Exhausted
    window_tokens: int

    @property
    def order(self) -> EpochOrder:
        phases = mix(self.sources, self.weights, self.exhausted, self.window_tokens)
        return EpochOrder(tuple(s.batches for s in self.sources), 0, True, phases)

    def ideal(self) -> list[Fraction]:
        """Record batches of each source in an epoch of exact proportions."""
        pairs = list(zip(self.sources, map(Fraction, map(str, self.weights)), strict=True))
        durations = [source.tokens / weight for source, weight in pairs]
        end = min(durations) if self.exhausted == "stop" else max(durations)
        return [end * weight * source.batches / source.tokens for source, weight in pairs]


def sized(batches: int, tokens_per_batch: int, spare: int) -> OpenedSplit:
    unknown: Any = None
    tokens = batches * tokens_per_batch + spare
    return OpenedSplit(LocalStore.from_path("memory"), unknown, unknown, batches, tokens, batches)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixed:
    sizes = st.builds(sized, st.integers(1, 12), st.integers(10, 40), st.integers(0, 9))
    sources = draw(st.lists(sizes, min_size=1, max_size=4).map(tuple))
    weights = draw(st.tuples(*[WEIGHTS] * len(sources)))
    exhausted = draw(st.sampled_from(EXHAUSTED))
    return Mixed(sources, weights, exhausted, draw(st.integers(30, 1000)))


def counts(order: EpochOrder, epoch: int = 0) -> list[np.ndarray]:
    """How often an epoch delivers each record batch, source by source."""
    seen = np.concatenate([order.window(epoch, window) for window in range(order.num_windows)])
    return np.split(np.bincount(seen, minlength=sum(order.sizes)), np.cumsum(order.sizes)[:-1])


def given_by(order: EpochOrder) -> np.ndarray:
    """Record batches of each source in each window, (windows, sources)."""
    edges = np.append(0, np.cumsum(order.sizes))
    windows = [order.window(1, window) for window in range(order.num_windows)]
    return np.array([np.histogram(window, edges)[0] for window in windows])


@pytest.mark.slow
@given(mixtures(), st.integers(0, 3))
def test_epoch_delivers_record_batches_as_often_as_exhausted_says(mixed: Mixed, epoch: int) -> None:
    delivered = counts(mixed.order, epoch)
    everything = np.concatenate(delivered)
    if mixed.exhausted == "continue":
        assert set(everything.tolist()) == {1}
    elif mixed.exhausted == "stop":
        assert everything.max() == 1
        assert any(source.min() == 1 for source in delivered)
    else:
        assert everything.min() >= 1
        assert any(source.max() == 1 for source in delivered)
        assert all(np.ptp(source) <= 1 for source in delivered)


@pytest.mark.slow
@given(mixtures())
def test_windows_keep_the_proportions_within_one_record_batch(mixed: Mixed) -> None:
    order, windows = mixed.order, given_by(mixed.order)
    assert windows.sum(axis=1).min() >= 1
    for phase in order.phases:
        sizes = zip(phase.batches, mixed.sources, strict=True)
        tokens = sum(batches * source.tokens / source.batches for batches, source in sizes)
        wanted = max(1, round(tokens / mixed.window_tokens))
        assert phase.num_windows == min(wanted, max(phase.batches))
    # with "continue", the sources keep the proportions while all of them run
    first = windows[: order.phases[0].num_windows]
    if mixed.exhausted == "continue":
        mixed = dataclasses.replace(mixed, exhausted="stop")
    for ideal, batches in zip(mixed.ideal(), first.sum(axis=0).tolist(), strict=True):
        assert ideal - 1 < batches <= ideal
    so_far = np.cumsum(first, axis=0)
    parts = np.arange(1, len(first) + 1)[:, None] / len(first)
    assert np.abs(so_far - parts * so_far[-1]).max() < 1


def write(folder: Path, **settings: Any) -> Path:
    settings = {"vocabulary_size": VOCABULARY_SIZE, "split": "train", "rows": 3} | settings
    task, lengths = settings.pop("task", "lm"), np.full(settings.pop("rows"), 5)
    columns = task_columns(task, pairs=settings.pop("pairs", False))
    rows = random_rows(lengths, task, pairs=len(columns) > len(task_columns(task)))
    splits = {settings.pop("split"): rows}
    return write_rows(folder, splits, task=task, columns=columns, **settings)


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (
            {},
            {"tokenizer": b"another"},
            "one tokenizer.*--tokenizer .*/left/tokenizer` on",
        ),
        ({}, {"vocabulary_size": 1001}, "one vocabulary size.*1000.*1001"),
        ({}, {"task": "classify"}, "one task.*lm.*classify"),
        ({}, {"pairs": True}, r"one columns.*\[\].*token_type_ids"),
        (
            {"task": "tag", "label_names": ("a", "b")},
            {"task": "tag", "label_names": ("b", "a")},
            "one label names.*'a', 'b'.*'b', 'a'",
        ),
    ],
)
def test_sources_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, first: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    left, right = write(tmp_path / "left", **first), write(tmp_path / "right", **other)
    with pytest.raises(ConfigError, match=message) as error:
        open_splits({left: 1, right: 1}, "train")
    assert str(left) in str(error.value)
    assert str(right) in str(error.value)
    assert len(open_splits({left: 1}, "train")) == 1


def test_a_source_without_rows_is_refused_by_name(tmp_path: Path) -> None:
    full, empty = write(tmp_path / "full"), write(tmp_path / "empty", rows=0)
    other = write(tmp_path / "other", split="validation")
    with pytest.raises(ConfigError, match=r"empty: the split `train` holds no rows"):
        open_splits({full: 1, empty: 1}, "train")
    with pytest.raises(ManifestError, match="nowhere"):
        open_splits({full: 1, tmp_path / "nowhere": 1}, "train")
    with pytest.raises(ManifestError, match=r"other.*`train`"):
        open_splits({full: 1, other: 1}, "train")


def test_record_batches_of_a_mixture_are_read_from_their_own_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 20)
    rows = [random_rows(np.full(count, 5)) for count in (7, 9, 30)]
    folders = [
        write_rows(tmp_path / f"{n}", {"train": part}, VOCABULARY_SIZE, num_shards=2)
        for n, part in enumerate(rows)
    ]
    sources = open_splits(folders, "train")
    assert [source.rows for source in sources] == [7, 9, 30]
    reader = WindowReader(sources)
    order = np.random.default_rng(0).permutation(sum(source.batches for source in sources))
    window = reader.read(order)
    assert sorted(window.numbers.tolist()) == list(range(46))
    ids = np.concatenate([part.ids.reshape(-1, 5) for part in rows])
    assert np.array_equal(window.rows.ids.reshape(-1, 5), ids[window.numbers])


def test_a_plan_knows_the_tokens_of_sources_that_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 10)
    folders = [write(tmp_path / "small", rows=2), write(tmp_path / "large", rows=6)]

    def tokens(exhausted: Exhausted) -> tuple[int | None, ...]:
        mixture = Mixture({folders[0]: 2, folders[1]: 3}, exhausted)
        plan = Plan.from_splits(
            open_splits(folders, "train"),
            mixture,
            Padded(100),
            split="train",
            micro_batches_per_step=1,
            window_tokens=None,
            seed=0,
            shuffle=True,
        )
        return plan.epoch_tokens

    assert tokens("continue") == (10, 30)
    assert tokens("repeat") == (20, 30)
    assert tokens("stop") == (10, None)


def test_sources_of_equal_content_are_refused(tmp_path: Path) -> None:
    """A plan knows a source by its content, so `skip` of one would not reach the other."""
    folders = [write(tmp_path / name) for name in ("a", "copy")]
    with pytest.raises(ConfigError, match=r"copy have the same content: use one of them"):
        ShardLoader(Mixture({str(each): 1 for each in folders}), batching=Padded(64), num_workers=0)


def test_seed_beyond_the_state_of_stages_is_refused_at_the_start(tmp_path: Path) -> None:
    stages = [Stage({str(write(tmp_path / "a")): 1})]
    ShardLoader(stages, batching=Padded(64), num_workers=0, seed=2**64 - 1).state_dict()
    with pytest.raises(ConfigError, match="`seed`=18446744073709551616: expected 64 bits at most"):
        ShardLoader(stages, batching=Padded(64), num_workers=0, seed=2**64)


def test_mixture_of_many_data_sets_has_a_small_state(tmp_path: Path) -> None:
    """With "continue", each of 110 data sets ends in a phase of its own."""
    folders = [
        write_rows(
            tmp_path / str(number),
            {"train": rows_of_ids(np.full(number + 1, number), np.ones(number + 1), 1000)},
            1000,
        )
        for number in range(110)
    ]
    weights = {str(folder): 1.0 for folder in folders}

    def loader(weights: dict[str, float]) -> ShardLoader:
        mixture = Mixture(weights, exhausted="continue")
        return ShardLoader(mixture, batching=Padded(64), num_workers=0, window_tokens=400)

    first = loader(weights)
    batches = iter(first)
    next(batches)
    state = json.dumps(first.state_dict())
    assert len(state) < 10_000, "all phases take 30,000 and more"
    second = loader(weights)
    second.load_state_dict(json.loads(state))
    rest = [batch.rows.tolist() for batch in batches]
    assert [batch.rows.tolist() for batch in second] == rest
    with pytest.raises(ResumeError, match="cannot resume: the state was saved with weights="):
        loader(weights | {str(folders[0]): 2.0}).load_state_dict(json.loads(state))


def test_mixture_of_many_data_sets_is_planned_within_seconds() -> None:
    sources = tuple(sized(5 + number % 90, 1000, number) for number in range(500))
    weights = tuple(1 + number / 7 for number in range(500))
    started = time.process_time()
    phases = mix(sources, weights, "continue", 1 << 20)
    assert time.process_time() - started < 4, "20 s before"
    given = np.sum([phase.batches for phase in phases], axis=0)
    assert given.tolist() == [source.batches for source in sources]
