"""Plans of hostile data: sums that are obviously right, and limits of time and memory."""

import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.data_sets import (
    VOCABULARY_SIZE,
    MakeDataset,
    random_rows,
    rows_of,
    source_of,
    write_rows,
)
from support.delivery import POLICIES, Ranks, joined, open_loader, small_batches, times_delivered

from tokenfeed import Fixed, Mixture, Padded
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.batching import plan_window
from tokenfeed.pipeline.planning.estimates import deviation, unmixed
from tokenfeed.pipeline.planning.mixture import proportions
from tokenfeed.pipeline.planning.plan import default_window_tokens
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.planning.schedule import Draw, Schedule, Source, Stretch

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
        return plan_window(SHORT, Fixed(8, spread=spread), step_size=1, draw=draw)

    assert seconds(lambda: plan(0.033)) < 25 * seconds(lambda: plan(0))


def test_default_window_of_stages_has_few_rows_where_rows_are_tiny() -> None:
    tiny = source_of(np.full(1_000_000, 3))
    policy = Padded(65_536)
    sizes = [
        default_window_tokens([tiny], [1.0], policy, 64, is_staged=is_staged)
        for is_staged in (False, True)
    ]
    assert sizes == [1 << 25, 3 * 1_600_000], "a plan without stages stays as it is"


def test_very_many_classes_take_no_memory_of_their_own() -> None:
    """Peak memory goes with the rows, not with classes times micro-batches."""
    labels = np.random.default_rng(1).permutation(20_000) * 100_000 - 10**9
    tracemalloc.start()
    plan_window(SHORT[:20_000], Fixed(8), step_size=1, draw=DRAW, labels=labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_a_tiny_source_that_is_repeated_thousands_of_times_is_planned_at_once() -> None:
    sources = (Source(200, 200), Source(1, 1))
    epoch = Stretch.of_epoch(sources, [Fraction(1), Fraction(200)], 20_100, "repeat")
    order = Schedule(sources, (epoch,), 0, shuffle=True)
    assert order.batches_read == (200, 40_000)
    assert seconds(lambda: order.window(0, 0)) < 0.5


def mixed(sources: tuple[Any, ...], weights: tuple[float, ...], exhausted: Any = "repeat") -> Any:
    """A plan over sources of which only the sizes are known."""
    sizes = tuple(Source(source.batches, source.tokens) for source in sources)
    epoch = Stretch.of_epoch(sizes, proportions(weights), 8 << 20, exhausted)
    return SimpleNamespace(order=Schedule(sizes, (epoch,), 0, shuffle=True))


def test_the_warning_names_the_source_and_its_places() -> None:
    documents, short = source_of(rows_of(600, 1.0)), source_of(rows_of(24, 0.6))
    short.name = "tweets"
    warning = unmixed(mixed((documents, short), (0.89, 0.11)), (documents, short))
    assert warning is not None
    assert "\n" not in warning
    assert "from only 14 places of tweets" in warning


def test_what_comes_all_or_not_at_all_strays_no_further_than_that() -> None:
    few, many = source_of(rows_of(600, 1.0)[:200]), source_of(rows_of(600, 1.0))
    said = deviation(mixed((many, few), (1.0, 1.0), "continue"), (many, few))
    assert said is not None
    assert said < 3


HOSTILE = {
    "one row": [7],
    "all of one length": [9] * 80,
    "one very long": [*[5] * 60, 4_000],
    "many lengths": np.random.default_rng(4).integers(1, 700, 60).tolist(),
}
WIDE: list[Batching] = [
    *POLICIES,
    Padded(1024, multiple_of=8, spread=1),
    Padded(1024, spread=5e-324),
    Fixed(7, spread=0.4),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", HOSTILE)
def test_len_holds_in_every_epoch_and_every_token_comes_once_in_each(
    shape: str, make_dataset: MakeDataset
) -> None:
    """Over more epochs than a cycle of bands has, at several step sizes and ranks."""
    lengths = np.array(HOSTILE[shape])
    folder = make_dataset(lengths, num_shards=1)
    for number, batching in enumerate(WIDE):
        world, step = 1 + number % 5, 1 + number % 4
        options: dict[str, Any] = {
            "micro_batches_per_step": step,
            "seed": number,
            "window_tokens": 10**9,
        }
        run = Ranks(folder, world, batching=batching, epochs=10, **options)
        ours = open_loader(folder, batching, epochs=10, rank=0, world_size=world, **options)
        due = len(ours)
        run.run()
        assert run.loaders[0].stats().batches == due
        assert times_delivered((s for g in run.steps for b in g for s in b), lengths) == {10}
        for batch in (b for step in run.steps for b in step):
            longest = max(length for _, _, length in batch)
            if isinstance(batching, Padded):
                assert len(batch) <= batching.rows_of(longest)


@pytest.mark.parametrize("values", [(0,), (-1, 2**31 - 1), (-(2**31), 5, 7), range(300)])
def test_len_holds_whatever_the_labels_are(values: Any, tmp_path: Path) -> None:
    """Labels of one class, of as many as rows, and such as no manifest has names for."""
    lengths = np.sort(np.random.default_rng(5).integers(1, 80, 300))
    rows = random_rows(lengths, "classify")
    labels = np.sort(np.resize(np.array(values), 300))
    rows.per_row["label"] = labels.astype(np.int32)
    folder = write_rows(tmp_path / "set", {"train": rows}, VOCABULARY_SIZE, 1, task="classify")
    for batching in (Padded(512), Fixed(8), Fixed(4, spread=0), Padded(512, spread=1)):
        with open_loader(folder, batching, epochs=9) as loader:
            due, seen, ends = len(loader), [], []
            for batch in loader:
                seen += list(zip(batch.rows.tolist(), batch["labels"].tolist(), strict=True))
                ends.append(batch.num_slots if isinstance(batching, Padded) else 0)
        assert len(ends) == due
        assert max(ends) <= 512
        assert Counter(seen) == {(row, int(label)): 9 for row, label in enumerate(labels)}


@pytest.mark.slow
@pytest.mark.parametrize("exhausted", ["repeat", "stop", "continue"])
def test_a_mixture_with_bands_is_resumed_anywhere_on_any_ranks(
    exhausted: Any, make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_batches(monkeypatch)
    rng = np.random.default_rng(6)
    folders = [make_dataset(rng.integers(1, 200, count), 1) for count in (6, 300, 80)]
    mixture = Mixture(dict(zip(folders, (0.02, 0.7, 0.2), strict=True)), exhausted)
    for batching in (Padded(1024, spread=0.3), Fixed(8, spread=0.2)):
        options: dict[str, Any] = {
            "batching": batching,
            "micro_batches_per_step": 3,
            "window_tokens": 6_000,
        }
        whole = Ranks(mixture, 1, **options)  # type: ignore[arg-type]
        end = whole.run()
        cuts: list[Ranks] = []
        state: Any = None
        for world in (1, 2, 3, 5, 4):
            cuts.append(Ranks(mixture, world, state, **options))  # type: ignore[arg-type]
            state = cuts[-1].run(None if world == 4 else 2)
        assert joined(cuts) == joined([whole])
        assert state == end


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -1e-9, 1.01, "0.1", None, True, np.array([0.1]), 10**400],
    ids=lambda value: str(value)[:9],
)
def test_a_spread_that_is_no_share_is_refused_in_one_line(value: Any) -> None:
    for make in (lambda: Padded(64, spread=value), lambda: Fixed(4, spread=value)):
        with pytest.raises(ConfigError, match="`spread`="):
            make()
