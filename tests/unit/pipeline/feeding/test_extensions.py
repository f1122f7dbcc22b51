"""What others may add is added in one place: a policy, a store, a task's column, an accelerator."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_sets import random_rows, write_rows
from support.delivery import (
    MakeDataset,
    open_loader,
    realistic_lengths,
    small_batches,
    spans,
)
from support.stores import MemoryStore, keep_in_memory

from tokenfeed import Manifest, Mixture, Padded
from tokenfeed.pipeline.errors import ConfigError, ManifestError, ResumeError
from tokenfeed.pipeline.format import schema, store
from tokenfeed.pipeline.format.schema import Column
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.pipeline.planning.policies import policy_of
from tokenfeed.pipeline.planning.policy import (
    Arranged,
    Batching,
    LongRows,
    cut_rows,
    random_order,
)


@dataclass(frozen=True, slots=True)
class AtRandom(Batching):
    """Rows in random order, whatever their length."""

    batch_size: int
    multiple_of: int = 1
    long_rows: LongRows = "cut"

    @property
    def longest_piece(self) -> int:
        return 1 << 30

    def tokens_per_batch(self, mean_tokens: float) -> int:
        return int(self.batch_size * mean_tokens)

    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        rows = random_order(len(lengths), draw.key) if draw else np.arange(len(lengths))
        steps = np.append(np.arange(0, len(rows), self.batch_size * step_size), len(rows))
        return Arranged(cut_rows(lengths, self.longest_piece), rows, steps)


@pytest.fixture
def folder(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_batches(monkeypatch)
    return make_dataset(realistic_lengths(200), num_shards=2)


def test_a_policy_of_another_project_delivers_every_row_once_to_all_ranks(folder: Path) -> None:
    rows = []
    for rank in range(2):
        loader = open_loader(folder, AtRandom(4), rank=rank, world_size=2, micro_batches_per_step=2)
        batches = [batch for batch in loader if not batch.is_filler]
        assert max(len(batch["input_ids"]) for batch in batches) == 4
        rows += [row for batch in batches for row, _, _ in spans(batch)]
    assert sorted(rows) == list(range(200))


def test_a_state_knows_a_policy_of_another_project(folder: Path) -> None:
    loader = open_loader(folder, AtRandom(4))
    batches = iter(loader)
    given = [spans(next(batches)) for _ in range(3)]
    resumed = open_loader(folder, AtRandom(4))
    resumed.load_state_dict(loader.state_dict())
    assert given + [spans(b) for b in resumed] == [
        spans(b) for b in open_loader(folder, AtRandom(4))
    ]
    with pytest.raises(ResumeError, match=r"AtRandom\(batch_size=4.*AtRandom\(batch_size=5"):
        open_loader(folder, AtRandom(5)).load_state_dict(loader.state_dict())


def _half(arranged: Arranged) -> Arranged:
    return arranged._replace(order=arranged.order[::2], step_offsets=np.array([0, 100]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_half, "`order` does not have every sequence once"),
        (lambda a: a._replace(order=a.order * 0), "`order` does not have every sequence once"),
        (lambda a: a._replace(order=a.order - 5), "`order` does not have every sequence once"),
        (lambda a: a._replace(step_offsets=a.step_offsets[:-3]), "`step_offsets` do not cut"),
        (lambda a: a._replace(step_offsets=np.repeat(a.step_offsets, 2)), "`step_offsets` do not"),
        (lambda a: a._replace(cut=cut_rows(np.ones(200, int), 1)), "`cut` does not have every"),
        (lambda a: a._replace(packed=(a.order[:-1], np.arange(200))), "`packed` does not have"),
        (lambda a: a._replace(packed=(a.order, a.order * 0)), "`packed` has an empty sequence"),
    ],
)
def test_a_policy_that_loses_or_repeats_rows_is_refused_by_name(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Arranged], Arranged],
    message: str,
) -> None:
    whole = AtRandom.arrange
    monkeypatch.setattr(AtRandom, "arrange", lambda *arguments: spoil(whole(*arguments)))
    with pytest.raises(ConfigError, match=rf"^AtRandom\(batch_size=4.*once: {message}"):
        list(open_loader(folder, AtRandom(4), window_tokens=10**9))


def test_a_policy_that_a_state_could_not_name_is_refused(folder: Path) -> None:
    class Plain(Batching):
        multiple_of, long_rows, longest_piece = 1, "cut", 100  # type: ignore[assignment]
        tokens_per_batch = arrange = AtRandom.arrange  # type: ignore[assignment]

    @dataclass
    class PlainAndChangeable(Plain):
        pass

    for policy in (Plain(), PlainAndChangeable()):
        with pytest.raises(ConfigError, match=r"Plain.*Write `@dataclass\(frozen=True\)` above"):
            open_loader(folder, policy)


@dataclass(frozen=True)
class Chosen(AtRandom):
    order: str = "random"

    def __post_init__(self) -> None:
        {"random": 0}[self.order]


@pytest.mark.parametrize(
    "said", ["Chosen(batch_size=4, order='sorted')", "AtRandom(batch_size=4, size=5)"]
)
def test_a_policy_of_another_project_that_refuses_its_values_is_one_line(said: str) -> None:
    assert policy_of("Chosen(batch_size=4)") == Chosen(4)
    with pytest.raises(ConfigError, match=rf"^{re.escape(said)}: unknown policy"):
        policy_of(said)


@pytest.fixture
def remote(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of `folder`, which `memory://data` names."""
    return keep_in_memory(monkeypatch, folder)


@pytest.mark.usefixtures("remote")
def test_a_store_of_another_kind_gives_the_same_batches(folder: Path) -> None:
    there: Any = "memory://data"
    assert Manifest.read(there) == Manifest.read(folder)
    expected = [spans(batch) for batch in open_loader(folder)]
    assert [spans(batch) for batch in open_loader(there)] == expected
    mixed = open_loader(Mixture({there: 1.0}))  # type: ignore[arg-type]
    assert len(list(mixed)) > 1
    assert list(mixed.stats().epoch_tokens) == ["memory://data"]


def test_what_a_store_lacks_is_named_as_the_store_names_it(remote: dict[str, bytes]) -> None:
    there: Any = "memory://data"
    loader = open_loader(there)
    del remote["train/00000.arrow"]
    with pytest.raises(Exception, match=r"^memory://data/train/00000\.arrow: not found, but"):
        list(loader)
    del remote["manifest.json"]
    with pytest.raises(ManifestError, match=r"^memory://data/manifest\.json: not found, so"):
        open_loader(there)


def test_an_error_of_a_store_without_errno_says_what_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Down(MemoryStore):
        def read(self, name: str) -> bytes:
            raise TimeoutError

    monkeypatch.setitem(store.STORES, "memory", lambda path: Down(path, {}))
    with pytest.raises(ManifestError, match=r"manifest\.json: cannot be read: TimeoutError\."):
        Manifest.read("memory://data")
    with pytest.raises(ManifestError, match=r"manifest\.json: cannot be read: .*null"):
        Manifest.read("a\0b")


def test_a_scheme_that_nobody_has_registered_is_refused() -> None:
    there: Any = "s4://bucket/data"
    with pytest.raises(ConfigError, match=r"^s4://bucket/data: no store for `s4://`"):
        open_loader(there)


@pytest.mark.parametrize("dtype", ["int16", "float32"])
@pytest.mark.parametrize("per", ["row", "token"])
def test_a_column_says_by_its_role_what_a_batch_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per: str, dtype: str
) -> None:
    lengths, less = [5, 3, 8], 0.25 if dtype == "float32" else 0
    grade = Column(name="grade", dtype=dtype, per=per)  # type: ignore[arg-type]
    weight = Column(name="kind", dtype="uint8", per="token")
    monkeypatch.setitem(schema.ROLES, "grade", "target")
    monkeypatch.setitem(schema.ROLES, "kind", "input")
    rows = random_rows(np.array(lengths))
    size = len(lengths) if per == "row" else sum(lengths)
    (rows.per_row if per == "row" else rows.per_token)["grade"] = (np.arange(size) + less).astype(
        dtype
    )
    rows.per_token["kind"] = np.ones(sum(lengths), np.uint8)
    folder = write_rows(
        tmp_path / "data", {"train": rows}, 1000, task="lm", columns=(grade, weight)
    )
    (batch,) = open_loader(folder, Padded(100), shuffle=False)
    assert list(batch) == ["input_ids", "attention_mask", "kind", "labels"]
    assert batch["kind"].sum() == sum(lengths)
    order = batch.rows.tolist()
    if per == "row":
        assert batch["labels"].tolist() == [row + less for row in order]
    else:
        starts = np.cumsum([0, *lengths])
        expected = [[at + less for at in range(starts[row], starts[row + 1])] for row in order]
        assert batch.num_targets == sum(lengths)
        assert [labels[labels >= 0].tolist() for labels in batch["labels"]] == expected
