"""A function on rows changes exactly the rows, the same on any ranks, and keeps their lengths."""

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import VOCABULARY_SIZE, plan_in_memory, random_rows
from support.delivery import MakeDataset, open_loader, spans

from tokenfeed import Mixture, Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import IGNORED, Task
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.windows.maker import WindowMaker
from tokenfeed.pipeline.windows.row_map import RowMap

Columns = dict[str, np.ndarray]


def masked(columns: Columns, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    """Masked language modelling: mask about a third of the tokens."""
    ids = columns["input_ids"]
    is_masked = rng.random(len(ids)) < 0.3
    return {
        "input_ids": np.where(is_masked, 0, ids),
        "labels": np.where(is_masked, ids, IGNORED),
    }


def reversed_ids(columns: Columns, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    columns["input_ids"][:] = columns["input_ids"][::-1]
    return columns


@st.composite
def windows(draw: st.DrawFn) -> tuple[Any, Batching, int]:
    lengths = np.array(draw(st.lists(st.integers(1, 25), min_size=1, max_size=25)))
    policy = st.one_of(
        st.builds(Padded, st.integers(8, 60), last=st.sampled_from(["short", "fill"])),
        st.builds(Packed, st.integers(4, 40), st.integers(1, 4), st.booleans()),
    )
    return random_rows(lengths, "lm"), draw(policy), draw(st.integers(1, 3))


@given(windows(), st.integers(0, 9))
def test_every_rank_gets_the_pieces_of_the_same_changed_rows(
    window: tuple[Any, Batching, int], seed: int
) -> None:
    rows, batching, ranks = window
    before = rows.ids.copy()
    plan, reader = plan_in_memory([rows], batching, micro_batches_per_step=2)
    row_map = RowMap(masked, VOCABULARY_SIZE, seed)

    def made(world_size: int) -> dict[tuple[int, int], tuple[int, int]]:
        found = {}
        for rank in range(world_size):
            maker = WindowMaker(plan, reader, rank, world_size, row_map=row_map)
            share = maker.make(Position(0, 0, 0))
            starts = np.zeros_like(share.rows) if share.starts is None else share.starts
            at = 0
            for row, start, length in zip(share.rows, starts, share.piece_lengths, strict=True):
                for place in range(start, start + length):
                    value = tuple(int(share.columns[name][at]) for name in ("input_ids", "labels"))
                    assert found.setdefault((int(row), place), value) == value
                    at += 1
        return found

    alone = made(1)
    assert alone == made(ranks)
    begins = np.cumsum(rows.lengths) - rows.lengths
    for (row, place), (value, label) in alone.items():
        own = before[begins[row] + place]
        assert (value, label) in {(own, IGNORED), (0, own)}
    assert (rows.ids == before).all(), "the function changed the reader's rows"


@given(st.lists(st.integers(1, 25), min_size=1, max_size=25), st.sampled_from(["tag", "complete"]))
def test_columns_changed_in_place_are_the_batches(lengths: list[int], task: Task) -> None:
    rows = random_rows(np.array(lengths), task)
    plan, reader = plan_in_memory([rows], Padded(1000), shuffle=False)
    row_map = RowMap(reversed_ids, VOCABULARY_SIZE, 0)
    changed, plain = (
        WindowMaker(plan, reader, 0, 1, row_map=each).make(Position(0, 0, 0))
        for each in (row_map, None)
    )
    at = 0
    for length in plain.piece_lengths.tolist():
        place = slice(at, at + length)
        expected = plain.columns["input_ids"][place][::-1]
        assert (changed.columns["input_ids"][place] == expected).all()
        at += length
    assert changed.columns.keys() == plain.columns.keys()
    assert (changed.num_targets == plain.num_targets).all()


def halved(columns: Columns, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    return {"advantage": columns["advantage"] / 2, "step": -columns["step"]}


def test_kept_columns_are_mapped_in_their_dtypes() -> None:
    rows = random_rows(np.array([5, 3, 9]))
    rows.per_token["advantage"] = np.arange(17, dtype=np.float32)
    rows.per_token["step"] = np.arange(17, dtype=np.int8)
    plan, reader = plan_in_memory([rows], Padded(100))
    made, plain = (
        WindowMaker(plan, reader, 0, 1, row_map=each).make(Position(0, 0, 0)).columns
        for each in (RowMap(halved, VOCABULARY_SIZE, 0), None)
    )
    assert {name: values.dtype for name, values in made.items()} == {
        name: values.dtype for name, values in plain.items()
    }
    assert made["advantage"].tolist() == (plain["advantage"] / 2).tolist()
    assert made["step"].tolist() == (-plain["step"]).tolist()


def values_of(loader: ShardLoader, count: int) -> list[Any]:
    return [
        (spans(batch), batch["input_ids"].tolist(), batch["labels"].tolist())
        for batch in islice(loader, count)
    ]


@pytest.mark.parametrize("batching", [Padded(1024), Packed(256, 4, split=True)], ids=str)
def test_resumed_loader_maps_rows_as_an_uninterrupted_one(folder: Path, batching: Batching) -> None:
    first, plain = (open_loader(folder, batching, map=each, epochs=None) for each in (masked, None))
    before, after = values_of(first, 5), values_of(first, 30)
    again = open_loader(folder, batching, map=masked, epochs=None)
    assert values_of(again, 5) == before
    state = again.state_dict()
    resumed = open_loader(folder, batching, map=masked, epochs=None)
    resumed.load_state_dict(state)
    assert values_of(resumed, 30) == after
    same_rows = values_of(plain, 35)
    assert [rows for rows, _, _ in same_rows] == [rows for rows, _, _ in before + after]
    assert plain.state_dict() == resumed.state_dict(), "the state depends on the function"


def test_epochs_and_seeds_give_a_row_other_numbers(folder: Path) -> None:
    def masks(seed: int, epochs: int) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        loader = open_loader(folder, Padded(4096), map=masked, seed=seed, epochs=epochs)
        for batch in loader:
            for number, (row, start, length) in enumerate(spans(batch)):
                if not start and length > 50:
                    found.setdefault(row, []).append(batch["labels"][number, :50].tolist())
        return found

    first, second = masks(0, 2), masks(1, 1)
    assert all(len({*map(str, each)}) == len(each) == 2 for each in first.values())
    assert all(second[row][0] not in first[row] for row in second)


def longer(columns: Columns, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    return {"input_ids": np.append(columns["input_ids"], 1)}


def failing(columns: Columns, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    raise ValueError("no\nluck")


WRONG: list[tuple[Any, str]] = [
    (longer, r"row \d+ has (\d+) tokens, but the function returned `input_ids` of shape"),
    (failing, r"the function failed on row \d+: ValueError: no luck"),
    (lambda columns, rng: [1], r"the function returned list for row \d+. Expected a dict"),
    (lambda columns, rng: {"ids": [1]}, r"returned \['ids'\] for row \d+\. Expected .* input_ids"),
    (lambda columns, rng: {"input_ids": columns["input_ids"] * 0 - 1.0}, "wrong `input_ids`"),
    (lambda columns, rng: {"input_ids": columns["input_ids"] + 60_000}, r"from 0 to 999\."),
    (lambda columns, rng: {"labels": columns["input_ids"] * 0 - 1}, r"from 0 to 999, or -100\."),
    (
        lambda columns, rng: masked(columns, rng) if columns["input_ids"][0] % 2 else {},
        "Return the same columns",
    ),
    ("mask", "`map`='mask'"),
]


@pytest.mark.parametrize(("function", "message"), WRONG)
def test_wrong_function_is_refused_in_a_line(
    folder: Path, function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        next(iter(open_loader(folder, map=function)))


def test_failure_on_a_row_of_a_mixture_names_its_data_set(
    folder: Path, make_dataset: MakeDataset
) -> None:
    other = make_dataset([3777] * 5, num_shards=1)
    mixture: Any = Mixture({folder: 1, other: 1})

    def failing_on_other(columns: Columns, rng: np.random.Generator) -> Columns:
        if len(columns["input_ids"]) == 3777:
            raise ValueError("no luck")
        return columns

    with pytest.raises(ConfigError, match=rf"failed on row [0-4] of {other}: ValueError: no luck"):
        next(iter(open_loader(mixture, map=failing_on_other)))


def test_labels_of_rows_with_a_class_are_refused() -> None:
    plan, reader = plan_in_memory([random_rows(np.array([5, 3]), "classify")], Padded(100))
    maker = WindowMaker(plan, reader, 0, 1, row_map=RowMap(masked, VOCABULARY_SIZE, 0))
    with pytest.raises(ConfigError, match=r"returned \['input_ids', 'labels'\] for row"):
        maker.make(Position(0, 0, 0))
