"""Parquet and Arrow files that are damaged, or cut short under the reader."""

import json
import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather
from support.corpora import GROUP, ROWS, Found, random_texts, read, write_batches, write_encrypted

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.blocks import damage_reason
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units, read_records

ZSTD_FRAME = b"\x28\xb5\x2f\xfd"


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place : place + 64] = os.urandom(64)
    path.write_bytes(data)


def check_one_group_is_lost(found: Found, rows: list[str], group: int) -> None:
    good, bad = found
    kept = {n: text.encode() for n, text in enumerate(rows) if n // GROUP != group}
    assert {n: text for n, text in good.items() if n // GROUP != group} == kept
    ((record, reason),) = bad.items()
    assert record // GROUP == group
    assert f"row group {group} is damaged, records {record} to {(group + 1) * GROUP - 1}" in reason
    assert not any(n >= record for n in good if n // GROUP == group)


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_corrupt_page_costs_its_row_group(tmp_path: Path, group: int, late: bool) -> None:
    path, rows = tmp_path / "a.parquet", random_texts()
    table = pa.table({"text": rows})
    options = {"use_dictionary": False, "data_page_size": 1 << 16, "write_page_checksum": True}
    pq.write_table(table, path, row_group_size=GROUP, **options)
    column = pq.read_metadata(path).row_group(group).column(0)
    tenth = column.total_compressed_size // 10  # what stands in a page's header may not matter
    damage(path, column.data_page_offset + (9 if late else 1) * tenth)
    check_one_group_is_lost(read(path), rows, group)
    check_one_group_is_lost(read(path, shard_bytes=1 << 20), rows, group)


@pytest.mark.parametrize("encrypted", ["text", "other"])
def test_an_encrypted_column_costs_its_row_groups_and_no_process(
    tmp_path: Path, encrypted: str
) -> None:
    path, table = tmp_path / "a.parquet", pa.table({"text": ["some text"] * 5, "other": range(5)})
    write_encrypted(path, table, encrypted)
    good, bad = read(path)
    if encrypted == "text":
        assert good == {}
        assert bad[0].startswith("row group 0 is damaged, records 0 to 4 cannot be read: ")
    else:
        assert list(good.values()) == [b"some text"] * 5


def test_a_footer_with_a_list_of_another_length_ends_no_process(tmp_path: Path) -> None:
    path, table = (
        tmp_path / "a.parquet",
        pa.table({"text": ["some text"] * 6, "labels": [["a"]] * 6}),
    )
    pq.write_table(table, path, store_schema=False)
    sound = path.read_bytes()
    footer = range(len(sound) - 8 - pq.read_metadata(path).serialized_size, len(sound) - 8)
    begins = [length << 4 | 6 for length in range(5)]  # of lists of i64
    places = [place for place in footer if sound[place] in begins]
    for place, begin in product(places, begins):
        data = bytearray(sound)
        data[place] = begin
        path.write_bytes(data)
        good, bad = read(path)
        assert bad or list(good.values()) == [b"some text"] * 6


def test_a_corrupt_record_batch_costs_itself(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.arrow", random_texts()
    starts = write_batches(path, rows, "zstd")
    damage(path, path.read_bytes().index(ZSTD_FRAME, starts[1]))
    good, bad = read(path)
    assert list(good.values()) == [row.encode() for row in rows[:GROUP] + rows[2 * GROUP :]]
    assert list(bad) == [GROUP]
    assert bad[GROUP].startswith("record batch 1 is damaged: ")
    assert [*good] == [*range(GROUP), *range(GROUP + 1, ROWS - GROUP + 1)]


def test_batches_behind_damaged_header_keep_distinct_numbers(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.arrow", random_texts()
    starts = write_batches(path, rows, None)
    data = bytearray(path.read_bytes())
    data[starts[0] + 8 : starts[0] + 40] = b"\xff" * 32
    path.write_bytes(data)
    (source,) = find_corpus((str(path),), out=tmp_path / "out", field="text").sources
    numbers: list[int] = []
    for unit in cut_units([source], 1):
        for records in read_records(unit.parts[0], {"text": FieldKind.TEXT}):
            numbers += records.numbers.tolist()
    assert len(numbers) == len(set(numbers)) >= ROWS - GROUP
    assert numbers == sorted(numbers)


def test_offsets_that_lead_nowhere_are_damage_and_no_crash(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.arrow", random_texts()
    starts = write_batches(path, rows, None)
    data = bytearray(path.read_bytes())
    place = data.index((47).to_bytes(4, "little") + (94).to_bytes(4, "little"), starts[1])
    data[place : place + 8] = b"\xff\xff\xff\x7f\x00\x00\x00\x80"
    path.write_bytes(data)
    good, bad = read(path)
    assert all(reason.startswith("record batch 1 is damaged: ") for reason in bad.values())
    assert len(good) + 4096 == ROWS


def test_damaged_offsets_inside_lists_and_objects_are_damage(tmp_path: Path) -> None:
    """Python read other memory as words, or ended by a segmentation fault."""
    offsets = pa.py_buffer(np.array([0, 2, 400, 5], np.int32))
    texts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"abcde"))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3]), texts)
    false = pa.ListArray.from_buffers(
        *(pa.list_(pa.int64()), 2, [None, pa.py_buffer(np.array([0, 90, 1], np.int32))]),
        children=[pa.array([1])],
    )
    inside = pa.StructArray.from_arrays([texts], ["a"])
    for column, kind in (
        *((lists, FieldKind.WORDS), (lists, FieldKind.JSON), (inside, FieldKind.JSON)),
        *((false, FieldKind.JSON), (false, FieldKind.LABELS)),
    ):
        feather.write_feather(pa.table({"text": column}), str(tmp_path / "a.arrow"), "uncompressed")
        good, bad = read(tmp_path / "a.arrow", kind)
        assert (good, list(bad)) == ({}, [0])
        assert bad[0].startswith("record batch 0 is damaged")


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize(
    "layout",
    [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, partial(pa.list_, list_size=2)],
)
def test_every_layout_of_lists_is_read(tmp_path: Path, layout: Any, suffix: str) -> None:
    """Views and lists of a fixed size were refused for words."""
    texts, numbers = [["a", "b"], ["c", "d"], None, ["e", None]], [[1, 2], [3, 4], None, [5, None]]
    columns = {
        "words": pa.array(texts, layout(pa.string())),
        "ids": pa.array(numbers, layout(pa.int8())),
    }
    path = tmp_path / f"a.{suffix}"
    if suffix == "arrow":
        with pa.ipc.new_file(path, (table := pa.table(columns)).schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        pq.write_table(pa.table(columns), path)
    good, bad = read(path, FieldKind.WORDS, field="words")
    assert good == {0: [b"a", b"b"], 1: [b"c", b"d"]}
    assert sorted(bad) == [2, 3]
    assert bad[3] == "field `words` is null, expected text"
    good, bad = read(path, FieldKind.IDS, field="ids")
    assert {row: ids.tolist() for row, ids in good.items()} == {0: [1, 2], 1: [3, 4]}
    assert sorted(bad) == [2, 3]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv", "a.txt"])
def test_a_file_cut_short_under_the_reader_is_one_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": random_texts()}), path, row_group_size=GROUP)
    else:
        row = b'{"text": "some words"}\n' if name == "a.jsonl" else b"text\n"
        path.write_bytes(row * (1 << 20))
    sources = find_corpus((str(path),), out=tmp_path / "out", field="text").sources
    (unit,) = cut_units(sources, 10**9)
    records = read_records(unit.parts[0], {"text": FieldKind.TEXT})
    next(records)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorpusError, match=rf"{name}: changed while the corpus was read"):
        list(records)


def _write_arrow(path: Path, column: pa.Array) -> None:
    table = pa.table({"text": column})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


def test_a_damaged_index_or_offset_of_a_dictionary_is_not_followed(tmp_path: Path) -> None:
    texts, indices = pa.array(["a", "b"]), pa.array([0, 1, 1 << 30])
    beyond = pa.DictionaryArray.from_arrays(indices, texts, safe=False)
    offsets = pa.py_buffer(np.array([0, 1 << 30, 2], np.int32))
    broken = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab"))
    for number, column in enumerate(
        (beyond, pa.DictionaryArray.from_arrays(pa.array([0, 1]), broken))
    ):
        path = tmp_path / f"{number}.arrow"
        _write_arrow(path, column)
        good, bad = read(path)
        assert good == {}
        assert "record batch 0 is damaged" in bad[0]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_json_texts_beyond_max_record_are_rejected(tmp_path: Path, suffix: str) -> None:
    texts = [json.dumps(["\u00e9" * count], ensure_ascii=False) for count in (10, 198, 199, 20)]
    path = tmp_path / f"a.{suffix}"
    write = pq.write_table if suffix == "parquet" else feather.write_feather
    write(pa.table({"text": texts}), path)
    good, bad = read(path, FieldKind.JSON, max_record_bytes=400)
    assert good == {number: texts[number] for number in (0, 1, 3)}
    assert bad == {2: "field `text` has 402 bytes, more than the 400 of `--max-record`"}


def test_a_length_beyond_all_memory_is_damage_and_a_full_machine_is_none() -> None:
    error = pa.ArrowMemoryError("malloc of size 4638734335753846784 failed")
    assert damage_reason(error) == str(error)
    with pytest.raises(MemoryError):
        damage_reason(pa.ArrowMemoryError("malloc of size 268435456 failed"))
