"""Extensions: a store, and a column of a task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data_sets import random_rows, write_rows
from support.delivery import (
    open_loader,
    spans,
)
from support.stores import MemoryStore, keep_in_memory

from tokenfeed import Manifest, Mixture, Padded
from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format import schema, store
from tokenfeed.pipeline.format.schema import Column


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
