"""`--task ids`: rows of token ids are copied exactly, and wrong ids are rejected by record."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import feather, parquet
from tokenizers import Tokenizer, models

from tokenfeed import Packed, ShardLoader, pretokenize
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.tools.corpus.records import FieldKind, Unusable, checker
from tokenfeed.tools.data_sets.verify import find_problems

SIZE = 700
ROWS = [[random.Random(row).randrange(SIZE) for _ in range(row % 40)] for row in range(300)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vocabulary = {f"w{number}": number for number in range(SIZE)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(file))
    return file


def rows_of(folder: Path) -> dict[int, list[int]]:
    files = [
        shard.file for split in Manifest.read(folder).splits.values() for shard in split.shards
    ]
    tables = [feather.read_table(folder / file, memory_map=False) for file in files]
    return {
        record: ids
        for table in tables
        for record, ids in zip(
            table["origin_record"].to_pylist(), table["input_ids"].to_pylist(), strict=True
        )
    }


def sources(folder: Path) -> dict[str, Any]:
    """The same rows in every form."""
    lines = "".join(json.dumps({"input_ids": row, "other": "x"}) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines)
    table = pa.table({"input_ids": pa.array(ROWS, pa.list_(pa.uint16()))})
    parquet.write_table(table, folder / "rows.parquet", row_group_size=70)
    feather.write_feather(table, folder / "rows.arrow", compression="zstd")
    return {
        "lines": str(folder / "rows.jsonl"),
        "parquet": str(folder / "rows.parquet"),
        "arrow": str(folder / "rows.arrow"),
        "list": [{"input_ids": row} for row in ROWS],
        "polars": polars.DataFrame({"input_ids": ROWS}),
    }


@pytest.mark.slow
def test_ids_are_copied_from_every_source(tmp_path: Path, tokenizer: Path) -> None:
    expected = {number: row for number, row in enumerate(ROWS) if row}
    for name, source in sources(tmp_path).items():
        out = tmp_path / f"out-{name}"
        made = pretokenize(source, out, task="ids", tokenizer=tokenizer)
        assert rows_of(out) == expected
        assert (made.manifest.task, made.summary.empty) == ("lm", len(ROWS) - len(expected))
        assert list(find_problems(open_store(out), made.manifest)) == []
    with ShardLoader(out, batching=Packed(64, 2), num_workers=0, epochs=1) as loader:
        tokens = sum(batch.num_tokens for batch in loader)
    assert tokens == made.manifest.split("train").tokens


def test_wrong_ids_are_rejected_with_their_record(tmp_path: Path, tokenizer: Path) -> None:
    values = [[1, -2], [SIZE], [1, None], "abc", [1.5], [[1]], None, [True], [2**64], [2**63], [7]]
    rows: list[dict[str, Any]] = [{"input_ids": value} for value in values]
    made = pretokenize([*rows, {}], tmp_path / "out", task="ids", tokenizer=tokenizer)
    assert [reject["record"] for reject in made.rejects] == [*range(10), 11]
    assert all("input_ids" in reject["reason"] for reject in made.rejects)
    assert f"has the id {SIZE}, but the tokenizer has {SIZE} ids" in made.rejects[1]["reason"]
    assert rows_of(tmp_path / "out") == {10: [7]}


def test_wrong_ids_of_a_table_are_rejected_with_their_record(
    tmp_path: Path, tokenizer: Path
) -> None:
    values = [[1, None], [3, 4], None, [-1], [SIZE], [], [5]]
    parquet.write_table(
        pa.table({"mine": pa.array(values, pa.large_list(pa.int32()))}), tmp_path / "a.parquet"
    )
    field = {"input_ids": "mine"}
    made = pretokenize(
        tmp_path / "a.parquet", tmp_path / "out", task="ids", tokenizer=tokenizer, field=field
    )
    assert [reject["record"] for reject in made.rejects] == [0, 2, 3, 4]
    assert rows_of(tmp_path / "out") == {1: [3, 4], 6: [5]}


def test_ids_need_the_tokenizer_that_made_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`--task ids` needs `--tokenizer`"):
        pretokenize([{"input_ids": [1]}], tmp_path / "out", task="ids")


@example([True, 1])
@example([2**63, 0])
@example([2**63 - 1])
@given(st.lists(st.integers(-(2**65), 2**65) | st.floats() | st.booleans() | st.none() | st.text()))
def test_only_lists_of_whole_numbers_are_ids(value: list[Any]) -> None:
    is_right = all(type(one) is int and 0 <= one < 2**63 for one in value)
    try:
        ids = checker(FieldKind.IDS)(value)
    except Unusable:
        assert not is_right
    else:
        assert is_right
        assert ids.dtype == np.int64
        assert ids.tolist() == value
