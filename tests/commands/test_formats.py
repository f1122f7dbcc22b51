"""Every format that a corpus may have: the same rows, the same care for what cannot be used."""

import csv
import gzip
import io
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from command import COMMAND, error_of, files_of, run, run_json, texts

from tokenfeed.pipeline.format.manifest import Manifest

Write = Callable[[Path, list[str]], Path]


TEXTS = ["first", 'zwei\n"Zeilen"', "", "a,b\tc\r\n", "trois 🎉", *texts(40)]


def write_lines(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


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
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(path)
    return path


def write_loadable(path: Path, rows: list[str]) -> Path:
    path.mkdir()
    write_parquet(path / "train.parquet", rows)
    return path


WRITERS: dict[str, Write] = {
    **dict.fromkeys(("a.jsonl", "a.ndjson", "lines.json"), write_lines),
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
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub/datasets"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_ledger(out: Path, rows: int) -> None:
    """Each source's records are written, empty or rejected, and there are `rows` in all."""
    sources = lines_of(out / "sources.jsonl")
    for source in sources:
        assert source["read"] == source["written"] + source["empty"] + source["rejected"]
    ledger = Manifest.read(out).ledger
    assert ledger.read == sum(source["read"] for source in sources) == rows
    assert ledger.rejected == len(lines_of(out / "rejects.jsonl"))


@pytest.mark.parametrize("name", ["a.csv", "list.json", "file.arrow", "saved", "loadable"])
@pytest.mark.usefixtures("hub_cache")
def test_the_same_texts_give_the_same_shards_in_every_format(
    tmp_path: Path, tokenizer: Path, name: str
) -> None:
    splits = []
    for each in ("a.jsonl", name):
        path, out = WRITERS[each](tmp_path / each, TEXTS), tmp_path / f"out-{each}"
        corpus = f"hub:{path}" if each == "loadable" else path
        run(corpus, out, "--tokenizer", tokenizer, "--validation", 0, "--workers", 1)
        check_ledger(out, len(TEXTS))
        splits.append(Manifest.read(out).splits)
    assert splits[0] == splits[1]


def test_saved_splits_become_the_splits_of_the_output(tmp_path: Path, tokenizer: Path) -> None:
    counts = {"train": 30, "test": 7, "validation": 5}
    made = {s: datasets.Dataset.from_dict({"text": texts(n)}) for s, n in counts.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    run(tmp_path / "saved", tmp_path / "out", "--tokenizer", tokenizer)
    splits = Manifest.read(tmp_path / "out").splits
    assert {name: sum(info.length_histogram) for name, info in splits.items()} == counts
    check_ledger(tmp_path / "out", sum(counts.values()))


def feed(data: bytes, out: Path, *options: object) -> subprocess.CompletedProcess[bytes]:
    command = [*COMMAND, "-", str(out), *map(str, options)]
    return subprocess.run(command, input=data, capture_output=True, timeout=100)


def test_standard_input_is_one_text_or_json_lines(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", TEXTS).read_bytes()
    for name, data, records in (
        ("text", b"plain\nwords", 1),
        ("lines", lines + b"{", len(TEXTS) + 1),
    ):
        done = feed(data, tmp_path / name, "--tokenizer", tokenizer)
        assert done.returncode == 0, done.stderr
        check_ledger(tmp_path / name, records)
        assert [source["path"] for source in lines_of(tmp_path / name / "sources.jsonl")] == ["-"]
    (reject,) = lines_of(tmp_path / "lines/rejects.jsonl")
    assert (reject["file"], reject["line"]) == ("-", len(TEXTS) + 1)


def test_a_killed_run_continues_only_with_the_same_standard_input(
    tmp_path: Path, tokenizer: Path
) -> None:
    data = write_lines(tmp_path / "a.jsonl", texts(4000)).read_bytes()
    options = ("--tokenizer", tokenizer, "--shard-size", "100KB", "--workers", 1)
    out, journal = tmp_path / "out", tmp_path / "out/.journal.jsonl"
    with open(tmp_path / "a.jsonl", "rb") as file:
        command = [*COMMAND, "-", str(out), *map(str, options)]
        process = subprocess.Popen(command, stdin=file, stderr=subprocess.DEVNULL)
        while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    refused = feed(data[:-2] + b"!}", out, *options)
    assert refused.returncode == 2
    (line,) = refused.stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert "of another command or input" in line
    for folder in (out, tmp_path / "undisturbed"):
        done = feed(data, folder, *options)
        assert done.returncode == 0, done.stderr
    assert files_of(out) == files_of(tmp_path / "undisturbed")


BAD_ROWS = {
    "a.jsonl": b'{"text": "a"}\n\n{"text": 1}\n{"text": "b"}\n{\n[]\n',
    "a.csv": b'text,id\n"a\na",1\nb,\xff\n\xff,2\nc,3\n\xff,4\nd\n',
    "list.json": b'[{"text": "a"}, {"text": "b"}, {"text": 1}, {"text": "c"}, {}, 5]',
}


RECORDS = {"a.jsonl": (2, 4, 5), "a.csv": (2, 4, 5), "list.json": (2, 4, 5)}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_the_first_reject_too_many_ends_the_run_by_its_name(
    tmp_path: Path, tokenizer: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(BAD_ROWS[name])
    run(path, tmp_path / "out", "--tokenizer", tokenizer, "--max-rejects", 3)
    check_ledger(tmp_path / "out", 5 if name == "a.jsonl" else 6)
    rejects = lines_of(tmp_path / "out/rejects.jsonl")
    assert [reject["record"] for reject in rejects] == [*RECORDS[name]]
    lines = [3, 5, 6] if name == "a.jsonl" else [None] * 3
    assert [reject.get("line") for reject in rejects] == lines
    for allowed, option in ((0, ("--strict",)), *((n, ("--max-rejects", n)) for n in range(3))):
        message = error_of(path, tmp_path / "strict", "--tokenizer", tokenizer, *option)
        reject = rejects[allowed]
        assert f"{path}, record {reject['record']}: {reject['reason']}" in message


def test_a_table_without_rows_has_no_text_to_train_on(tmp_path: Path) -> None:
    write_feather(tmp_path / "a.feather", [])
    assert "no text" in error_of(tmp_path / "a.feather", tmp_path / "out")


def test_a_split_cannot_lead_out_of_the_output_folder(tmp_path: Path, tokenizer: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_dict.json").write_text('{"splits": ["../up"]}')
    (tmp_path / "up").mkdir()
    (tmp_path / "up/a.txt").write_text("text")
    message = error_of(saved, tmp_path / "out", "--tokenizer", tokenizer)
    assert "'../up' cannot be the name of a split" in message


def test_a_split_that_no_file_is_of_is_a_slip(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.test.txt").write_text("text")
    options = ("--tokenizer", tokenizer, "--split", "test=*.tset.txt")
    message = error_of(tmp_path / "a.test.txt", tmp_path / "out", *options, expect=2)
    assert "`--split test=*.tset.txt`: no input file matches it" in message


def test_files_of_two_splits_in_turn_share_two_shards(tmp_path: Path, tokenizer: Path) -> None:
    for index in range(40):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / f"in/{index:02}.{'test' if index % 2 else 'train'}.txt").write_text("some text")
    options = ("--tokenizer", tokenizer, "--split", "test=*.test.txt")
    summary = run_json(tmp_path / "in", tmp_path / "out", *options)
    assert (summary["units"], summary["splits"]) == (2, {"test": 20, "train": 20})
