"""A state continues with exactly the rest, on any number of ranks, and is refused elsewhere."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delivery import (
    POLICIES,
    MakeDataset,
    Ranks,
    Span,
    check_elastic_run,
    joined,
    open_loader,
    realistic_lengths,
    small_batches,
    spans,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenfeed import Fixed, Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policy import Batching

LENGTHS = realistic_lengths()


MANY_POLICIES = [*POLICIES, Padded(100), Padded(700, multiple_of=8), Packed(50, 3), Fixed(2)]


SAME_FOLDER = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch)


@pytest.fixture
def folder(make_dataset: MakeDataset, small: None) -> Path:
    return make_dataset(LENGTHS, num_shards=3)


def elastic_legs(workers: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    return st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 15), workers), min_size=2, max_size=5
    )


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=SAME_FOLDER)
@given(
    lengths=st.builds(realistic_lengths, st.integers(1, 200), st.floats(0, 6), st.integers(0, 9)),
    batching=st.sampled_from(MANY_POLICIES),
    micro_batches_per_step=st.integers(1, 6),
    legs=elastic_legs(st.just(0)),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_runs_of_any_stops_and_resizes_deliver_what_one_run_delivers(
    make_dataset: MakeDataset,
    small: None,
    lengths: np.ndarray,
    batching: Batching,
    micro_batches_per_step: int,
    legs: list[tuple[int, int, int]],
    epochs: int,
    seed: int,
    shuffle: bool,
) -> None:
    check_elastic_run(
        make_dataset(lengths),
        lengths,
        legs,
        batching=batching,
        micro_batches_per_step=micro_batches_per_step,
        epochs=epochs,
        seed=seed,
        shuffle=shuffle,
        window_tokens=10_000,
    )


@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_a_state_of_every_round_continues_over_every_seam(
    make_dataset: MakeDataset, small: None, batching: Batching
) -> None:
    lengths = realistic_lengths(120)
    folder = make_dataset(lengths)
    options: dict[str, Any] = {"batching": batching, "epochs": 2, "window_tokens": 6_000}
    loader = open_loader(folder, micro_batches_per_step=4, rank=0, world_size=3, **options)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    assert {(state["epoch"], state["window"]) for state in states if not state["micro_batch"]} >= {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
    }
    alone = Ranks(folder, 1, micro_batches_per_step=4, **options)
    alone.run()
    whole = [batch for step in joined([alone]) for batch in step]
    for state in states[:-1]:
        rest = Ranks(folder, 2, json.loads(json.dumps(state)), micro_batches_per_step=4, **options)
        assert rest.run() == states[-1]
        batches = [batch for step in rest.steps for batch in step]
        assert batches == whole[len(whole) - len(batches) :]


@pytest.mark.slow
@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_steps_are_the_same_rows_on_any_number_of_ranks(folder: Path, batching: Batching) -> None:
    def steps(world_size: int) -> list[list[Span]]:
        ranks = Ranks(folder, world_size, batching=batching, micro_batches_per_step=4)
        ranks.run()
        return [sorted(span for batch in step for span in batch) for step in joined([ranks])]

    whole = steps(1)
    for world_size in range(2, 8):
        assert steps(world_size) == whole
    together = steps(8)  # ranks for two steps: a step is made of both
    assert len(together) < len(whole)
    rest: Iterator[list[Span]] = iter(whole)
    for step in together:
        parts: list[Span] = []
        while len(parts) < len(step):
            parts += next(rest)
        assert sorted(parts) == step


def test_after_a_state_of_the_end_of_a_pass_the_next_pass_follows(folder: Path) -> None:
    loader = open_loader(folder, epochs=2)
    first = [spans(batch) for batch in loader]
    state = loader.state_dict()
    second = [spans(batch) for batch in loader]
    assert first != second
    resumed = open_loader(folder, epochs=2)
    resumed.load_state_dict(state)
    assert [spans(batch) for batch in resumed] == second


def test_a_state_before_anything_was_delivered_is_the_beginning(folder: Path) -> None:
    loader = open_loader(folder)
    loader.load_state_dict(open_loader(folder).state_dict())
    assert len(list(loader)) == len(list(open_loader(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed=0, this loader has seed=1"),
        ({"batching": Padded(999)}, r"batching=\"Padded\(max_tokens=2048.*max_tokens=999"),
        ({"shuffle": False}, "shuffle=True, this loader has shuffle=False"),
        (
            {"micro_batches_per_step": 2},
            "micro_batches_per_step=4, this loader has micro_batches_per_step=2",
        ),
        ({"window_tokens": 40_000}, "windows=5, this loader has windows=2"),
    ],
)
def test_a_state_of_another_plan_is_refused_with_what_differs(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    state = open_loader(folder, micro_batches_per_step=4).state_dict()
    loader = open_loader(folder, **changes)
    with pytest.raises(ResumeError, match=message) as caught:
        loader.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert len(list(loader)) == len(list(open_loader(folder, **changes))), "no trace of the state"


def test_a_state_of_other_data_or_another_split_is_refused(
    folder: Path, make_dataset: MakeDataset, write_dataset: MakeDataset, tmp_path: Path
) -> None:
    state = open_loader(folder).state_dict()
    other = make_dataset(LENGTHS + 1)
    theirs, ours = (
        r"data=\['[0-9a-f]{16}'\]",
        rf"data=\['[0-9a-f]{{16}}'\] \(fingerprint of {other}\)",
    )
    with pytest.raises(ResumeError, match=f"saved with {theirs}, this loader has {ours}"):
        open_loader(other).load_state_dict(state)
    part = np.arange(1, 101), np.full(10, 10)
    both = write_dataset(tmp_path / "both", {"train": part, "validation": part}, 1000)
    state = open_loader(both, split="validation").state_dict()
    with pytest.raises(ResumeError, match="split='validation', this loader has split='train'"):
        open_loader(both).load_state_dict(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"epoch": "x"},
        {"epoch": -1},
        {"window": 10**6},
        {"window": -1},
        {"plan": 3},
        {"digest": "no hex"},
        {"tokens": None},
        {"tokens": [1, 2]},
        {"trail": [1]},
    ],
)
def test_what_is_no_state_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    state = open_loader(folder).state_dict()
    with pytest.raises(ResumeError, match="cannot resume: "):
        open_loader(folder).load_state_dict(state | changes)
    for name in changes:
        with pytest.raises(ResumeError, match="not a loader state"):
            open_loader(folder).load_state_dict({k: v for k, v in state.items() if k != name})


@pytest.mark.slow
def test_ranks_without_a_step_size_of_their_own_take_that_of_the_state(folder: Path) -> None:
    whole = Ranks(folder, 6)
    final = whole.run()
    first = Ranks(folder, 6)
    state = first.run(2)
    for world_size in (1, 4, 6, 13):
        rest = Ranks(folder, world_size, state)
        assert rest.run() == final
        assert {loader._plan.micro_batches_per_step for loader in rest.loaders} == {6}


def test_ranks_without_settings_of_their_own_resume_real_data(make_dataset: MakeDataset) -> None:
    """With enough tokens that the window that is chosen depends on the step size."""
    folder = make_dataset(np.full(12_000, 1000))
    batching = Padded(16_384)
    saved = ShardLoader(folder, batching=batching, num_workers=0, rank=0, world_size=4)
    next(iter(saved))
    resumed = ShardLoader(folder, batching=batching, num_workers=0, rank=0, world_size=1)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.position == saved.position
    next(iter(resumed))


def test_state_taken_within_state_dict_is_whole(folder: Path) -> None:
    """A signal handler may come at any call, also while the loop takes a state itself."""
    loader = open_loader(folder)
    next(iter(loader))
    expected = open_loader(folder)
    next(iter(expected))
    taken: list[dict[str, Any]] = []

    def handle(*_: object) -> None:
        taken.append(loader.state_dict())

    sys.setprofile(handle)
    try:
        loader.state_dict()
    finally:
        sys.setprofile(None)
    assert len(taken) > 5
    assert all(state == expected.state_dict() for state in taken)
