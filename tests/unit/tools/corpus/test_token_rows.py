"""Rows of ids in the files of litData, datatrove and mosaicml-streaming: as their writers stored
them, or rejected."""

import bz2
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import read_sources
from support.data_sets import rows_in
from support.object_server import Remote
from support.token_rows import Rows, mds_shard, save_words, write_datatrove, write_litdata
from xxhash import xxh3_64_hexdigest

from tokenfeed import pretokenize
from tokenfeed.pipeline.errors import CorpusError, TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.corpus.formats.containers import LITDATA
from tokenfeed.tools.corpus.input_files import size_and_state
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus

IDS = 700
ROWS: Rows = [[n % IDS, *range(n % 40)] for n in range(90)]


def write_mds(folder: Path, rows: Rows, pack: Callable[[bytes], bytes], ending: str) -> None:
    """Write a shard of `ndarray:uint16`, packed, as `MDSWriter(compression=...)` does."""
    config = {"column_names": ["input_ids"], "column_encodings": ["ndarray:uint16"]}
    arrays = [[b"\4" + bytes([len(row)]) + np.array(row, "<u2").tobytes()] for row in rows]
    content = mds_shard(arrays, config | {"column_sizes": [None]})
    name = f"shard.00000.mds{ending}"
    (folder / name).write_bytes(pack(content))
    hashes = {"xxh3_64": xxh3_64_hexdigest(pack(content))}
    zip_data = {"basename": name, "bytes": len(pack(content)), "hashes": hashes}
    way = {"raw_data": {"basename": "shard.00000.mds"}, "zip_data": zip_data}
    (folder / "index.json").write_text(json.dumps({"shards": [way], "version": 2}))


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "litData": write_litdata,
    "litData, dicts": lambda folder, rows: write_litdata(folder, rows, as_dict=True),
    "litData, zstd": lambda folder, rows: write_litdata(folder, rows, packed=True),
    "datatrove": write_datatrove,
    "datatrove, four bytes": lambda folder, rows: write_datatrove(folder, rows, width=4),
    "MDS, zstd": lambda folder, rows: write_mds(folder, rows, zstandard.compress, ".zstd"),
    "MDS, gzip": lambda folder, rows: write_mds(folder, rows, gzip.compress, ".gz"),
    "MDS, bzip2": lambda folder, rows: write_mds(folder, rows, bz2.compress, ".bz2"),
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 700 ids."""
    return save_words(tmp_path_factory.mktemp("words") / "tokenizer.json", IDS)


def rows_of(source: object, out: Path, tokenizer: Path, **options: Any) -> Rows:
    pretokenize(source, out, task="ids", tokenizer=tokenizer, validation=0, **options)
    return rows_in(out)


@pytest.mark.parametrize("kind", WRITERS)
def test_folder_of_another_project_gives_its_rows(kind: str, tmp_path: Path, words: Path) -> None:
    """The files beside the ids are no records of their own."""
    (tmp_path / "theirs").mkdir()
    WRITERS[kind](tmp_path / "theirs", ROWS)
    out = tmp_path / "out"
    assert rows_of(tmp_path / "theirs", out, words, shard_size="1KB") == ROWS
    assert Manifest.read(out).ledger.read == len(ROWS)
    assert not (out / "rejects.jsonl").read_bytes()


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=60).filter(any),
    kind=st.sampled_from([kind for kind in WRITERS if "MDS" not in kind]),
    batch=st.sampled_from([1, 100, 1 << 20]),
)
def test_rows_of_any_lengths_are_read_in_small_batches(
    lengths: list[int],
    kind: str,
    batch: int,
    tmp_path_factory: pytest.TempPathFactory,
    words: Path,
) -> None:
    folder = tmp_path_factory.mktemp("theirs")
    rows = [[number % IDS] * length for number, length in enumerate(lengths)]
    (folder / "theirs").mkdir()
    WRITERS[kind](folder / "theirs", rows)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_BATCH_TOKENS", "CHUNK_BYTES"):
            patch.setattr(f"tokenfeed.tools.corpus.formats.containers.{name}", batch)
        assert rows_of(folder / "theirs", folder / "out", words) == [row for row in rows if row]


def test_look_at_a_packed_chunk_unpacks_only_its_beginning() -> None:
    packed = zstandard.compress(bytes([1, 0, 0, 0, 12]) + bytes(12_000_000))
    tracemalloc.start()
    try:
        assert LITDATA.begins
        assert LITDATA.begins(packed, "input_ids")
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_chunk_that_claims_gigabytes_is_refused_before_they_are_read(
    tmp_path: Path, words: Path
) -> None:
    offsets = np.array([1, 12, 3 << 30], "<u4").tobytes()
    packed = zstandard.compress(offsets + bytes(20_000_000))
    write_litdata(tmp_path, ROWS)
    (tmp_path / "chunk-0-0.bin").write_bytes(packed)
    index = json.loads((tmp_path / "index.json").read_text())
    index["chunks"] = [{"chunk_bytes": 3 << 30, "chunk_size": 1, "filename": "chunk-0-0.bin"}]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorpusError, match=r"3,221,225,460 bytes, more than the 64,000,000"):
        pretokenize(tmp_path, tmp_path / "out", task="ids", tokenizer=words)


def test_chunk_that_gets_a_gap_behind_its_offsets_after_it_was_found_is_rejected(
    tmp_path: Path,
) -> None:
    write_litdata(tmp_path, ROWS, chunk_rows=len(ROWS))
    path = tmp_path / "chunk-0-0.bin"
    found = find_corpus((str(path),), out=tmp_path / "out", field="input_ids")
    content = bytearray(path.read_bytes())
    content[4:8] = (int.from_bytes(content[4:8], "little") + 4).to_bytes(4, "little")
    path.write_bytes(content)
    size, state = size_and_state(str(path))
    changed = [replace(source, bytes=size, state=state) for source in found.sources]
    good, bad = read_sources(changed, FieldKind.IDS, field="input_ids")
    assert not good
    assert all("the first sample does not follow the offsets" in reason for reason in bad.values())
    assert bad


@pytest.mark.parametrize("kind", ["MDS, zstd", "MDS, gzip"])
def test_mds_file_with_another_checksum_than_its_index_is_rejected(
    kind: str, tmp_path: Path, words: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    WRITERS[kind](tmp_path / "theirs", ROWS)
    index = tmp_path / "theirs/index.json"
    good = index.read_text()
    (shard,) = json.loads(good)["shards"]
    checksum = shard["zip_data"]["hashes"]["xxh3_64"]
    for change in (good.replace(checksum, "0" * 16), good.replace('"bytes": ', '"bytes": 1')):
        index.write_text(change)
        with pytest.raises(CorpusError, match=r"has another (checksum xxh3_64|size) than index"):
            pretokenize(tmp_path / "theirs", tmp_path / "out", task="ids", tokenizer=words)


def test_index_of_several_folders_is_no_record(tmp_path: Path, words: Path) -> None:
    """`merge_index` of mosaicml-streaming writes it. A file that it does not list is not read."""
    theirs, shards = tmp_path / "theirs", []
    for name, rows in (("b", ROWS[:40]), ("a", ROWS[40:])):
        (theirs / name).mkdir(parents=True)
        WRITERS["MDS, zstd"](theirs / name, rows)
        (shard,) = json.loads((theirs / name / "index.json").read_text())["shards"]
        for way in shard.values():
            way["basename"] = f"{name}/{way['basename']}"
        shards.append(shard)
    (theirs / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    (theirs / "notes.txt").write_text("not a record")
    assert rows_of(theirs, tmp_path / "out", words) == ROWS
    assert Manifest.read(tmp_path / "out").ledger.rejected == 0
    (theirs / "index.json").write_text(json.dumps({"shards": shards}).replace('"b/', '"../b/'))
    with pytest.raises(CorpusError, match=r"names '\.\.', which is not in this folder"):
        rows_of(theirs, tmp_path / "no", words)


def test_missing_index_is_named(tmp_path: Path, words: Path) -> None:
    write_datatrove(tmp_path, ROWS)
    (tmp_path / "0.ds.index").unlink()
    with pytest.raises(
        CorpusError, match=r"0\.ds, record 0: .*: 0\.ds\.index is missing beside it"
    ):
        pretokenize(tmp_path, tmp_path / "out", task="ids", tokenizer=words)


@pytest.mark.parametrize(
    ("kind", "index"), [("datatrove", "0.ds.index"), ("litData", "index.json")]
)
def test_changed_index_is_changed_input(kind: str, index: str, tmp_path: Path, words: Path) -> None:
    (tmp_path / "theirs").mkdir()
    WRITERS[kind](tmp_path / "theirs", ROWS)
    rows_of(tmp_path / "theirs", tmp_path / "out", words)
    os.utime(tmp_path / "theirs" / index, (1, 1))
    with pytest.raises(TokenfeedError, match="names, sizes and times of the input files"):
        rows_of(tmp_path / "theirs", tmp_path / "out", words)


def test_unsupported_settings_of_litdata_are_named(tmp_path: Path, words: Path) -> None:
    write_litdata(tmp_path, ROWS)
    index = json.loads((tmp_path / "index.json").read_text())
    for change, message in (
        ({"compression_level": "batch"}, "no compression inside of chunks"),
        ({"data_format": ["pickle"]}, "no column `input_ids`"),
        ({"data_format": ["int", "int"]}, "an array or a dict of arrays"),
    ):
        changed = index | {"config": index["config"] | change}
        (tmp_path / "index.json").write_text(json.dumps(changed))
        with pytest.raises(CorpusError, match=message):
            pretokenize(tmp_path, tmp_path / "out", task="ids", tokenizer=words)


def test_files_of_a_bucket_have_their_index_beside_them(
    tmp_path: Path, words: Path, remote: Remote
) -> None:
    for name in ("ds", "lit"):
        (tmp_path / name).mkdir()
    write_datatrove(tmp_path / "ds", ROWS)
    write_litdata(tmp_path / "lit", ROWS, chunk_rows=90)
    remote.put_folder(tmp_path)
    for number, name in enumerate(("ds/0.ds", "lit/chunk-0-0.bin", "ds", "lit")):
        source = f"s3://{remote.prefix}/{name}"
        assert rows_of(source, tmp_path / f"out{number}", words, shard_size="1KB") == ROWS
        assert Manifest.read(tmp_path / f"out{number}").ledger.rejected == 0
    for number, name in enumerate(("ds/0.ds.index", "lit/index.json")):
        remote.put(name, remote.content(name) + b" ")  # the ids are the same
        source = f"s3://{remote.prefix}/{('ds/0.ds', 'lit/chunk-0-0.bin')[number]}"
        with pytest.raises(TokenfeedError, match="names, sizes and times of the input files"):
            rows_of(source, tmp_path / f"out{number}", words, shard_size="1KB")
