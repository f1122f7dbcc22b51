"""Groups of ranks that read their own windows deliver everything once, and resume exactly."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.delivery import (
    Span,
    open_loader,
    realistic_lengths,
    spans,
    times_delivered,
)

from tokenfeed import Batch, Packed, merge_states
from tokenfeed.pipeline.errors import ConfigError, ResumeError

LENGTHS = realistic_lengths()
POLICY = Packed(sequence_length=256, batch_size=4)
Run = tuple[list[list[Batch]], dict[str, Any]]


def run(
    folder: Path, world_size: int, steps: int, state: dict[str, Any] | None = None, **options: Any
) -> Run:
    """The batches of every rank in so many steps, and the merged state after them."""
    options = {"num_streams": 2, "micro_batches_per_step": 2, "epochs": None} | options
    batches, states = [], []
    for rank in range(world_size):
        loader = open_loader(folder, POLICY, rank=rank, world_size=world_size, **options)
        if state:
            loader.load_state_dict(state)
        batches.append(list(until_step_ends(steps, loader)))
        states.append(loader.state_dict())
    return batches, json.loads(json.dumps(merge_states(states)))


def until_step_ends(steps: int, batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        steps -= batch.ends_step
        if not steps:
            return


@pytest.mark.parametrize(("of_node", "streams"), [("2", 2), ("4", 1), ("3", 1), ("", 1)])
def test_the_ranks_of_a_node_may_be_a_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch, of_node: str, streams: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", of_node)
    loader = open_loader(folder, POLICY, rank=3, world_size=4, num_streams="nodes", epochs=None)
    plan = loader.state_dict()["plan"]
    assert plan.get("num_streams", 1) == streams
    assert plan.get("stream", 0) == streams - 1


def delivered(*runs: Run) -> list[Span]:
    return sorted(
        span
        for batches, _ in runs
        for of_rank in batches
        for batch in of_rank
        if not batch.is_filler
        for span in spans(batch)
    )


def test_ranks_read_only_the_windows_of_their_stream(folder: Path) -> None:
    (first, second), _ = run(folder, 2, 10, micro_batches_per_step=1)
    rows = [
        {row for batch in of_rank for row in batch.rows.tolist()} for of_rank in (first, second)
    ]
    assert not rows[0] & rows[1]


def test_all_streams_together_are_every_token_once_an_epoch(folder: Path) -> None:
    ends = []
    for rank in range(2):
        loader = open_loader(
            folder,
            POLICY,
            rank=rank,
            world_size=2,
            num_streams=2,
            micro_batches_per_step=1,
            epochs=None,
        )
        of_epoch = []
        for batch in loader:
            of_epoch += spans(batch)
            if loader.position.epoch:
                break
        ends += of_epoch
    assert times_delivered(ends, LENGTHS) == {1}


def test_a_merged_state_goes_on_with_another_number_of_ranks(folder: Path) -> None:
    first = run(folder, 4, 6)
    rest = run(folder, 2, 20, first[1])
    whole = run(folder, 4, 26)
    assert delivered(first, rest) == delivered(whole)
    assert rest[1] == whole[1]


def test_a_state_of_another_number_of_streams_is_refused(folder: Path) -> None:
    _, state = run(folder, 4, 3)
    loader = open_loader(folder, POLICY, rank=0, world_size=4, num_streams=4, epochs=None)
    with pytest.raises(ResumeError, match="num_streams=2, this loader has num_streams=4"):
        loader.load_state_dict(state)
    with pytest.raises(ResumeError, match="stream=0, this loader has stream=1"):
        open_loader(
            folder, POLICY, rank=1, world_size=2, num_streams=2, epochs=None
        ).load_state_dict(state["streams"][0])


def test_merging_names_what_is_missing_or_different(folder: Path) -> None:
    _, state = run(folder, 2, 3)
    _, other = run(folder, 2, 3, seed=5)
    with pytest.raises(ResumeError, match="the state of stream 1 of 2"):
        merge_states(state["streams"][:1])
    with pytest.raises(ResumeError, match="states of different runs: seed is 0 and 5"):
        merge_states([state["streams"][0], other["streams"][1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_streams": 3, "world_size": 4}, "`num_streams`=3 does not divide `world_size`=4"),
        ({"num_streams": 2, "world_size": 2, "epochs": 1}, "needs `epochs`=None"),
        ({"num_streams": 64, "world_size": 64}, "an epoch has only . windows"),
    ],
)
def test_impossible_streams_are_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(folder, POLICY, rank=0, **{"epochs": None} | options)


@pytest.mark.parametrize("per_step", [1, 3, 4])
@pytest.mark.parametrize("world_size", [2, 4])
def test_streams_have_equally_many_batches_in_every_step(
    folder: Path, per_step: int, world_size: int
) -> None:
    """Streams are at different windows. A model that gathers its weights in each forward pass
    would hang in a step in which another rank has fewer."""
    batches, merged = run(folder, world_size, 200, micro_batches_per_step=per_step)
    ends = [[batch.ends_step for batch in of_rank] for of_rank in batches]
    assert all(each == ends[0] for each in ends), "batches of each step"
    windows = [state["window"] + state["epoch"] for state in merged["streams"]]
    assert max(windows) > 2, "steps at the end of several windows are among them"
    again, _ = run(folder, world_size, 40, state=merged, micro_batches_per_step=per_step)
    ends = [[batch.ends_step for batch in of_rank] for of_rank in again]
    assert all(each == ends[0] for each in ends), "also after a resume"


def test_fillers_of_streams_change_no_row_and_resume(folder: Path) -> None:
    options = {"num_streams": 2, "micro_batches_per_step": 3, "epochs": None, "world_size": 2}
    found, fillers = [], 0
    for rank in range(2):
        loader = open_loader(folder, POLICY, rank=rank, **options)
        for batch in loader:
            if batch.is_filler:  # the state in the middle of a step goes on from there
                fillers += 1
                other = open_loader(folder, POLICY, rank=rank, **options)
                other.load_state_dict(loader.state_dict())
                assert (batch.num_targets, other.position) == (0, loader.position)
            else:
                found += spans(batch)
            if loader.position.epoch:
                break
    assert times_delivered(found, LENGTHS) == {1}
    assert fillers
