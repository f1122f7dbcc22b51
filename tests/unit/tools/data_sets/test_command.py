"""`shards inspect|verify|cat`: what is inside, whether it is whole, and what it says."""

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.commands import call
from support.data_sets import DOCUMENTS, sealed_manifest
from support.stores import keep_in_memory
from tokenizers import Tokenizer, models

from tokenfeed.pipeline.format.manifest import FileInfo, Manifest
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.tools import pretokenize
from tokenfeed.tools.data_sets.cat import Cat
from tokenfeed.tools.data_sets.verify import Verify, find_problems
from tokenfeed.tools.shards import main


def shards(*arguments: object, expect: int = 0) -> str:
    result = call(main, *arguments, expect=expect)
    assert "Traceback" not in result.stderr
    return result.stdout if expect == 0 or result.stdout else result.stderr


@pytest.fixture
def out(documents: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(documents, tmp_path / "out"))


def problems(folder: Path) -> list[str]:
    return list(find_problems(folder, Manifest.read(folder)))


def replace_file(folder: Path, info: FileInfo, data: bytes) -> FileInfo:
    """Write other content together with the checksum that fits it."""
    path = folder / info.file
    path.write_bytes(data)
    return dataclasses.replace(info, bytes=len(data), xxh3=file_xxh3(path))


@pytest.mark.parametrize("damage", [b"{", None])
def test_verify_says_in_json_that_the_manifest_is_damaged(
    out: Path, capsys: pytest.CaptureFixture[str], damage: bytes | None
) -> None:
    path = out / "manifest.json"
    path.write_bytes(damage) if damage else path.unlink()
    assert Verify(out=str(out), json=True).run() == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert [str(path) in problem for problem in result["problems"]] == [True]


def test_verify_names_every_problem_with_file_and_batch(out: Path) -> None:
    shard = out / "train/00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 0xFF  # among the tokens
    shard.write_bytes(data)
    (out / "rejects.jsonl").unlink()
    cut = out / "validation/00000.arrow"
    cut.write_bytes(cut.read_bytes()[:-1])
    printed = shards("verify", out, expect=1)
    assert f"{shard}: record batch 0" in printed
    assert f"{shard}: the file has checksum" in printed
    assert f"{cut}: expected" in printed
    assert f"{out / 'rejects.jsonl'}: cannot be read: No such file" in printed
    result = json.loads(shards("verify", out, "--json", expect=1))
    assert result["ok"] is False
    assert len(result["problems"]) == 4


def test_verify_finds_what_contradicts_the_ledger_though_checksums_fit(out: Path) -> None:
    manifest = Manifest.read(out)
    sources = replace_file(out, manifest.sources, (out / "sources.jsonl").read_bytes() * 2)
    rejects = replace_file(out, manifest.rejects, b"")
    train = manifest.split("train")
    histogram = (*train.length_histogram[1:], train.length_histogram[0])
    splits = manifest.splits | {"train": dataclasses.replace(train, length_histogram=histogram)}
    dataclasses.replace(manifest, sources=sources, rejects=rejects, splits=splits).write(out)
    found = " ".join(problems(out))
    assert "sources.jsonl: its lines sum up to" in found
    assert (
        "rejects.jsonl: lists 0 rejected records, the manifest 1. Run `pretokenize` again." in found
    )
    assert "split `train` has other row lengths" in found


def test_verify_finds_wrong_counts_and_another_vocabulary(out: Path) -> None:
    manifest = Manifest.read(out)
    train = manifest.split("train")
    first = dataclasses.replace(train.shards[0], tokens=train.shards[0].tokens + 1)
    shards_ = (first, *train.shards[1:])
    splits = manifest.splits | {"train": dataclasses.replace(train, shards=shards_)}
    other = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str().encode()
    tokenizer = replace_file(out, manifest.tokenizer, other)
    dataclasses.replace(manifest, splits=splits, tokenizer=tokenizer).write(out)
    found = " ".join(problems(out))
    assert "train/00000.arrow: record batch 0 has 26 rows" in found
    assert "the manifest allows 1 record batches with 26 rows" in found
    assert "tokenizer.json: has 2 ids, the manifest says " in found


def test_cat_gives_back_the_texts_with_their_origin(documents: Path) -> None:
    found = {}
    for split in ("train", "validation"):
        rows = Manifest.read(documents).split(split).rows
        printed = shards("cat", documents, "--split", split, "--rows", rows, "--json")
        for number, line in enumerate(printed.splitlines()):
            row = json.loads(line)
            assert (row["split"], row["row"]) == (split, number)
            assert row["file"].endswith("in.jsonl")
            found[row["record"]] = row["text"]
    assert found == dict(enumerate(DOCUMENTS))


@pytest.mark.parametrize(("task", "shown"), [("lm", "a label"), ("classify", "a label</s>")])
def test_cat_leaves_out_an_end_token_only_where_it_ends_the_row(
    write_dataset: Callable[..., Path],
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
    shown: str,
) -> None:
    model = Tokenizer.from_file(str(tokenizer))
    ids = np.array(model.encode("a label</s>").ids)
    vocabulary_size, end_id = model.get_vocab_size(), model.token_to_id("</s>")
    assert ids[-1] == end_id
    folder = write_dataset(
        tmp_path / "out", {"train": (ids, np.array([len(ids)]))}, vocabulary_size
    )
    manifest = Manifest.read(folder)
    made_by = replace_file(folder, manifest.tokenizer, tokenizer.read_bytes())
    dataclasses.replace(
        manifest,
        task=task,
        tokenizer=dataclasses.replace(made_by, end_id=end_id),
        sources=replace_file(folder, manifest.sources, b'{"path": "in.txt"}'),
    ).write(folder)
    assert Cat(out=str(folder), json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["text"] == shown


def test_cat_starts_anywhere_and_crosses_shards(documents: Path) -> None:
    manifest = Manifest.read(documents)
    first = manifest.split("train").shards[0].rows
    whole = shards("cat", documents, "--rows", first + 3, "--json").splitlines()
    part = shards("cat", documents, "--start", first - 2, "--rows", 5, "--json").splitlines()
    assert part == whole[first - 2 :]
    header, *text = shards("cat", documents, "--start", 1, "--rows", 1).splitlines()
    row = json.loads(whole[1])
    assert header.startswith(f"--- train row 1 | {row['file']} record {row['record']} | ")
    assert "\n".join(text) == row["text"]


def test_cat_refuses_what_is_not_there(documents: Path, out: Path) -> None:
    assert "--start` 100000" in shards("cat", documents, "--start", 100_000, expect=2)
    assert "no split `test`" in shards("cat", documents, "--split", "test", expect=1)
    (out / "tokenizer.json").write_bytes((out / "tokenizer.json").read_bytes() + b" ")
    assert "tokenizer.json: has checksum " in shards("cat", out, expect=1)


def test_inspect_shows_splits_lengths_and_ledger(documents: Path) -> None:
    manifest = Manifest.read(documents)
    printed = shards("inspect", documents)
    assert "rows of validation by their tokens" in printed
    assert f"{manifest.split('train').tokens:,}" in printed
    assert "121 read = 120 written + 0 empty + 1 rejected" in printed
    assert manifest.fingerprint in printed
    content = json.loads(shards("inspect", documents, "--json"))
    assert content["fingerprint"] == manifest.fingerprint
    assert content["splits"]["train"]["shards"][0]["file"] == "train/00000.arrow"


def test_verify_finds_an_unknown_task(out: Path) -> None:
    path = out / "manifest.json"
    path.write_bytes(sealed_manifest(json.loads(path.read_bytes()) | {"task": "dance"}))
    said = shards("verify", out, expect=1)
    assert f"{path}: names the unknown task 'dance', expected one of lm, " in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "--json"],
        ["verify"],
        ["verify", "--json"],
        ["cat", "--json", "--start", 30, "--rows", 60],
        ["cat", "--split", "validation"],
    ],
    ids=str,
)
def test_commands_say_of_a_store_what_they_say_of_a_folder(
    documents: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object]
) -> None:
    keep_in_memory(monkeypatch, documents)
    command, *options = arguments
    there = shards(command, "memory://some/data", *options)
    here = shards(command, documents, *options)
    assert there.replace("memory://some/data", str(documents)) == here


def test_damage_in_a_store_is_named_as_the_store_names_it(
    documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = keep_in_memory(monkeypatch, documents)
    files["train/00000.arrow"] = files["train/00000.arrow"][:-1]
    files["rejects.jsonl"] += b"\n"
    del files["sources.jsonl"], files["tokenizer.json"]
    said = shards("verify", "memory://data", expect=1)
    for problem in (
        "memory://data/train/00000.arrow: expected ",
        "memory://data/rejects.jsonl: expected ",
        "memory://data/sources.jsonl: cannot be read: No such file",
        "memory://data: damaged, problems found: 4",
    ):
        assert problem in said
    said = shards("cat", "memory://data", expect=1)
    assert "memory://data/tokenizer.json: cannot be read: No such file. Restore it." in said


def test_control_characters_of_a_corpus_do_not_reach_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a\x1b[31m.jsonl").write_text('{"text": "x\\u001b[2Jy"}\n{"text": 1}\n')
    out = tmp_path / "out"
    done = call(pretokenize.main, folder, out, "--vocab-size", 257, "--validation", 0)
    assert "a\ufffd[31m.jsonl, record 1" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "x\x1b[2Jy" in shards("cat", out)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("support.commands.io.StringIO", Terminal)
    assert "x\ufffd[2Jy" in shards("cat", out)
