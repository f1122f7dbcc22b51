"""An compare names the first difference between two runs, and which of them left the plan."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from support.delivery import State, open_loader, state_after

from tokenfeed import Fixed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ResumeError


def deviate(loader: ShardLoader, after: int) -> State:
    """The state of a run that delivered something else in one of its windows."""
    for number, _ in enumerate(loader):
        if number == after:
            delivered = loader._delivery.delivered
            loader._delivery.delivered = replace(delivered, digest=delivered.digest ^ 1)
        if loader.position.epoch == 2:
            break
    return loader.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, "the first run has seed=0, the second seed=4"),
        ({"batching": Fixed(8)}, "the first run has batching="),
        (
            {"micro_batches_per_step": 3},
            "the first run has micro_batches_per_step=1, the second micro_batches_per_step=3",
        ),
    ],
)
def test_a_setting_that_differs_is_named_first(folder: Path, options: State, message: str) -> None:
    first, second = state_after(folder, 9), state_after(folder, 9, **options)
    found = open_loader(folder).compare(first, second)
    assert found is not None
    assert found.startswith(message)


@pytest.mark.parametrize(("behind", "ahead"), [(3, 4), (5, 70)])
def test_the_run_that_has_gone_further_is_named(folder: Path, behind: int, ahead: int) -> None:
    states = [state_after(folder, batches) for batches in (behind, ahead)]
    compare = open_loader(folder).compare
    assert str(compare(*states)).startswith("the second run is ahead, at Position(")
    assert str(compare(*states[::-1])).startswith("the first run is ahead")


@pytest.mark.parametrize("after", [0, 17, 40])
def test_a_run_that_left_the_plan_is_found_with_the_windows_it_did_so_in(
    folder: Path, after: int
) -> None:
    def fresh() -> ShardLoader:
        return open_loader(folder, Padded(max_tokens=2048), epochs=None)

    good, bad = deviate(fresh(), 10**9), deviate(fresh(), after)
    found = str(fresh().compare(good, bad))
    assert found.endswith("the second run did not deliver the rows of the plan"), found
    agree, differ = _windows(found, good)
    parted = _window_of(fresh(), after)
    assert agree <= parted < differ
    assert str(fresh().compare(bad, good)).endswith(
        "the first run did not deliver the rows of the plan"
    )


def _windows(found: str, state: State) -> tuple[int, int]:
    """Window numbers, over epochs, of "agree up to ... and differ before ..."."""
    words = found.replace(",", "").split()
    places = [n for n, word in enumerate(words) if word == "window"]
    count = state["plan"]["windows"]
    agree, differ = (int(words[n + 4]) * count + int(words[n + 1]) for n in places)
    return agree, differ


def _window_of(loader: ShardLoader, batch: int) -> int:
    before = loader.position
    for _ in islice(loader, batch):
        before = loader.position
    return before.epoch * loader.state_dict()["plan"]["windows"] + before.window


@pytest.mark.parametrize("damage", [lambda s: s.clear(), lambda s: s.pop("trail")])
def test_what_is_no_state_is_refused(folder: Path, damage: Callable[[State], object]) -> None:
    state = state_after(folder, 5)
    damaged = deepcopy(state)
    damage(damaged)
    for states in ((damaged, state), (state, damaged)):
        with pytest.raises(ResumeError, match="not a loader state"):
            open_loader(folder).compare(*states)
