"""The loader inside torchtitan: what its own data tests state, and the limits that they state.

TORCHTITAN=CHECKOUT runs these tests over the torchtitan of a checkout that has `components/data`
(commit b5bcd76), which is not on PyPI. Without it, a stand-in takes the place of the base class.

These tests hold what the adapter adds: its config, batches without a dimension for rows, positions
and labels, and states inside a checkpoint of torchtitan. What its own data tests
(tests/unit_tests/components/data/test_grain_data.py) state of any loader (each row once an epoch on
disjoint ranks, other orders in other epochs, shares of a mixture, a restore on other ranks, long
documents and the tail of the data) is what tests/golden/test_delivery.py and
tests/unit/pipeline/ hold of ShardLoader.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp
from support.data_sets import MakeDataset, rows_of_ids, write_rows

from tokenfeed.pipeline.errors import ConfigError, ResumeError

VOCABULARY = 60_000
LENGTHS = [5, 1, 40, 16, 7, 2, 33, 15, 6, 100, 4, 9, 3] * 4
ROW, BATCH = 16, 64
IGNORED = -100
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of `LENGTHS` whose ids count 1, 2, 3, ..., so that an id names its place."""
    return write_counting(tmp_path_factory.mktemp("titan") / "counting", LENGTHS)


def write_counting(folder: Path, lengths: list[int], first: int = 1, split: str = "train") -> Path:
    ids = np.arange(first, first + sum(lengths))
    rows = rows_of_ids(ids, np.asarray(lengths), VOCABULARY)
    return write_rows(folder, {split: rows}, VOCABULARY)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the loader, over torchtitan or a stand-in."""
    if path := os.environ.get("TORCHTITAN"):
        monkeypatch.syspath_prepend(path)
    try:
        import torchtitan.components.data.loader  # noqa: F401
    except ImportError:

        class BaseDataLoader:
            @dataclass(kw_only=True, slots=True)
            class Config:
                pass

        name = "torchtitan"
        for part in ("", ".components", ".components.data", ".components.data.loader"):
            monkeypatch.setitem(sys.modules, name + part, ModuleType(name + part))
        module: Any = sys.modules["torchtitan.components.data.loader"]
        module.BaseDataLoader = BaseDataLoader
    monkeypatch.delitem(sys.modules, "tokenfeed.integrations.torchtitan", raising=False)
    return importlib.import_module("tokenfeed.integrations.torchtitan").ShardDataLoader


@pytest.fixture
def opened(adapter: Any, documents: Path) -> Open:
    """Open a loader as torchtitan does: (path, rank, ranks, tokens of a batch, settings)."""

    def make(
        path: Any = documents, rank: int = 0, ranks: int = 1, batch: int = BATCH, **s: Any
    ) -> Any:
        config = adapter.Config(path=path if isinstance(path, dict) else str(path), **s)
        config.num_workers = 0
        sizes = {"max_context_length": ROW, "num_tokens_per_batch": batch}
        return adapter(config, dp_world_size=ranks, dp_rank=rank, tokenizer=None, **sizes)

    return make


def plain(batches: Iterable[Any], count: int | None = None) -> list[list[list[int]]]:
    """Inputs, positions and labels of some batches."""
    return [
        [inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()]
        for inputs, labels in islice(batches, count)
    ]


def real(batches: list[list[list[int]]]) -> list[int]:
    """Ids without padding, which is 0, of batches that have labels."""
    return [id for ids, _, labels in batches if max(labels) > 0 for id in ids if id]


WHOLE = list(range(1, sum(LENGTHS) + 1))


@pytest.mark.parametrize("whole_documents", [False, True])
def test_positions_and_labels_stay_inside_documents(opened: Open, whole_documents: bool) -> None:
    starts = {start + 1 for start in np.cumsum([0, *LENGTHS]).tolist()}
    if whole_documents:  # a longer document is cut into pieces
        sizes = zip(sorted(starts), LENGTHS, strict=False)
        starts |= {piece for start, size in sizes for piece in range(start, start + size, ROW)}
    batches = plain(opened(repeat=False, whole_documents=whole_documents))
    rows = np.array(batches).transpose(0, 2, 1).reshape(-1, ROW, 3)
    for ids, positions, labels in rows.transpose(0, 2, 1):
        continues = (ids[1:] == ids[:-1] + 1) & ~np.isin(ids[1:], list(starts))
        expected = np.append(0, np.where(continues, positions[:-1] + 1, 0))
        assert (positions == expected)[ids > 0].all()
        assert (labels == np.append(np.where(continues, ids[1:], IGNORED), IGNORED)).all()
    assert sorted(real(batches)) == WHOLE


def test_labels_of_a_prompt_stay_masked(opened: Open, make_dataset: MakeDataset) -> None:
    folder = make_dataset([9, 12, 5] * 8, task="complete")
    batches = plain(opened(folder, repeat=False, whole_documents=True))
    learnt = [label for _, _, labels in batches for label in labels if label != IGNORED]
    assert 0 < len(learnt) < len(real(batches)) - 24


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["concatenated", "whole documents", "mixture"])
def test_restore_is_exact_on_each_rank(
    opened: Open, documents: Path, tmp_path: Path, kind: str
) -> None:
    other = write_counting(tmp_path / "other", [11, 4, 23] * 6, first=20_001)
    path = {str(documents): 0.67, str(other): 0.33} if kind == "mixture" else documents
    for rank in range(2):
        settings = {"rank": rank, "ranks": 2, "whole_documents": kind == "whole documents"}
        loader = opened(path, **settings)
        plain(loader, 9)  # in the second epoch of the documents
        dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / f"checkpoint{rank}")
        expected = plain(loader, 6)
        again = opened(path, **settings)
        again.load_state_dict({})
        dcp.load({"dataloader": again}, checkpoint_id=tmp_path / f"checkpoint{rank}")
        assert plain(again, 6) == expected


@pytest.mark.parametrize(("batch", "length"), [(40, 16), (0, 16), (40, 0), (40, -8)])
def test_batch_of_partial_rows_is_rejected(
    adapter: Any, documents: Path, batch: int, length: int
) -> None:
    sizes = {"max_context_length": length, "num_tokens_per_batch": batch}
    with pytest.raises(ConfigError, match=f"not a multiple of `max_context_length`={length}"):
        adapter(adapter.Config(path=str(documents)), dp_world_size=1, dp_rank=0, **sizes)


def test_config_works_in_torchtitan(adapter: Any, documents: Path) -> None:
    config = adapter.Config(path=str(documents), num_workers=0)
    if not hasattr(config, "build"):
        pytest.skip("needs TORCHTITAN=CHECKOUT")
    assert config.to_dict()["path"] == str(documents)
    validated = replace(config, repeat=False)  # torchtitan's Validator
    sizes = {"max_context_length": ROW, "num_tokens_per_batch": BATCH}
    with_sizes = validated.build(dp_world_size=1, dp_rank=0, tokenizer=None, **sizes)
    assert sorted(real(plain(with_sizes))) == WHOLE


def test_unknown_state_is_rejected(opened: Open) -> None:
    loader = opened()
    with pytest.raises(ResumeError, match="version"):
        loader.load_state_dict(loader.state_dict() | {"version": 99})
