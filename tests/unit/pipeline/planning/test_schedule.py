"""The one order, against all places listed one by one: epochs, mixtures, and edited stages."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import order_of_one

from benchmarks.shuffle.metrics import five_readings, met_again
from tokenfeed import Fixed
from tokenfeed.pipeline.planning.permutation import derive_key, evenly, permute
from tokenfeed.pipeline.planning.schedule import Exhausted, Schedule, Source, Stretch
from tokenfeed.pipeline.planning.stages import (
    History,
    PlannedStage,
    SavedStage,
    data_of,
    planned_stages,
    saved_stages,
)

EXHAUSTED: tuple[Exhausted, ...] = ("repeat", "stop", "continue")
WEIGHTS = (1, 2, 3, 0.5, 0.1)
Sizes = dict[str, list[int]]
"""Tokens of every record batch of each data set."""
Windows = list[dict[str, list[int]]]
"""The record batches of each data set in each window."""


def draw_sizes(chance: random.Random) -> Sizes:
    """Some data sets. A document of a hundred times the mean makes a record batch large."""
    return {
        f"{n:016x}": [
            chance.randint(5, 30) * (100 if chance.random() < 0.03 else 1)
            for _ in range(chance.randint(1, 40))
        ]
        for n in range(chance.randint(1, 4))
    }


def draw_stages(chance: random.Random, sizes: Sizes, begins: int) -> list[PlannedStage]:
    """One to three stages, from some token of the run on."""
    found: list[PlannedStage] = []
    for _ in range(chance.randint(1, 3)):
        some = chance.sample([*sizes], chance.randint(1, len(sizes)))
        weights = {data: chance.choice(WEIGHTS) for data in some}
        stage = PlannedStage(begins, None, 1, weights, Fixed(4))
        least = stage.least_tokens({data: size_of(of) for data, of in sizes.items()})
        window = 2 * least + chance.randint(0, 200)
        until = begins + window * chance.randint(1, 6) + chance.randint(0, window)
        found.append(replace(stage, until=until, window_tokens=window))
        begins = until
    return found


def size_of(tokens: list[int]) -> Source:
    return Source(len(tokens), sum(tokens))


def schedule_of(stages: Sequence[PlannedStage], sizes: Sizes, data: Sequence[str]) -> Schedule:
    sources = tuple(size_of(sizes[each]) for each in data)
    numbers = {each: number for number, each in enumerate(data)}
    stretches = tuple(stage.stretch(sources, numbers) for stage in stages)
    return Schedule(sources, stretches, 7, shuffle=True)


def listed(order: Schedule, data: Sequence[str], windows: range, epoch: int = 0) -> Windows:
    """All places of some windows, written out."""
    starts = np.cumsum([0, *(source.batches for source in order.sources)])
    found: Windows = []
    for window in windows:
        batches = order.window(epoch, window)
        assert len(batches), "a window without a record batch"
        of = np.searchsorted(starts, batches, side="right") - 1
        found.append({each: (batches[of == n] - starts[n]).tolist() for n, each in enumerate(data)})
    return found


def check(windows: Windows, dues: Iterator[dict[str, Fraction]], sizes: Sizes) -> None:
    """After each window: no record batch came twice more often than another one of its source, and
    each source has its share in tokens, exact to a record batch. Each counts as the average, so
    large ones may add what they have beyond it until the source is read to its end."""
    counts = {data: np.zeros(len(tokens), np.int64) for data, tokens in sizes.items()}
    for window, due in zip(windows, dues, strict=True):
        for data, batches in window.items():
            np.add.at(counts[data], batches, 1)
            assert np.ptp(counts[data]) <= 1
            mean = Fraction(sum(sizes[data]), len(sizes[data]))
            beyond = sum(max(0, tokens - mean) for tokens in sizes[data])
            assert abs(counts[data].sum() * mean - due.get(data, 0)) < mean
            assert abs(int(counts[data] @ sizes[data]) - due.get(data, 0)) < mean + beyond


def dues_of(stages: Sequence[PlannedStage]) -> Iterator[dict[str, Fraction]]:
    """The tokens of each data set at the end of every window."""
    given = dict.fromkeys(data_of(stages), Fraction(0))
    for stage in stages:
        weights = {data: Fraction(str(weight)) for data, weight in stage.weights.items()}
        for nth in range(1, stage.num_windows + 1):
            passed = Fraction(stage.edge(nth) - stage.edge(nth - 1), sum(weights.values()))
            for data, weight in weights.items():
                given[data] += weight * passed
            yield given


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_stages_that_were_edited_and_resumed_three_times(part: int) -> None:
    """1,000 lists in all. The past stays as it was delivered, and rows and shares are right."""
    for case in range(250 * part, 250 * part + 250):
        chance = random.Random(case)
        sizes = draw_sizes(chance)
        stages: Sequence[PlannedStage] = draw_stages(chance, sizes, 0)
        data, past = [*dict.fromkeys((*data_of(stages), *sizes))], list[dict[str, list[int]]]()
        for _ in range(3):
            order = schedule_of(stages, sizes, data)
            begun = chance.randint(len(past), order.num_windows)
            past += listed(order, data, range(len(past), begun))
            saved = json.dumps(msgspec.to_builtins(saved_stages(stages)), sort_keys=True)
            stages = planned_stages(msgspec.json.decode(saved, type=list[SavedStage]), data)
            history = History.of(stages, data, begun)
            future = draw_stages(chance, sizes, history.stop)
            under_way = [stage for stage in stages if (stage.until or 0) > history.stop]
            if under_way and chance.random() < 0.5:
                longer = future[-1].until
                future = [replace(under_way[0], until=max(under_way[0].until or 0, longer or 0))]
            stages = history.then(future)
            history.check(stages, {}, sizes)
            met = *history.data, *data_of(stages)
            data = [*dict.fromkeys((*met, *chance.sample(data, len(data))))]
        order = schedule_of(stages, sizes, data)
        windows = listed(order, data, range(order.num_windows))
        assert windows[: len(past)] == [{each: w[each] for each in data} for w in past]
        check(windows, dues_of(stages), sizes)


def epoch_dues(
    sizes: Sizes, weights: dict[str, float], order: Schedule, exhausted: Exhausted
) -> Iterator[dict[str, Fraction]]:
    """The tokens of each data set at the end of every window of an epoch, source by source."""
    given, exact = (
        dict.fromkeys(sizes, Fraction(0)),
        {d: Fraction(str(w)) for d, w in weights.items()},
    )
    for _ in range(order.num_windows):
        left = order.stretches[0].tokens / order.num_windows
        while left:
            alive = [d for d in sizes if exhausted != "continue" or given[d] < sum(sizes[d])]
            whole = sum(exact[each] for each in alive)
            ends = [(sum(sizes[each]) - given[each]) * whole / exact[each] for each in alive]
            part = min([left, *ends]) if exhausted == "continue" else left
            for each in alive:
                given[each] += part * exact[each] / whole
            left -= part
        yield given


@pytest.mark.parametrize("exhausted", EXHAUSTED)
def test_epochs_of_mixtures(exhausted: Exhausted) -> None:
    for case in range(150):
        chance = random.Random(case)
        sizes = draw_sizes(chance)
        weights: dict[str, float] = {data: chance.choice(WEIGHTS) for data in sizes}
        sources = tuple(map(size_of, sizes.values()))
        exact = [Fraction(str(weight)) for weight in weights.values()]
        epoch = Stretch.of_epoch(sources, exact, chance.randint(20, 3000), exhausted)
        order = Schedule(sources, (epoch,), case, shuffle=True)
        if order.num_windows > 60:  # a small source with a large weight is read very often
            continue
        for number in range(2):
            windows = listed(order, [*sizes], range(order.num_windows), number)
            check(windows, epoch_dues(sizes, weights, order, exhausted), sizes)
            read = [sum(len(window[data]) for window in windows) for data in sizes]
            assert read == list(order.batches_read)
            times = [some / source.batches for some, source in zip(read, sources, strict=True)]
            if exhausted == "continue" or len(sizes) == 1:
                assert set(times) == {1}
            else:
                assert (max if exhausted == "stop" else min)(times) == 1


@pytest.mark.parametrize(("size", "windows"), [(600, 6), (2000, 16), (3000, 24)])
def test_record_batches_meet_again_as_often_as_by_chance(size: int, windows: int) -> None:
    """Five readings, six seeds: within three standard errors of chance, and near it."""
    sources = (Source(size, size * 100),)
    tokens = size * 100 // windows
    stage = Stretch.of_stage(sources, {0: Fraction(1)}, tokens, 5 * windows, 5 * size * 100)
    epoch = Stretch.of_epoch(sources, [Fraction(1)], tokens, "continue")
    for stretch in (epoch, stage):
        found = [
            met_again(five_readings(Schedule(sources, (stretch,), n, shuffle=True), windows))
            for n in range(6)
        ]
        error = np.std(found, ddof=1) / len(found) ** 0.5
        assert abs(np.mean(found) - 1) < min(max(3 * error, 0.02), 0.05)


def test_windows_hold_every_part_of_a_data_set_whatever_their_size() -> None:
    """Tenths of a sorted data set have nearly their share in a window of any size."""
    rng = np.random.default_rng(0)

    def deviation(orders: list[np.ndarray], count: int) -> float:
        found = []
        for batches in orders:
            of_tenths = np.cumsum((batches * 10 // 3000)[:, None] == np.arange(10), axis=0)
            found.append(np.std(of_tenths[count:] - of_tenths[:-count]))
        return float(np.mean(found))

    even = [evenly(np.arange(3000), 3000, key) for key in range(20)]
    chance = [rng.permutation(3000) for _ in range(20)]
    for count in (26, 88, 130, 300, 900):
        assert deviation(even, count) < 0.5 * deviation(chance, count)


def test_many_sources_are_planned_at_once_and_share_every_window() -> None:
    rng = np.random.default_rng(0)
    sources = tuple(Source(int(n), int(n) * 65_000) for n in rng.integers(100, 3000, 1000))
    began = time.process_time()
    exact = [Fraction(str(weight)) for weight in rng.random(1000)]
    for exhausted in EXHAUSTED:
        epoch = Stretch.of_epoch(sources, exact, 1 << 25, exhausted)
        order = Schedule(sources, (epoch,), 0, shuffle=True)
        assert len(order.window(0, epoch.num_windows // 2)) > 0
    assert time.process_time() - began < 4
    assert order.batches_read == tuple(source.batches for source in sources), "continue is last"
    equal = Stretch.of_epoch((Source(100, 100_000),) * 200, [Fraction(1)] * 200, 100_000, "repeat")
    order = Schedule((Source(100, 100_000),) * 200, (equal,), 1, shuffle=True)
    counts = [len(order.window(0, window)) for window in range(10)]
    assert sum(counts) == pytest.approx(1000, abs=60)
    assert min(counts) > 60, "100 on average"


def test_a_window_of_a_trillion_tokens_costs_what_it_always_does() -> None:
    sources = (Source(6_000_000, 6_000_000 * 66_000),) * 50
    epoch = Stretch.of_epoch(sources, [Fraction(1, 50)] * 50, 1 << 25, "repeat")
    order = Schedule(sources, (epoch,), 0, shuffle=True)
    order.window(0, 0)
    began = time.process_time()
    assert len(order.window(0, 400_000)) > 400
    assert time.process_time() - began < 0.1


def test_epochs_seeds_and_sources_differ_and_no_shuffle_is_file_order() -> None:
    first = order_of_one(1000, 10, seed=0, shuffle=True)
    other = order_of_one(1000, 10, seed=1, shuffle=True)
    assert first.window(0, 3).tolist() != first.window(1, 3).tolist()
    assert first.window(0, 3).tolist() != other.window(0, 3).tolist()
    assert len({first.draw(0, 3), first.draw(1, 3), first.draw(0, 4), other.draw(0, 3)}) == 4
    plain = order_of_one(1000, 10, seed=0, shuffle=False)
    assert plain.window(4, 3).tolist() == list(range(300, 400))
    assert plain.draw(0, 0) is None
    sources = (Source(50, 50),) * 2
    epoch = Stretch.of_epoch(sources, [Fraction(1, 2)] * 2, 20, "continue")
    batches = Schedule(sources, (epoch,), 0, shuffle=True).window(0, 2)
    assert set(batches[batches < 50]) != set(batches[batches >= 50] - 50)


@given(st.integers(1, 10**12), st.integers(0, 2**32))
def test_permute_of_a_few_positions_stays_in_a_huge_range(size: int, key: int) -> None:
    positions = np.unique(np.linspace(0, size - 1, 20).astype(np.int64))
    sent = permute(positions, size, key)
    assert sent.min() >= 0
    assert sent.max() < size
    assert len(np.unique(sent)) == len(positions)


def test_every_place_gets_every_value_about_equally_often() -> None:
    counts = np.zeros((5, 5), np.int64)
    for seed in range(1000):
        counts[np.arange(5), permute(np.arange(5), 5, derive_key(seed))] += 1
    assert counts.min() > 145
    assert counts.max() < 255


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
