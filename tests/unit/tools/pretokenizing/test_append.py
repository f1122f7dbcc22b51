"""`pretokenize --append`: new rows behind the others, each input file once, errors of one line."""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import call, error_of, run, run_json
from support.data_sets import corpus_rows, files_of

import tokenfeed
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools import shards

Write = Callable[[str, list[str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, texts: list[str]) -> Path:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return written


TEXTS = [f"text {number} of many words" for number in range(40)]


@pytest.fixture
def out(tmp_path: Path, tokenizer: Path, write: Write) -> Path:
    write("a.jsonl", TEXTS)
    run(tmp_path / "corpus", tmp_path / "out", "--tokenizer", tokenizer, "--validation", 0.3)
    return tmp_path / "out"


def whole(tmp_path: Path, *options: object) -> Path:
    """The data set that one run makes of the whole corpus."""
    run(tmp_path / "corpus", tmp_path / "whole", *options)
    return tmp_path / "whole"


def test_append_adds_the_rows_of_a_growing_corpus(
    out: Path, tmp_path: Path, write: Write, tokenizer: Path
) -> None:
    """The corpus is given again as a whole. Known files are skipped and counted."""
    for number, name in enumerate(("b", "c"), 1):
        write(f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
        said = run_json(tmp_path / "corpus", out, "--append", "--validation", 0.3)
        assert (said["skipped_known"], said["files"]) == (number, number + 1)
        assert not said["already_finished"]
    call(shards.main, "verify", out)
    expected = whole(tmp_path, "--tokenizer", tokenizer, "--validation", 0.3)
    assert corpus_rows(out) == corpus_rows(expected)
    splits, others = Manifest.read(out).splits, Manifest.read(expected).splits
    assert {n: split.rows for n, split in splits.items()} == {n: s.rows for n, s in others.items()}
    assert len(Manifest.read(out).versions or ()) == 2
    assert not list(out.glob(".append*"))


def test_append_of_known_files_changes_nothing(out: Path, tmp_path: Path, write: Write) -> None:
    write("b.jsonl", TEXTS[:9])
    run(tmp_path / "corpus", out, "--append")
    before = files_of(out)
    said = run_json(tmp_path / "corpus", out, "--append")
    assert (said["skipped_known"], said["already_finished"]) == (2, True)
    assert files_of(out) == before
    assert "already in" in run(tmp_path / "corpus", out, "--append").stdout


def test_append_knows_a_file_by_its_bytes(out: Path, tmp_path: Path, write: Write) -> None:
    """Under another name, and as a copy of an appended file whose original is gone."""
    shutil.copy(tmp_path / "corpus/a.jsonl", tmp_path / "renamed.jsonl")
    said = run_json(tmp_path / "renamed.jsonl", out, "--append")
    assert (said["skipped_known"], said["already_finished"]) == (1, True)
    new = write("b.jsonl", ["new"])
    run(new, out, "--append")
    shutil.move(new, tmp_path / "moved.jsonl")
    assert run_json(tmp_path / "moved.jsonl", out, "--append")["skipped_known"] == 1
    twice = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for path in twice:
        path.write_text('{"text": "the same"}\n')
    said = run_json(*twice, out, "--append")
    assert (said["skipped_known"], said["documents"]) == (1, 42)


def test_append_rejects_a_name_with_unknown_content(
    out: Path, tmp_path: Path, write: Write
) -> None:
    """Of another time and the same size, the content may be the same or not."""
    path = tmp_path / "corpus/a.jsonl"
    os.utime(path, ns=(1, 1))
    refused = "a.jsonl that .* has already: no record shows whether the content is the same"
    assert re.search(refused, error_of(path, out, "--append", expect=2))
    (out / ".made_by.json").unlink()
    assert re.search(refused, error_of(path, out, "--append", expect=2))
    assert not list(out.glob(".append*"))


def test_append_knows_files_from_any_folder(
    tmp_path: Path, tokenizer: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative names of the first run are of the folder where it ran. Moved files are refused."""
    first = write("a.jsonl", TEXTS)
    monkeypatch.chdir(tmp_path)
    run("corpus", "out", "--tokenizer", tokenizer)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for path in ("../corpus", first):
        assert run_json(path, "../out", "--append")["skipped_known"] == 1
    renamed = shutil.move(first, tmp_path / "b.jsonl")
    assert "b.jsonl may be the input file corpus/a.jsonl" in error_of(
        renamed, "../out", "--append", expect=2
    )
    (tmp_path / "copy").mkdir()
    copied = shutil.copy(renamed, tmp_path / "copy/a.jsonl")
    assert "a.jsonl may be" in error_of(copied, "../out", "--append", expect=2)
    assert Manifest.read(tmp_path / "out").ledger.written == len(TEXTS)


def test_original_command_recognises_the_grown_data_set(
    out: Path, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "b.txt").write_text("text")
    run(tmp_path / "b.txt", out, "--append")
    said = run_json(tmp_path / "corpus", out, "--tokenizer", tokenizer, "--validation", 0.3)
    assert (said["already_finished"], said["documents"]) == (True, 41)


def test_append_to_merged_and_selected_rows(out: Path, tmp_path: Path, write: Write) -> None:
    run(write("b.jsonl", TEXTS[:5]), tmp_path / "b", "--tokenizer", out / "tokenizer.json")
    call(shards.main, "merge", out, tmp_path / "b", tmp_path / "both")
    call(shards.main, "select", tmp_path / "both", tmp_path / "some", "--where", "origin *a.jsonl")
    run(write("c.jsonl", TEXTS[:7]), tmp_path / "some", "--append")
    call(shards.main, "verify", tmp_path / "some")
    manifest = Manifest.read(tmp_path / "some")
    assert (manifest.ledger.written, manifest.ledger.removed) == (47, 5)


LABELS = ("--task", "classify", "--validation", 0)


@pytest.mark.parametrize(("before", "after"), [("abc", "cb"), ("012", "10")])
def test_append_numbers_labels_as_before(
    tmp_path: Path, tokenizer: Path, before: str, after: str
) -> None:
    for name, labels in (("one", before), ("two", after)):
        lines = [json.dumps({"text": f"text {label}", "label": label}) for label in labels]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    run(tmp_path / "one.jsonl", out, "--tokenizer", tokenizer, *LABELS)
    run(tmp_path / "two.jsonl", out, "--append", "--validation", 0)
    said = call(shards.main, "cat", out, "--rows", 9, "--json").stdout
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row["label"] for row in rows] == [*before, *after]
    assert all(row["text"] == f"text {row['label']}" for row in rows)
    (tmp_path / "three.jsonl").write_text('{"text": "text", "label": "new"}\n')
    assert "the label 'new' is not one of the 3" in error_of(
        tmp_path / "three.jsonl", out, "--append", expect=2
    )


def test_append_takes_settings_of_the_data_set(tmp_path: Path, tokenizer: Path) -> None:
    """The end token, and how special tokens in texts are encoded."""
    (tmp_path / "a.txt").write_text("the first </s> text")
    (tmp_path / "b.txt").write_text("the second </s> text")
    given = ("--tokenizer", tokenizer, "--special-tokens-in-text", "split", "--validation", 0)
    run(tmp_path / "a.txt", tmp_path / "out", *given, "--end-token", "e")
    run(tmp_path / "b.txt", tmp_path / "out", "--append", "--validation", 0)
    run(tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "whole", *given, "--end-token", "e")
    assert corpus_rows(tmp_path / "out") == corpus_rows(tmp_path / "whole")


def test_append_of_conversations_uses_the_stored_template_and_fields(tmp_path: Path) -> None:
    chats: list[dict[str, Any]] = [{"prompt": f"ask {n}", "completion": "x"} for n in range(6)]
    for chat in chats[3:]:
        chat["messages"] = [{"role": "assistant", "content": "not read"}]
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    run_texts = tmp_path / "t.txt"
    run_texts.write_text("ask x user assistant " * 9)
    run(run_texts, tmp_path / "texts", "--vocab-size", 280)
    shutil.copy(tmp_path / "texts/tokenizer.json", tokenizer)
    (tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ mark }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for name, part in (("a", chats[:3]), ("b", chats[3:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    given = ("--task", "chat", "--validation", 0, "--tokenizer", tokenizer)
    given = (*given, "--template-argument", "mark=!")
    run(tmp_path / "a.jsonl", tmp_path / "out", *given)
    run(tmp_path / "b.jsonl", tmp_path / "out", "--append", "--validation", 0)
    pair = {"prompt": "ask", "chosen": "x", "rejected": "y"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    named = ("--task", "chat", "--field", "prompt=prompt", "chosen=chosen", "rejected=rejected")
    said = error_of(tmp_path / "pairs.jsonl", tmp_path / "out", "--append", *named, expect=2)
    assert "one number of conversations in a row" in said
    given = (*given, "--field", "prompt=prompt", "completion=completion")
    run(tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "whole", *given)
    assert corpus_rows(tmp_path / "out") == corpus_rows(tmp_path / "whole")
    assert Manifest.read(tmp_path / "out").counts == Manifest.read(tmp_path / "whole").counts


def test_append_from_python_reads_objects(out: Path) -> None:
    rows = [{"text": "one"}, {"text": "two"}]
    made = tokenfeed.pretokenize(rows, out, append=True)
    assert (made.summary.documents, made.manifest.ledger.files) == (42, 2)
    assert tokenfeed.pretokenize(rows, out, append=True).summary.skipped_known == 1
    assert tokenfeed.pretokenize(rows[:1], out, append=True).summary.documents == 43


def test_append_reads_compressed_files(out: Path, tmp_path: Path) -> None:
    """The same text in another file is another file."""
    data = (tmp_path / "corpus/a.jsonl").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    assert run_json(tmp_path / "a.jsonl.gz", out, "--append")["documents"] == 80
    assert run_json(tmp_path / "a.jsonl.gz", out, "--append")["skipped_known"] == 1


def test_append_rejects_other_settings(out: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "t", "label": "a", "prompt": "p"}\n')
    run(tmp_path / "b.jsonl", tmp_path / "other", "--vocab-size", 270)
    before = files_of(out)
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("--task", "classify"), "`--append` needs one task"),
        (("--tokenizer", tmp_path / "other"), "`--append` needs one tokenizer"),
        (("--end-token", "e"), "`--append` needs one end id"),
        (("--vocab-size", 300), "`--vocab-size` 300: is for a tokenizer that is trained"),
        (("--part", "0/2"), "`--part 0/2` and `--append`: leave one of them out"),
        (("--finish",), "`--finish` and `--append`: leave one of them out"),
    ]
    for options, error in cases:
        assert error in error_of(tmp_path / "b.jsonl", out, "--append", *options, expect=2)
        assert files_of(out) == before
    for place in (tmp_path / "corpus", tmp_path / "new", "s3://bucket/out"):
        said = error_of(tmp_path / "b.jsonl", place, "--append", expect=2)
        assert "is not a finished data set in a folder of this machine" in said
    (tmp_path / "empty.txt").write_text("")
    assert "every document is empty" in error_of(tmp_path / "empty.txt", out, "--append")
    assert Manifest.read(out).versions is None
