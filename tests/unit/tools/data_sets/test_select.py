"""`shards select`: the selected rows, counts that stay true, and nothing of the rows removed."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, run
from support.data_sets import corpus_rows, files_of

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools import shards

FILES = {
    "a.jsonl": [f"text {number} of the first file" for number in range(40)],
    "private.jsonl": ["a secret", "", "another secret", "{"],
    "z.jsonl": [f"line {number} of the last file" for number in range(40)],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """A data set of the files in `in` beside it, only to be read."""
    folder = tmp_path_factory.mktemp("select")
    (folder / "in").mkdir()
    for name, texts in FILES.items():
        lines = [text if text == "{" else json.dumps({"text": text}) for text in texts]
        (folder / "in" / name).write_text("\n".join(lines))
    given = ("--tokenizer", tokenizer, "--validation", "0.3", "--shard-size", "1KB")
    run(folder / "in", folder / "out", *given)
    return folder / "out"


def selected(out: Path, new: Path, *options: object) -> dict[str, Any]:
    said = call(shards.main, "select", out, new, *options, "--json").stdout
    call(shards.main, "verify", new)
    result: dict[str, Any] = json.loads(said)
    return result


def listed(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def only(rows: Counter[Any], keep: Any) -> Counter[Any]:
    return Counter({key: count for key, count in rows.items() if keep(Path(key[0]).name, key[1])})


def test_select_where_keeps_files_by_their_path(out: Path, tmp_path: Path) -> None:
    said = selected(out, tmp_path / "new", "--where", "origin *z.jsonl")
    rows = corpus_rows(tmp_path / "new")
    assert rows == only(corpus_rows(out), lambda name, _: name == "z.jsonl")
    ledger = Manifest.read(tmp_path / "new").ledger
    assert (ledger.read, ledger.written, ledger.empty, ledger.rejected) == (84, 40, 1, 0)
    assert ledger.removed == said["removed"] == 43
    assert said["linked"] >= 1


@pytest.mark.parametrize("records", [[{}], [{"record": 0}, {"record": 2}]])
def test_select_drop_leaves_nothing_of_a_file(
    out: Path, tmp_path: Path, records: list[dict[str, object]]
) -> None:
    """Neither its tokens nor its name, not in the file of rejects either. Also where each row is
    listed by itself, and a reject of the file is not."""
    name = str(out.parent / "in/private.jsonl")
    rows = listed(tmp_path / "l", *({"file": name} | record for record in records))
    said = selected(out, tmp_path / "new", "--rows", rows, "--drop")
    assert corpus_rows(tmp_path / "new") == only(
        corpus_rows(out), lambda file, _: file != "private.jsonl"
    )
    assert said["removed"] == 3
    contents = files_of(tmp_path / "new")
    assert not [file for file, content in contents.items() if b"private" in content]
    assert all(b"private" in files_of(out)[file] for file in ("sources.jsonl", "rejects.jsonl"))
    printed = [
        json.loads(line)["text"]
        for split in ("train", "validation")
        for line in call(
            shards.main, "cat", tmp_path / "new", "--rows", 999, "--split", split, "--json"
        ).stdout.splitlines()
    ]
    assert len(printed) == 80
    assert not [text for text in printed if "secret" in text]


def test_select_rows_keeps_or_drops_each_record(out: Path, tmp_path: Path) -> None:
    name = str(out.parent / "in/a.jsonl")
    chosen = {3, 5, 39}
    rows = listed(tmp_path / "l", *({"file": name, "record": record} for record in chosen))
    kept = selected(out, tmp_path / "kept", "--rows", rows)
    left = selected(out, tmp_path / "left", "--rows", rows, "--drop")
    is_chosen = lambda file, record: file == "a.jsonl" and record in chosen  # noqa: E731
    assert corpus_rows(tmp_path / "kept") == only(corpus_rows(out), is_chosen)
    assert corpus_rows(tmp_path / "kept") + corpus_rows(tmp_path / "left") == corpus_rows(out)
    assert (kept["rows"], left["rows"], left["removed"]) == (3, 79, 3)
    sources = (tmp_path / "left/sources.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in sources] == [
        str(out.parent / "in" / file) for file in FILES
    ]


def test_select_share_keeps_about_so_many_rows_and_smaller_shares_are_parts_of_larger_ones(
    out: Path, tmp_path: Path
) -> None:
    found = []
    for number, share in enumerate((0.2, 0.2, 0.6)):
        selected(out, tmp_path / str(number), "--where", f"share {share}")
        found.append(corpus_rows(tmp_path / str(number)))
    assert found[0] == found[1]
    assert found[0] <= found[2] <= corpus_rows(out)
    assert 6 <= found[0].total() <= 28  # of 82
    assert 34 <= found[2].total() <= 64


def test_select_links_shards_that_lose_no_row(out: Path, tmp_path: Path) -> None:
    rows = listed(tmp_path / "l", {"file": str(out.parent / "in/a.jsonl"), "record": 0})
    said = selected(out, tmp_path / "new", "--rows", rows, "--drop")
    same = [
        os.path.samefile(out / path.relative_to(tmp_path / "new"), path)
        for path in (tmp_path / "new").rglob("*.arrow")
    ]
    assert (len(same), sum(same)) == (said["shards"], said["linked"])
    assert said["linked"] == said["shards"] - 1
    assert not list(tmp_path.glob("*.tmp"))


def test_select_counts_listed_records_that_are_missing(out: Path, tmp_path: Path) -> None:
    """An empty record has no row. A rejected record is found."""
    name = str(out.parent / "in/private.jsonl")
    records = [{"file": name, "record": record} for record in (0, 1, 3, 77)]
    absent = [{"file": "elsewhere", "record": 0}, {"file": "nowhere"}]
    rows = listed(tmp_path / "l", *records, *absent)
    said = selected(out, tmp_path / "new", "--rows", rows, "--drop")
    assert (said["removed"], said["not_found"]) == (2, 4)
    assert (tmp_path / "new/rejects.jsonl").read_bytes() == b""
    told = call(shards.main, "select", out, tmp_path / "again", "--rows", rows, "--drop").stdout
    assert "2 records removed, 4 listed records or files not found" in told
