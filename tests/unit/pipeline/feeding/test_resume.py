"""A state continues with exactly the rest, on any number of ranks, and is refused elsewhere."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.delivery import (
    POLICIES,
    MakeDataset,
    Ranks,
    check_elastic_run,
    joined,
    open_loader,
    realistic_lengths,
    small_batches,
    spans,
    with_settings,
)

from tokenfeed import Fixed, Mixture, Packed, Padded, ShardLoader, merge_states
from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policies import Batching

LENGTHS = realistic_lengths()


MANY_POLICIES = [*POLICIES, Padded(100), Padded(700, multiple_of=8), Packed(50, 3), Fixed(2)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch)


def elastic_legs(workers: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    return st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 15), workers), min_size=2, max_size=5
    )


@pytest.mark.slow
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
    lengths = realistic_lengths(70)
    folder = make_dataset(lengths)
    options: dict[str, Any] = {"batching": batching, "epochs": 2, "window_tokens": 4_000}
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


def test_after_a_state_of_the_end_of_a_pass_the_next_pass_follows(folder: Path) -> None:
    loader = open_loader(folder, epochs=2)
    first = [spans(batch) for batch in loader]
    state = loader.state_dict()
    second = [spans(batch) for batch in loader]
    assert first != second
    resumed = open_loader(folder, epochs=2)
    resumed.load_state_dict(state)
    assert [spans(batch) for batch in resumed] == second


def test_a_refused_state_leaves_no_trace(folder: Path) -> None:
    state = open_loader(folder).state_dict()
    loader = open_loader(folder, seed=1)
    with pytest.raises(ResumeError, match="seed=0, this loader has seed=1"):
        loader.load_state_dict(state)
    assert len(list(loader)) == len(list(open_loader(folder, seed=1)))


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


@pytest.mark.slow
def test_ranks_without_a_step_size_of_their_own_take_that_of_the_state(folder: Path) -> None:
    whole = Ranks(folder, 6)
    final = whole.run()
    first = Ranks(folder, 6)
    state = first.run(2)
    for world_size in (1, 4, 6, 13):
        rest = Ranks(folder, world_size, state)
        assert rest.run() == final
        assert {
            loader.state_dict()["plan"]["micro_batches_per_step"] for loader in rest.loaders
        } == {6}


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


@pytest.fixture
def small_folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(200), num_shards=3)


@pytest.fixture
def other(make_dataset: MakeDataset, small_folder: Path) -> Path:
    return make_dataset(realistic_lengths(300, seed=1))


def mixed(small_folder: Path, other: Path, first: float, second: float) -> ShardLoader:
    mixture = Mixture({small_folder: first, other: second}, "continue")
    return ShardLoader(mixture, batching=Padded(700), window_tokens=4000, num_workers=0)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ((7, 3), (0.7, 0.3)),
        ((0.1, 0.3), (1, 3)),
        ((1e-12, 2e-12), (5e11, 1e12)),
        ((0.1, 0.3), (0.1 * 3, 0.3 * 3)),  # 0.30000000000000004 and 0.8999999999999999
    ],
)
def test_weights_of_the_same_proportions_are_the_same_plan(
    small_folder: Path, other: Path, saved: tuple[float, float], now: tuple[float, float]
) -> None:
    first, second = mixed(small_folder, other, *saved), mixed(small_folder, other, *now)
    for _ in range(5):
        next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert [spans(batch) for batch in second] == [spans(batch) for batch in first]
    assert second.state_dict()["digest"] == first.state_dict()["digest"]


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({"policy": "Padded", "long_rows": "cut", "max_tokens": 700}, Padded(700)),
        ({"policy": "Fixed", "batch_size": 7, "spread": 0.033}, Fixed(7)),
        (
            {"policy": "Packed", "sequence_length": 64, "batch_size": 4, "split": True},
            Packed(64, 4, split=True),
        ),
    ],
    ids=str,
)
def test_a_field_that_a_saved_policy_does_not_name_has_its_default(
    small_folder: Path, saved: dict[str, Any], now: Batching
) -> None:
    loader = open_loader(small_folder, now)
    state = with_settings(loader.state_dict(), batching=saved)
    loader.load_state_dict(state)


@pytest.mark.parametrize(
    "saved",
    [
        {"policy": "Padded", "max_tokens": 701},
        {"policy": "Padded", "max_tokens": 700, "multiple_of": 8},
        {"policy": "Padded", "max_tokens": 700, "long_rows": "refuse"},
        {"policy": "Padded", "max_tokens": 700, "spice": 3},
        {"policy": "Padded", "max_tokens": "700"},
        {"policy": "Padded"},
        {"policy": "Fixed", "batch_size": 700},
        {"policy": "Sorted", "max_tokens": 700},
        {"policy": ["Padded"], "max_tokens": 700},
        {"policy": "Batching"},
        {"max_tokens": 700},
        {},
        "Padded(max_tokens=700)",
        "",
        None,
        700,
        ["Padded"],
    ],
    ids=lambda saved: str(saved)[:40],
)
def test_another_policy_and_no_policy_are_refused(small_folder: Path, saved: Any) -> None:
    loader = open_loader(small_folder, Padded(700))
    state = with_settings(loader.state_dict(), batching=saved)
    with pytest.raises(ResumeError, match=r"(saved with |\$\.plan\.)batching"):
        loader.load_state_dict(state)


JUNK_SETTINGS: list[tuple[str, Any]] = [
    ("weights", ["x"]),
    ("weights", [0.0]),
    ("weights", [float("nan")]),
    ("weights", "7"),
    ("weights", []),
    ("weights", None),
    ("micro_batches_per_step", 0.5),
    ("micro_batches_per_step", 10**30),
    ("micro_batches_per_step", "2"),
    ("batches", 3),
    ("batches", [0]),
]


@pytest.mark.parametrize(("name", "junk"), JUNK_SETTINGS, ids=repr)
def test_junk_in_the_settings_of_a_state_is_refused_by_its_name(
    small_folder: Path, name: str, junk: Any
) -> None:
    loader = open_loader(small_folder)
    state = with_settings(loader.state_dict(), **{name: junk})
    with pytest.raises(ResumeError, match=rf"(saved with |\$\.plan\.){name}"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("junk", [None, 3, [], {}, "x", {"version": 5}, {"streams": [3]}], ids=repr)
def test_what_is_no_state_is_no_state_wherever_it_is_given(small_folder: Path, junk: Any) -> None:
    loader = open_loader(small_folder)
    for give in (
        lambda: loader.load_state_dict(junk),
        lambda: merge_states([junk]),
    ):
        with pytest.raises(ResumeError, match="not a loader state"):
            give()


@pytest.mark.parametrize(
    ("name", "junk"), [("stream", 0.5), ("stream", [1]), ("num_streams", "2"), ("num_streams", 1e9)]
)
def test_merging_refuses_junk(small_folder: Path, name: str, junk: Any) -> None:
    state = open_loader(small_folder).state_dict()
    with pytest.raises(ResumeError, match="not a loader state"):
        merge_states([with_settings(state, **{name: junk})])
    with pytest.raises(ResumeError, match="the state of stream 1 of"):
        merge_states([with_settings(state, stream=0, num_streams=10**12)])
