"""What was delivered is counted the same, whoever delivers it and wherever it stops."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support.data_sets import MemoryReader, order_of_one, plan_in_memory, random_rows

from tokenfeed.pipeline.errors import LoaderError, ResumeError
from tokenfeed.pipeline.planning.plan import Plan, Position
from tokenfeed.pipeline.planning.policies import Batching, Padded
from tokenfeed.pipeline.planning.schedule import Schedule, Source, Stretch
from tokenfeed.pipeline.planning.state import Delivered, resealed
from tokenfeed.pipeline.windows.maker import WindowMaker

BATCHES = [
    random_rows(np.random.default_rng(seed).integers(1, 40, size))
    for seed, size in enumerate([9, 1, 14, 6, 11])
]


def planned(batching: Batching, num_windows: int = 3) -> tuple[Plan, MemoryReader]:
    return plan_in_memory(BATCHES, batching, micro_batches_per_step=3, num_windows=num_windows)


def deliver(plan: Plan, reader: MemoryReader, rounds: int = -1) -> Delivered:
    """What one rank has delivered after some rounds, or after an epoch."""
    delivered = Delivered(plan)
    while delivered.position < (1, 0, 0):
        for each in WindowMaker(plan, reader, 0, 1).make(delivered.position).rounds():
            delivered, rounds = delivered.after(each), rounds - 1
            if not rounds:
                return delivered
    return delivered


def two_sources(batching: Batching) -> Plan:
    """Of 2 and of 3 record batches; the first is read twice."""
    rows = [sum(map(len, part)) for part in (BATCHES[:2], BATCHES)]
    tokens = [sum(len(batch.ids) for batch in part) for part in (BATCHES[:2], BATCHES[2:])]
    sources = Source(2, tokens[0]), Source(3, tokens[1])
    weights = [Fraction(2 * tokens[0]), Fraction(tokens[1])]
    epoch = Stretch.of_epoch(sources, weights, sum(tokens) // 2, "repeat")
    return replace(
        planned(batching)[0],
        data=("one", "two"),
        row_ends=tuple(rows),
        epoch_tokens=(2 * tokens[0], tokens[1]),
        order=Schedule(sources, (epoch,), 0, shuffle=True),
    )


def test_a_wrong_number_of_tokens_at_the_end_of_an_epoch_is_an_error() -> None:
    plan, reader = two_sources(Padded(70)), MemoryReader(BATCHES)
    one, two = (tokens or 0 for tokens in plan.epoch_tokens)
    for number, wrong in enumerate([(one + 1, two), (one, two - 1)]):
        with pytest.raises(
            LoaderError, match=f"source {number}, but its manifest .*{wrong[number]:,}"
        ):
            deliver(replace(plan, epoch_tokens=wrong), reader)
    deliver(replace(plan, epoch_tokens=(None, two)), reader)


def saved(rounds: int = 5) -> tuple[Plan, dict[str, Any]]:
    plan, reader = planned(Padded(30))
    return plan, deliver(plan, reader, rounds).state()


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("batching", {"batching": Padded(31)}),
        ("batching", {"batching": Padded(30, long_rows="refuse")}),
        ("micro_batches_per_step", {"micro_batches_per_step": 4}),
        ("split", {"split": "validation"}),
        ("data", {"data": ("another",)}),
        ("weights", {"weights": (0.5, 0.5)}),
        ("seed", {"seed": 1}),
        ("shuffle", {"shuffle": False}),
        ("windows", {"order": order_of_one(5, 2, seed=0, shuffle=True)}),
        ("batches", {"order": order_of_one(6, 3, seed=0, shuffle=True)}),
    ],
)
def test_the_state_of_another_plan_is_refused_by_what_differs(
    name: str, other: dict[str, Any]
) -> None:
    plan, state = saved()
    if other.keys() & {"seed", "shuffle"}:
        other = {"order": replace(plan.order, **other)}
    changed = replace(plan, **other)
    with pytest.raises(ResumeError, match=rf"saved with {name}=.*this loader has {name}="):
        Delivered.from_state(changed, state)


def test_a_position_beyond_the_window_is_refused_when_it_is_read() -> None:
    plan, reader = planned(Padded(30))
    with pytest.raises(ResumeError, match="window 1 has no micro-batch 1000"):
        WindowMaker(plan, reader, 0, 1).make(Position(0, 1, 1000))


JUNK: list[tuple[str, Any]] = [
    *[(name, value) for name in ("epoch", "window", "micro_batch") for value in (0.5, -1, True)],
    *[(name, 10**30) for name in ("epoch", "window", "micro_batch")],
    *[("tokens", value) for value in ([0.5], [10**30], "1")],
    *[("digest", value) for value in ("0x00000000000000", " 0123456789abcde", 5, "1" * 17)],
    *[("version", value) for value in (1, 2.5, None)],
    *[("plan", value) for value in ([1], {1: 2}, {})],
]


@pytest.mark.parametrize(("name", "junk"), JUNK, ids=repr)
def test_junk_in_a_state_is_refused_in_one_line(name: str, junk: Any) -> None:
    plan, state = saved()
    without = {key: value for key, value in state.items() if key != name}
    for damaged in (state | {name: junk}, without):
        with pytest.raises(ResumeError, match=r"^cannot resume: .*$"):
            Delivered.from_state(plan, damaged)


def test_edited_numbers_of_a_state_are_refused_by_its_checksum() -> None:
    plan, state = saved()
    changes: list[dict[str, Any]] = [
        *({name: state[name] + 1} for name in ("epoch", "window", "micro_batch")),
        {"digest": "0" * 16},
        {"tokens": [state["tokens"][0] + 1]},
        {"plan": state["plan"] | {"skip": {plan.data[0]: [(0, 1)]}}},
        {"checksum": "0" * 16},
        {"checksum": ""},
    ]
    for change in changes:
        with pytest.raises(ResumeError, match=r"was changed after it was saved.*checksum"):
            Delivered.from_state(plan, state | change)


@pytest.mark.parametrize("changes", [{"window": 3}, {"tokens": []}, {"tokens": [1, 2]}], ids=str)
def test_a_state_of_no_place_in_the_plan_is_refused(changes: dict[str, Any]) -> None:
    plan, state = saved()
    with pytest.raises(ResumeError, match=r"^cannot resume: the (plan has no|state has the tok)"):
        Delivered.from_state(plan, resealed(state, **changes))
