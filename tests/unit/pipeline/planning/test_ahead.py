"""When a record batch is read next is what reading the plan to its end tells."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import order_of_one, plan_in_memory, random_rows

from tokenfeed.pipeline.planning.order import EpochOrder, MixturePhase
from tokenfeed.pipeline.planning.plan import NEVER, Ahead, Plan, Position
from tokenfeed.pipeline.planning.policies import Fixed

ANY_PLAN, _ = plan_in_memory([random_rows(np.array([3]))], Fixed(1))


def plan_of(order: EpochOrder, stream: int, num_streams: int) -> Plan:
    return replace(ANY_PLAN, order=order, stream=stream, num_streams=num_streams)


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    """One or two sources, the second of which may be read more than once, in one or two phases."""
    sizes = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=2)))
    phases, begins = [], [0] * len(sizes)
    for _ in range(draw(st.integers(1, 2))):
        batches = tuple(draw(st.integers(1, 2 * size)) for size in sizes)
        phases.append(MixturePhase(tuple(begins), batches, draw(st.integers(1, max(batches)))))
        begins = [begin + count for begin, count in zip(begins, batches, strict=True)]
    return EpochOrder(sizes, draw(st.integers(0, 99)), draw(st.booleans()), tuple(phases))


def by_reading(ahead: Ahead) -> list[list[int]]:
    """What `until` should say of each source, by looking at every window of this epoch and the
    next."""
    plan, found = ahead.plan, dict[int, int]()
    windows = chain([ahead.position], ahead.windows())
    for nth in range(2 * plan.num_windows - ahead.position.window):
        for batch in ahead.batches(next(windows)).tolist():
            found.setdefault(batch, nth)
    batches = iter(range(sum(plan.order.sizes)))
    return [[found.get(next(batches), NEVER) for _ in range(size)] for size in plan.order.sizes]


@given(orders(), st.integers(1, 3), st.data())
def test_until_counts_the_windows_before_a_record_batch_is_read(
    order: EpochOrder, num_streams: int, data: st.DataObject
) -> None:
    num_streams = min(num_streams, order.num_windows)
    plan = plan_of(order, data.draw(st.integers(0, num_streams - 1)), num_streams)
    window = data.draw(st.integers(0, plan.num_windows - 1))
    ahead = Ahead(plan, Position(data.draw(st.integers(0, 3)), window, 0))
    for source, read in enumerate(by_reading(ahead)):
        found = ahead.until(source, np.arange(len(read))).tolist()
        if num_streams == 1:
            assert found == read
        else:  # a source that is read several times may be another stream's the next times
            assert all(f >= r for f, r in zip(found, read, strict=True))


def test_a_whole_cache_is_asked_about_in_a_moment() -> None:
    order = order_of_one(7_600_000, 60_000, seed=1, shuffle=True)
    ahead = Ahead(plan_of(order, 0, 1), Position(3, 59_990, 0))
    batches = np.arange(0, 7_600_000, 100)
    found = ahead.until(0, batches)
    assert found.min() >= 0
    assert found.max() < 60_010


def test_between_is_how_often_the_windows_of_an_epoch_come_to_a_shard() -> None:
    order = order_of_one(40_000, 10_000, seed=3, shuffle=True)
    ahead = Ahead(plan_of(order, 0, 1), Position(0, 0, 0))
    windows = ahead.until(0, np.arange(40_000)).reshape(1000, 40)
    coming = [len(set(of_shard)) for of_shard in windows.tolist()]
    assert ahead.between(0, 1000) == pytest.approx(10_000 / np.mean(coming), rel=0.03)
