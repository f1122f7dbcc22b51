"""Every format that a corpus may have: the same rows, the same care for what cannot be used."""

import csv
import gzip
import io
import json
import os
import random
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import error_of, run
from support.corpora import TEXTS, check_ledger, lines_of, read, read_bytes, write_lines

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus import blocks
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units, read_records

Write = Callable[[Path, list[str]], Path]


def write_list(path: Path, rows: list[str]) -> Path:
    path.write_text(json.dumps([{"text": row} for row in rows], indent=1))
    return path


def write_csv(path: Path, rows: list[str]) -> Path:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("id", "text"), *enumerate(rows)])
    return write_packed(path, file.getvalue())


def write_tsv(path: Path, rows: list[str]) -> Path:
    return write_packed(
        path, "".join(f"{number}\t{row}\n" for number, row in [("id", "text"), *enumerate(rows)])
    )


def write_packed(path: Path, text: str) -> Path:
    data = text.encode("utf-8-sig")
    packed = {".gz": gzip.compress(data), ".zst": zstandard.compress(data)}
    path.write_bytes(packed.get(path.suffix, data))
    return path


def write_arrow(path: Path, rows: list[str]) -> Path:
    column = pa.array(rows, pa.large_string()).dictionary_encode()
    table = pa.table({"text": column, "id": range(len(rows))})
    make = pa.ipc.new_stream if path.name.startswith("stream") else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_feather(path: Path, rows: list[str]) -> Path:
    feather.write_feather(pa.table({"text": rows}), str(path), chunksize=7)
    return path


def write_parquet(path: Path, rows: list[str]) -> Path:
    pq.write_table(pa.table({"text": rows}), path, row_group_size=7)
    return path


def write_saved(path: Path, rows: list[str]) -> Path:
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(path))
    return path


def write_loadable(path: Path, rows: list[str]) -> Path:
    path.mkdir()
    write_parquet(path / "train.parquet", rows)
    return path


WRITERS: dict[str, Write] = {
    **dict.fromkeys(("a.jsonl", "a.ndjson", "a.jsonlines", "a.ldjson", "lines.json"), write_lines),
    "list.json": write_list,
    **dict.fromkeys(("a.csv", "a.csv.gz"), write_csv),
    **dict.fromkeys(("a.tsv", "a.tsv.zst"), write_tsv),
    **dict.fromkeys(("file.arrow", "stream.arrow"), write_arrow),
    "a.feather": write_feather,
    "a.parquet": write_parquet,
    "saved": write_saved,
    "loadable": write_loadable,
}


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever commands ask of `datasets` is kept here."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub/datasets")


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_texts(tmp_path: Path, name: str) -> None:
    rows = [" ".join(text.split()) for text in TEXTS] if ".tsv" in name else TEXTS
    good, bad = read(WRITERS[name](tmp_path / name, rows))
    assert (list(good.values()), bad) == ([row.encode() for row in rows], {})


def write_text(path: Path, rows: list[str]) -> Path:
    path.mkdir()
    for number, row in enumerate(rows):
        (path / f"{number}.txt").write_text(row)
    return path


@pytest.mark.parametrize("name", [*(name for name in WRITERS if name != "loadable"), "texts"])
@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_records_beyond_max_record_are_rejected_with_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    for constant in ("FIRST_BLOCK_BYTES", "BLOCK_BYTES", "UNPACKED_BYTES"):
        monkeypatch.setattr(blocks, constant, block_bytes)
    rows = ["first", "x" * 900, "third", "y" * 2000, "last"]
    path = (WRITERS | {"texts": write_text})[name](tmp_path / name, rows)
    found = find_corpus((str(path),), out=tmp_path / "out", field="text", max_record_bytes=500)
    good, bad = [], []
    for part in (part for unit in cut_units(found.sources, 10**9) for part in unit.parts):
        for records in read_records(part, {"text": FieldKind.TEXT}):
            good += records.fields["text"]
            bad += records.rejects
    if name == "list.json":  # costs what follows
        assert (good, len(bad)) == ([b"first"], 1)
        assert "an element has more than the 500 bytes of `--max-record`" in bad[0].reason
        return
    assert good == [b"first", b"third", b"last"]
    assert [reject.record for reject in bad] == ([0, 0] if name == "texts" else [1, 3])
    for reject, length in zip(bad, (900, 2000), strict=True):
        found_size = re.search(r"has ([\d,]+) bytes, more than the 500 of `--max-re", reject.reason)
        assert found_size
        assert length <= int(found_size[1].replace(",", "")) <= length + 20


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_decompression_bombs_take_little_memory(tmp_path: Path, name: str) -> None:
    begin = b'{"text": "' if name == "a.jsonl.zst" else b"text\n"
    data = begin + bytes(12_000_000).replace(b"\0", b"0")
    (tmp_path / "in").mkdir()
    pack = zstandard.compress if name.endswith("zst") else gzip.compress
    (tmp_path / "in" / name).write_bytes(pack(data))
    del data
    tracemalloc.start()
    try:
        good, bad = read(tmp_path / "in", max_record_bytes=10**6)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (good, list(bad)) == ({}, [0])
    assert "`--max-record`" in bad[0]
    assert peak_bytes < 10e6


@pytest.mark.parametrize("options", [(), ("--max-rejects", 2)])
def test_rows_of_a_damaged_archive_are_not_written(
    tmp_path: Path, tokenizer: Path, options: tuple[Any, ...]
) -> None:
    draw = random.Random(0)
    (tmp_path / "in").mkdir()
    rows = [draw.randbytes(40).hex() for _ in range(1200)]
    for name, kept in {"a": 1200, "b": 1200, "c": 700, "d": 0}.items():
        lines = [json.dumps({"text": row}).encode() + b"\n" for row in rows]
        streams = [gzip.compress(b"".join(lines[:kept])), gzip.compress(b"".join(lines[kept:]))]
        if kept < 1200:
            damaged = bytearray(streams[1])
            damaged[2000:2008] = bytes(8)
            streams[1] = bytes(damaged)
        (tmp_path / f"in/{name}.jsonl.gz").write_bytes(b"".join(streams))
    run(
        *(tmp_path / "in", tmp_path / "out", "--tokenizer", tokenizer, "--validation", 0),
        *("--workers", 1, *options),
    )
    rejects = lines_of(tmp_path / "out/rejects.jsonl")
    assert [(Path(reject["file"]).name, reject["record"]) for reject in rejects] == [
        ("c.jsonl.gz", 0),
        ("d.jsonl.gz", 0),
    ]
    sources = lines_of(tmp_path / "out/sources.jsonl")
    assert [source["written"] for source in sources] == [1200, 1200, 0, 0]
    origin = pa.ipc.open_file(tmp_path / "out/train/00000.arrow").read_all()
    assert origin["origin_record"].to_pylist() == [*range(1200), *range(1200)]


NULL, INVALID = "field `text` is null, expected text", "field `text` has invalid UTF-8 at byte 0"


@pytest.mark.parametrize("name", ["file.arrow", "stream.arrow", "a.feather", "a.parquet"])
@pytest.mark.parametrize("encoded", [False, True])
def test_bad_values_of_a_table_cost_their_row(tmp_path: Path, name: str, encoded: bool) -> None:
    column = pa.array([b"a", None, b"\xff", b"b", "é".encode()]).view(pa.string())
    table = pa.table({"text": column.dictionary_encode() if encoded else column})
    path = str(tmp_path / name)
    if name == "a.parquet":
        pq.write_table(table, path, row_group_size=2)
    elif name == "a.feather":
        feather.write_feather(table, path, chunksize=2)
    else:
        make = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    assert read(Path(path)) == ({0: b"a", 3: b"b", 4: "é".encode()}, {1: NULL, 2: INVALID})


@pytest.mark.parametrize("kind", [pa.large_string(), pa.binary(), pa.string_view()])
def test_arrow_text_of_every_string_type_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"text": pa.array(["x", "yé"], kind)})
    feather.write_feather(table, str(tmp_path / "a.feather"))
    assert read(tmp_path / "a.feather") == ({0: b"x", 1: "yé".encode()}, {})


def test_a_doubled_column_is_no_crash(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    feather.write_feather(table, str(tmp_path / "a.feather"))
    good, bad = read(tmp_path / "a.feather")
    assert (good, list(bad)) == ({}, [0])


def test_a_json_file_is_records_only_if_its_start_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data in (b'{"body": "x"}', b'{\n  "body": "x"\n}', b"[]", b"5", b"{"):
        assert read_bytes(path, data) == ({0: data}, {})
    good, bad = read_bytes(path, b'[{"text": "a"}, 5, {"text": null}, {}, {"text": "b"}]')
    assert (good, list(bad)) == ({0: b"a", 4: b"b"}, [1, 2, 3])
    deep = b"[" * 100_000 + b"]" * 100_000  # deeper than any Python follows
    for tail in (b"", b",", b", {]", b", {} 5]", b"]]", b', {"x": ' + deep + b"}]"):
        good, bad = read_bytes(path, b'[{"text": "a"}' + tail)
        assert good == {0: b"a"}
        assert "cannot be read from here on" in bad[max(bad)]
    good, bad = read_bytes(
        path, b'[{"text": "\xff"}, {"text": "b", "x": "\xff"}, {"text": "\\ud800"}]'
    )
    assert (good, list(bad)) == ({1: b"b"}, [0, 2])
    assert bad[0] == "field `text` has invalid UTF-8 at character 0"


@settings(max_examples=12)
@given(
    values=st.lists(
        st.text(max_size=9) | st.integers() | st.lists(st.floats(), max_size=3), max_size=5
    ),
    block_bytes=st.integers(1, 30),
    indent=st.sampled_from([None, 1]),
)
def test_a_json_list_does_not_depend_on_how_blocks_fall(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], block_bytes: int, indent: None
) -> None:
    rows = [{"text": value} if isinstance(value, str) else value for value in values]
    data = json.dumps([{"text": "a"}, *rows], indent=indent, ensure_ascii=False).encode()
    path = tmp_path_factory.mktemp("list") / "a.json"
    whole = read_bytes(path, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "FIRST_BLOCK_BYTES", block_bytes)
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        assert read(path) == whole
    assert whole[0] == {
        number: row["text"].encode()
        for number, row in enumerate([{"text": "a"}, *rows])
        if isinstance(row, dict)
    }


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "-"])
@pytest.mark.parametrize("is_given", [True, False])
def test_json_records_without_the_field_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_given: bool
) -> None:
    lacking, having = b'{"content": "a", "id": 1}', b'{"text": "b"}'
    for data in (lacking + b"\n" + having + b"\n", b"[" + lacking + b", " + having + b"]"):
        folder = tmp_path / str(len(data))
        folder.mkdir()
        if name == "-":
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        else:
            (folder / name).write_bytes(gzip.compress(data) if ".gz" in name else data)
        path = Path("-") if name == "-" else folder / name if is_given else folder
        assert read(path) == ({1: b"b"}, {0: "no field `text`; it has: content, id"})


def test_standard_input_is_one_text_or_json_lines(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", TEXTS).read_bytes()
    for name, data, records in (
        ("text", b"plain\nwords", 1),
        ("lines", lines + b"{", len(TEXTS) + 1),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        run("-", tmp_path / name, "--tokenizer", tokenizer)
        check_ledger(tmp_path / name, records)
        assert [source["path"] for source in lines_of(tmp_path / name / "sources.jsonl")] == ["-"]
    (reject,) = lines_of(tmp_path / "lines/rejects.jsonl")
    assert (reject["file"], reject["line"]) == ("-", len(TEXTS) + 1)


def test_a_folder_that_has_some_state_json_is_an_ordinary_folder(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/state.json").write_text('{"step": 5}')
    assert read(tmp_path / "corpus") == ({0: b'{"step": 5}'}, {})


BAD_ROWS = {
    "a.jsonl": b'{"text": "a"}\n\n{"text": 1}\n{"text": "b"}\n{\n[]\n',
    "a.csv": b'text,id\n"a\na",1\nb,\xff\n\xff,2\nc,3\n\xff,4\nd\n',
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_the_first_reject_too_many_ends_the_run_by_its_name(
    tmp_path: Path, tokenizer: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(BAD_ROWS[name])
    run(path, tmp_path / "out", "--tokenizer", tokenizer, "--max-rejects", 3)
    check_ledger(tmp_path / "out", 5 if name == "a.jsonl" else 6)
    rejects = lines_of(tmp_path / "out/rejects.jsonl")
    assert [reject["record"] for reject in rejects] == [2, 4, 5]
    lines = [3, 5, 6] if name == "a.jsonl" else [None] * 3
    assert [reject.get("line") for reject in rejects] == lines
    for allowed, option in ((0, ("--max-rejects", 0)), (2, ("--max-rejects", 2))):
        message = error_of(path, tmp_path / "strict", "--tokenizer", tokenizer, *option)
        reject = rejects[allowed]
        assert f"{path}, record {reject['record']}: {reject['reason']}" in message


def test_an_invalid_word_is_named_as_such(tmp_path: Path) -> None:
    words = pa.array([b"good", b"\xff"]).view(pa.string())
    table = pa.table({"text": pa.ListArray.from_arrays([0, 1, 2], words)})
    feather.write_feather(table, str(tmp_path / "a.feather"))
    assert read(tmp_path / "a.feather", FieldKind.WORDS) == (
        {0: [b"good"]},
        {1: "field `text` has invalid UTF-8 at byte 0"},
    )


def test_a_saved_set_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    write_arrow(tmp_path / "secret.arrow", ["a"])
    for name in ("../secret.arrow", str(tmp_path / "secret.arrow"), "gone.arrow"):
        path = write_saved(tmp_path / "saved", ["a"])
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(CorpusError, match="which is not in this folder"):
            read(path)
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits/dataset_dict.json").write_text('{"splits": ["../saved"]}')
    with pytest.raises(CorpusError, match=r"names '\.\./saved', which is not in this folder"):
        read(tmp_path / "splits")


def test_parquet_memory_stays_flat_over_parts(tmp_path: Path) -> None:
    columns = {f"column{number}": [number] * 300 for number in range(20)}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 300} | columns), path, row_group_size=1)
    sources = find_corpus((str(path),), out=tmp_path / "out", field="text").sources
    parts = [part for unit in cut_units(sources, 1) for part in unit.parts]
    footer_bytes = pq.read_metadata(path).serialized_size

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def read_parts(parts: list[FilePart]) -> None:
        for part in parts:
            assert [len(records) for records in read_records(part, {"text": FieldKind.TEXT})] == [1]

    read_parts(parts[:10])
    before = resident_bytes()
    read_parts(parts[10:40])
    assert resident_bytes() - before < 40 * footer_bytes  # one copy was 8 times its size


def test_many_record_batches_are_few_parts(tmp_path: Path) -> None:
    table = pa.table({"text": ["some text"] * 4000})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        for start in range(0, 4000, 2):
            writer.write_table(table.slice(start, 2))
    source = find_corpus((str(tmp_path),), out=tmp_path / "out", field="text").sources
    parts = [part for unit in cut_units(source, source[0].bytes // 10) for part in unit.parts]
    assert 10 <= len(parts) <= 12
    records = [r for part in parts for r in read_records(part, {"text": FieldKind.TEXT})]
    numbers = [number for records_ in records for number in records_.numbers.tolist()]
    assert numbers == list(range(4000))
