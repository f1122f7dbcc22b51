"""Exported rows, read as each format's own project reads them."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from support.data_sets import byte_tokenizer, lists_of, random_rows, write_rows

import tokenfeed
from tokenfeed.pipeline.errors import ConfigError, ShardFormatError
from tokenfeed.pipeline.format.kinds import REJECTED
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import Task, task_columns
from tokenfeed.tools.data_sets.export import FORMATS, Format, export_data_set

Lists = list[list[int]]


def megatron(folder: Path, split: str) -> Lists:
    """By the layout of `IndexedDataset`."""
    index = (folder / f"{split}.idx").read_bytes()
    assert index[:17] == b"MMIDIDX\0\0" + (1).to_bytes(8, "little")
    dtype = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}[index[17]]
    rows, documents = np.frombuffer(index, np.uint64, 2, 18).astype(int)
    lengths = np.frombuffer(index, np.int32, rows, 34)
    pointers = np.frombuffer(index, np.int64, rows, 34 + 4 * rows)
    ends = np.frombuffer(index, np.int64, documents, 34 + 12 * rows)
    assert len(index) == 34 + 12 * rows + 8 * documents
    assert ends.tolist() == list(range(rows + 1))
    data = (folder / f"{split}.bin").read_bytes()
    return [
        np.frombuffer(data, dtype, length, pointer).tolist()
        for length, pointer in zip(lengths.tolist(), pointers.tolist(), strict=True)
    ]


def nanogpt(folder: Path, split: str) -> Lists:
    return [np.memmap(folder / f"{split}.bin", np.uint16, "r").tolist()]


def llm_c(folder: Path, split: str) -> Lists:
    found: list[int] = []
    for file in sorted(folder.glob(f"{split}_*.bin")):
        header = np.fromfile(file, np.int32, 256)
        dtype = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}[header[0], header[1]]
        ids = np.fromfile(file, dtype, offset=1024)
        assert len(ids) == header[2]
        found += ids.tolist()
    return [found]


def olmo(folder: Path, split: str) -> Lists:
    with gzip.open(folder / f"{split}.csv.gz", "rt") as file:
        lines = [line.strip().split(",") for line in file]
    assert [int(line[2]) for line in lines] == list(range(len(lines)))
    assert all(line[3:] == ['"corpus.txt"', line[2]] for line in lines)
    ids = np.fromfile(folder / f"{split}.npy", _dtype(folder))
    return [ids[int(line[0]) : int(line[1])].tolist() for line in lines]


def arrow(folder: Path, split: str) -> Lists:
    return cast(Lists, parquet.read_table(folder / f"{split}.parquet")["input_ids"].to_pylist())


def _dtype(folder: Path) -> Any:
    return np.uint16 if "narrow" in folder.parts else np.uint32


READERS: dict[Format, Callable[[Path, str], Lists]] = {
    "megatron": megatron,
    "nanogpt": nanogpt,
    "llm.c": llm_c,
    "olmo": olmo,
    "parquet": arrow,
}
WITHOUT_ROWS = ("nanogpt", "llm.c")
VOCABULARIES = {"narrow": 50_000, "wide": 200_000}


def test_every_format_is_read_here() -> None:
    assert set(READERS) == set(FORMATS) == set(get_args(Format))


@pytest.mark.parametrize("to", READERS)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    width=st.sampled_from([*VOCABULARIES]),
    shards=st.integers(1, 3),
    has_val=st.booleans(),
)
def test_exported_rows_are_those_of_the_data_set(
    tmp_path_factory: pytest.TempPathFactory,
    to: Format,
    lengths: list[int],
    width: str,
    shards: int,
    has_val: bool,
) -> None:
    folder = tmp_path_factory.mktemp("export") / width
    rows = random_rows(np.array(lengths), vocabulary_size=VOCABULARIES[width])
    splits = {"train": rows, "validation": rows.slice(0, 1)}
    if has_val:
        splits["val"] = rows.slice(0, len(rows))
    folder.mkdir()
    data = write_rows(folder / "data", splits, VOCABULARIES[width], min(shards, len(lengths)))
    if (to, width) == ("nanogpt", "wide"):
        with pytest.raises(ConfigError, match="ids of two bytes, and the tokenizer has 200,000"):
            export_data_set(str(data), folder / "out", to)
        assert not (folder / "out").exists()
        return
    exported = export_data_set(str(data), folder / "out", to)
    assert exported["splits"] == {name: len(wanted) for name, wanted in splits.items()}
    for split, wanted in splits.items():
        is_named_val = (to, split) == ("nanogpt", "validation") and not has_val
        name = "val" if is_named_val else split
        found, expected = READERS[to](folder / "out", name), lists_of(wanted)
        if to in WITHOUT_ROWS:
            expected = [[token for row in expected for token in row]]
        assert found == expected
    with pytest.raises(ConfigError, match="is not empty"):
        export_data_set(str(data), folder / "out", to)


def test_large_splits_become_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenfeed.tools.data_sets.export.LLM_C_TOKENS", 1000)
    rows = random_rows(np.full(700, 300), vocabulary_size=50_000)
    data = write_rows(tmp_path / "narrow", {"train": rows}, 50_000, 3)
    export_data_set(str(data), tmp_path / "c", "llm.c")
    assert len(list((tmp_path / "c").iterdir())) == 210
    assert llm_c(tmp_path / "c", "train") == [rows.ids.tolist()]


@pytest.mark.parametrize("task", ["classify", "score", "tag", "complete"])
def test_parquet_keeps_every_column_and_others_say_what_they_leave_out(
    task: Task, tmp_path: Path
) -> None:
    rows = random_rows(np.arange(1, 40), task, pairs=task == "classify")
    (column,) = {*rows.per_token, *rows.per_row} & {"label", "score", "labels", "prompt_length"}
    columns = task_columns(task, pairs=task == "classify")
    data = write_rows(tmp_path / "data", {"train": rows}, 1000, task=task, columns=columns)
    kept = export_data_set(str(data), tmp_path / "parquet", "parquet")
    assert kept["left_out"] == []
    table = parquet.read_table(tmp_path / "parquet/train.parquet")
    for name, values in {**rows.per_token, **rows.per_row}.items():
        found = table[name].combine_chunks()
        found = found.flatten() if name in rows.per_token else found
        np.testing.assert_array_equal(found.to_numpy(zero_copy_only=False), values)
    assert column in export_data_set(str(data), tmp_path / "bin", "megatron")["left_out"]


@pytest.mark.parametrize("to", READERS)
def test_pairs_are_exported_with_their_kinds_or_not_at_all(to: Format, tmp_path: Path) -> None:
    """The rejected answer followed the chosen one, as one text to learn."""
    rows = random_rows(np.full(40, 20), "chat")
    rows.per_token["kinds"].reshape(40, 20)[:, 10:] |= REJECTED
    data = write_rows(tmp_path / "data", {"train": rows}, 1000, task="chat")
    if to == "parquet":
        assert export_data_set(str(data), tmp_path / "out", to)["left_out"] == []
        return
    with pytest.raises(ConfigError, match=f"pairs, and {to} would join .* Use `--to parquet`"):
        export_data_set(str(data), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_damage_makes_no_folder(tmp_path: Path) -> None:
    rows = random_rows(np.full(50, 20))
    data = write_rows(tmp_path / "data", {"train": rows}, 1000)
    shard = data / Manifest.read(data).splits["train"].shards[0].file
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ShardFormatError):
        export_data_set(str(data), tmp_path / "out", "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_killed_export_leaves_no_folder_and_the_next_one_is_whole(tmp_path: Path) -> None:
    rows = random_rows(np.full(50, 20))
    data = write_rows(tmp_path / "data", {"train": rows}, 50_000)
    left = tmp_path / "out.tmp"
    left.mkdir()
    (left / "train.bin").write_bytes(b"half")
    (tmp_path / "out").mkdir()
    exported = export_data_set(str(data), tmp_path / "out", "megatron")
    assert exported["files"] == ["train.bin", "train.idx"]
    assert megatron(tmp_path / "out", "train") == lists_of(rows)
    assert not left.exists()


def test_olmo_names_files_whose_name_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"in\xff.jsonl")).write_text('{"text": "a b"}\n' * 3)
    byte_tokenizer(["a b"]).save(str(tmp_path / "tokenizer.json"))
    source, out = tmp_path / os.fsdecode(b"in\xff.jsonl"), tmp_path / "out"
    tokenfeed.pretokenize(source, out, tokenizer=tmp_path / "tokenizer.json", validation=0)
    export_data_set(str(out), tmp_path / "olmo", "olmo")
    table = gzip.decompress((tmp_path / "olmo/train.csv.gz").read_bytes()).decode()
    assert table.count(r"in\udcff.jsonl") == 3
