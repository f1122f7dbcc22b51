"""Rows of `skip` have no targets; the order of rows and everything else stay as they are."""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import plan_in_memory, random_rows
from support.delivery import MakeDataset, Ranks, joined, open_loader, small_batches

from tokenfeed import Fixed, Packed, Padded, ShardLoader, Stage
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import BatchForm, make_batches
from tokenfeed.pipeline.format.kinds import TargetRule
from tokenfeed.pipeline.format.schema import IGNORED, KINDS, Task
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.windows.maker import WindowMaker

POLICIES = st.sampled_from([Padded(60), Fixed(3), Packed(40, 2), Packed(30, 2, split=True)])
FORM = BatchForm(0)
LENGTHS = st.lists(st.integers(1, 25), min_size=1, max_size=30)


@given(
    lengths=LENGTHS,
    batching=POLICIES,
    task=st.sampled_from(["lm", "complete", "tag", "classify", "score", "chat"]),
    ranges=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 9)), max_size=3),
    world_size=st.integers(1, 3),
)
def test_only_labels_of_skipped_rows_change(
    lengths: list[int],
    batching: Batching,
    task: Task,
    ranges: list[tuple[int, int]],
    world_size: int,
) -> None:
    if task in ("classify", "score"):
        batching = Fixed(3)
    rows = random_rows(np.array(lengths), task)
    plan, reader = plan_in_memory([rows], batching, micro_batches_per_step=2)
    skip = {"memory": [(first, first + count) for first, count in ranges]}
    skipped = replace(plan, skip=skip)
    bad = {row for first, count in ranges for row in range(first, first + count)}
    rule = TargetRule("assistant") if KINDS in rows.per_token else None
    for rank in range(world_size):
        slices = [
            WindowMaker(each, reader, rank, world_size, rule).make(Position(0, 0, 0))
            for each in (plan, skipped)
        ]
        batches = (make_batches(each, FORM) for each in slices)
        for (one, plain), (other, without) in zip(*batches, strict=True):
            assert plain == without, "the order has changed"
            assert np.array_equal(one["input_ids"], other["input_ids"])
            expected = expected_labels(one["labels"].numpy().copy(), one, bad)
            labels = other["labels"].numpy()
            assert np.array_equal(labels, expected, equal_nan=labels.dtype.kind == "f")
            if not other.is_filler:
                counted = ~np.isnan(labels) if labels.dtype.kind == "f" else labels != IGNORED
                assert other.num_targets == counted.sum()


def expected_labels(labels: np.ndarray, batch: Any, bad: Iterable[int]) -> np.ndarray:
    """The labels of a batch without the targets of some rows, piece by piece."""
    is_bad = np.isin(batch.rows, list(bad))
    if labels.ndim == 1:
        labels[is_bad] = np.nan if labels.dtype.kind == "f" else IGNORED
        return labels
    piece = 0
    for sequence, end in enumerate(batch.sequence_offsets[1:].tolist()):
        slot = 0
        while piece < end:
            stop = slot + int(batch.piece_lengths[piece])
            labels[sequence, slot:stop] = IGNORED if is_bad[piece] else labels[sequence, slot:stop]
            slot, piece = stop, piece + 1
    return labels


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(np.random.default_rng(0).integers(1, 90, 400), num_shards=2)


def learned(loader: ShardLoader) -> set[int]:
    """Rows with targets in the batches of a loader."""
    with loader:
        found = [(batch.rows, batch["labels"].numpy()) for batch in loader]
    return {int(row) for rows, labels in found for row in rows[(labels != IGNORED).any(axis=1)]}


def test_state_keeps_skipped_rows_for_any_ranks(folder: Path) -> None:
    options: dict[str, Any] = {"batching": Padded(700), "micro_batches_per_step": 2}
    first = Ranks(folder, 1, **options, skip={folder: [(3, 5)]})
    state = json.loads(json.dumps(first.run(4)))
    assert state["plan"]["skip"] == {state["plan"]["data"][0]: [[3, 5]]}
    second = Ranks(folder, 2, state, **options, skip={str(folder): [(100, 130)]})
    end = second.run()
    plain = Ranks(folder, 1, **options)
    whole = plain.run()
    assert joined([first, second]) == joined([plain])
    assert whole["digest"] == end["digest"]


def test_resumed_loader_skips_its_own_ranges_or_those_of_the_state(folder: Path) -> None:
    def rest(state: dict[str, Any], skip: Any) -> set[int]:
        loader = open_loader(folder, Padded(700), skip=skip)
        loader.load_state_dict(state)
        return learned(loader)

    plain, skipping = (
        open_loader(folder, Padded(700), skip=skip) for skip in (None, {folder: [(3, 5), (7, 390)]})
    )
    for loader in (plain, skipping):
        assert len(list(islice(loader, 4))) == 4
    every = rest(plain.state_dict(), None)
    state = skipping.state_dict()
    assert rest(state, None) == every - {3, 4, *range(7, 390)}
    assert rest(state, {folder: [(7, 390)]}) == every - {*range(7, 390)}
    assert rest(state, {}) == every
    skipping.load_state_dict(plain.state_dict())
    assert learned(skipping) == every - {3, 4, *range(7, 390)}


def test_skipped_rows_of_a_stage_are_counted_by_data_set(
    folder: Path, make_dataset: MakeDataset
) -> None:
    other = make_dataset([50] * 200, num_shards=1)
    stages: Any = [
        Stage({other: 1}, until_tokens=8_000),
        Stage({folder: 1, other: 1}, until_tokens=80_000),
    ]
    plain, without = (
        open_loader(stages, Fixed(1), window_tokens=4_000, skip=skip)
        for skip in (None, {folder: [(0, 10)], other: [(199, 200)]})
    )
    seen = learned(plain)
    assert {200 + row for row in range(10)} & seen
    assert learned(without) == seen - {199, *range(200, 210)}


def test_ranges_may_be_arrays_generators_and_of_two_spellings(folder: Path) -> None:
    plain = open_loader(folder, Padded(700))
    state = plain.state_dict()
    every = learned(plain)
    once = ((first, first + 1) for first in (3, 4))
    skip = {folder: np.array([[7, 9]]), f"{folder}/../{folder.name}": once}
    loader = open_loader(folder, Padded(700), skip=skip)
    loader.load_state_dict(state)
    assert learned(loader) == every - {3, 4, 7, 8}


@pytest.mark.parametrize("skip", [5, [(1, 2)], {"out/": 5}, {"out/": "1-2"}], ids=str)
def test_other_forms_of_skip_are_refused(folder: Path, skip: Any) -> None:
    with pytest.raises(ConfigError, match=r"^`skip`=.*: expected a dict from folders to lists"):
        open_loader(folder, skip=skip)


@pytest.mark.parametrize(
    "ranges", [[(5, 5)], [(-1, 3)], [(0, 401)], [(0.5, 3)], [7], [(1, 2, 3)]], ids=str
)
def test_ranges_that_no_split_has_are_refused(folder: Path, ranges: Any) -> None:
    with pytest.raises(ConfigError, match=r"^`skip`: .* expected \(first row, .* 0 to 399\.$"):
        open_loader(folder, skip={folder: ranges})
    with pytest.raises(ConfigError, match=r"`skip`: nowhere/ is no data set of this loader"):
        open_loader(folder, skip={"nowhere/": ranges})


def test_many_ranges_cost_little_and_skip_the_same_rows() -> None:
    """A list of duplicates has as many ranges. Some overlap, and some are inside of others."""
    plan, _ = plan_in_memory([random_rows(np.full(50_000, 2))], Fixed(3))
    rng = np.random.default_rng(0)
    firsts = rng.integers(0, 49_000, 40_000)
    ranges = [(int(first), int(first + rng.integers(1, 3))) for first in firsts]
    ranges += [(100, 900), (200, 300)]
    rows = rng.permutation(50_000)
    expected = {row for first, stop in ranges for row in range(first, stop)}
    started = time.process_time()
    found = replace(plan, skip={"memory": ranges}).is_skipped(rows)
    assert time.process_time() - started < 1, "7 s before, for every window"
    assert set(rows[found].tolist()) == expected
