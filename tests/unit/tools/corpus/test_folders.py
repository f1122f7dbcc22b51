"""Files of a folder whose meaning depends on their names or on those beside them."""

import bz2
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import error_of
from support.pretokenizing import make

from tokenfeed.pipeline.errors import CorpusError, TokenizerError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.corpus.sources import Corpus, find_corpus, left_out
from tokenfeed.tools.pretokenizing.inputs import find_inputs
from tokenfeed.tools.pretokenizing.options import Options


def corpus_of(folder: Path, **options: Any) -> Corpus:
    return find_corpus((str(folder),), out=None, field="text", **options)


def write(folder: Path, *names: str, text: str = "some words") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": [text]}), path)
        else:
            path.write_text(json.dumps({"text": text}) + "\n")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (
            ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"],
            ["test", None],
        ),
        (["a.dev.jsonl", "a.train.jsonl"], ["validation", None]),
        (
            ["rest.jsonl", "test.jsonl", "train.jsonl", "valid.jsonl"],
            [None, "test", None, "validation"],
        ),
        (["test/a.jsonl", "train/a.jsonl"], ["test", None]),
        (["test.jsonl", "text.jsonl"], [None, None]),  # no file says train
        (["latest.jsonl", "train.jsonl", "trainer-tested.jsonl"], [None, None, None]),
        (["test.md", "test.py", "train.jsonl"], [None, None, None]),  # texts
    ],
)
def test_names_of_records_decide_about_splits(
    names: list[str], splits: list[str | None], tmp_path: Path
) -> None:
    write(tmp_path, *names)
    corpus = corpus_of(tmp_path)
    assert [source.name for source in corpus.sources] == [f"{tmp_path}/{name}" for name in names]
    assert [source.split for source in corpus.sources] == splits
    given = corpus_of(tmp_path, splits=(("other", names[0]),))
    assert [source.split for source in given.sources] == ["other", *[None] * (len(names) - 1)]


def test_rows_of_test_are_not_trained_on(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "set", "train.jsonl", "test.jsonl")
    caplog.set_level("INFO")
    make(tmp_path / "set", tmp_path / "out", tokenizer, validation=0.0)
    rows = {name: split.rows for name, split in Manifest.read(tmp_path / "out").splits.items()}
    assert rows == {"test": 1, "train": 1}
    assert f"{tmp_path}/set: 1 file in split test by name; see --split" in caplog.text


def test_card_and_infos_of_a_cloned_set_are_no_documents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "data/train.jsonl", "dataset_infos.json", "notes.txt")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    caplog.set_level("INFO")
    sources = corpus_of(tmp_path).sources
    assert [Path(source.name).name for source in sources] == ["train.jsonl", "notes.txt"]
    assert [source.index for source in sources] == [0, 1]
    assert "README.md, dataset_infos.json left out" in caplog.text
    (tmp_path / "README.md").write_text("# A text like others")
    assert len(corpus_of(tmp_path).sources) == 3


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_share_of_validation_depends_on_texts_alone(
    kind: str, tmp_path: Path, tokenizer: Path
) -> None:
    """The share was less for a large corpus, by sizes of files, which formats change."""
    texts = [f"{number} {'x' * 100}" for number in range(60_000)]
    rows = "".join(f'{{"text": "{text}", "label": {n % 2}}}\n' for n, text in enumerate(texts))
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        labels = [number % 2 for number in range(len(texts))]
        pq.write_table(pa.table({"text": texts, "label": labels}), path)
    else:
        path.write_bytes(gzip.compress(rows.encode(), 1) if kind.endswith("gz") else rows.encode())
    listed = corpus_inputs(path, tmp_path / "out", tokenizer)
    assert listed == 0.1


def test_given_files_whose_names_say_test_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("a.train.jsonl", "a.test.jsonl")
    write(tmp_path, *names)
    paths = tuple(f"{tmp_path}/{name}" for name in names)
    given = find_corpus(paths, out=None, field="text")
    assert [source.split for source in given.sources] == [None, None]
    assert "although the name says test. Name the split by --split test='a.test" in caplog.text
    caplog.clear()
    find_corpus(paths, out=None, field="text", splits=(("test", "*.test.*"),))
    assert not caplog.text


@pytest.mark.parametrize("names", [("rows.jsonl", "sub/dev.csv"), ("rows.jsonl", "dev/a.jsonl")])
def test_a_file_of_validation_beside_files_without_a_split_is_a_warning(
    names: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, *names)
    assert [source.split for source in corpus_of(tmp_path).sources] == [None, None]
    assert f"Name the split by --split validation='{names[1]}'" in caplog.text
    caplog.clear()
    (tmp_path / names[0]).unlink()
    corpus_of(tmp_path)
    assert not caplog.text


def corpus_inputs(path: Path, out: Path, tokenizer: Path) -> float:
    """The share of validation that a run would have."""
    options = Options(paths=(str(path), str(out)), task="classify", tokenizer=str(tokenizer))
    share = find_inputs(options).validation
    assert share is not None
    return share


def test_records_without_an_ending_are_records(tmp_path: Path, tokenizer: Path) -> None:
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "set").mkdir()
    (tmp_path / "set/part-00000.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "set/part-00001.bz2").write_bytes(bz2.compress(lines))
    (tmp_path / "set/part-00002").write_bytes(lines)
    (tmp_path / "set/_temporary").mkdir()  # of a task of Spark that was not committed
    (tmp_path / "set/_temporary/part-00003").write_bytes(lines)
    (tmp_path / "set/words.gz").write_bytes(gzip.compress(b"a text"))
    sources = corpus_of(tmp_path / "set").sources
    assert [source.format for source in sources] == ["jsonl", "jsonl", "jsonl", "text"]
    make(tmp_path / "set", tmp_path / "out", tokenizer, validation=0.0)
    assert Manifest.read(tmp_path / "out").splits["train"].rows == 7


def test_tables_with_other_names_are_tables_and_texts_beside_them_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a.parquet")
    for name in ("b.pq", "c.parq", "part-0"):
        shutil.copy(tmp_path / "a.parquet", tmp_path / name)
    (tmp_path / "LICENSE").write_text("MIT")
    with caplog.at_level("INFO"):
        sources = corpus_of(tmp_path).sources
    assert [source.format for source in sources] == ["text", *["parquet"] * 4]
    assert "reads 1 file as text, beside files of records (LICENSE)" in caplog.text
    given = find_corpus((f"{tmp_path}/part-0",), out=None, field="text").sources
    assert [source.format for source in given] == ["parquet"]


def test_pointers_of_git_lfs_are_never_text(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "set").mkdir()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    write(tmp_path / "set", "a.jsonl")
    (tmp_path / "set/picture.png").write_bytes(pointer)
    corpus = corpus_of(tmp_path / "set")
    assert [Path(file.name).name for file in corpus.binary] == ["picture.png"]
    for file in ("set/b.jsonl", "tokenizer.json"):
        (tmp_path / file).write_bytes(pointer)
    with pytest.raises(CorpusError, match=r"b\.jsonl: is a pointer of Git LFS.*git lfs pull"):
        corpus_of(tmp_path / "set")
    with pytest.raises(TokenizerError, match="is a pointer of Git LFS"):
        make(tmp_path / "set/a.jsonl", tmp_path / "out", tmp_path / "tokenizer.json")


def test_archives_in_a_folder_are_left_out_by_kind(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.warc", "c.zip", "d.tar.gz")
    (tmp_path / "b.warc.gz").write_bytes(gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n"))
    corpus = corpus_of(tmp_path)
    assert [source.format for source in corpus.sources] == ["jsonl"]
    [pages, archives] = left_out(corpus.binary)
    assert pages.startswith(f"2 archives of web pages ({tmp_path}/b.warc, ")
    assert archives.startswith(f"2 archives ({tmp_path}/c.zip, ")
    message = error_of(tmp_path / "b.warc.gz", tmp_path / "out")
    assert "b.warc.gz: is an archive of web pages, which" in message


@pytest.mark.parametrize("index", ['{"chunks": []}', '{"shards": []}'])
def test_empty_index_leaves_no_file_out(index: str, tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "more/b.txt")
    (tmp_path / "index.json").write_text(index)
    names = [Path(source.name).name for source in corpus_of(tmp_path).sources]
    assert names == ["a.txt", "index.json", "b.txt"]


def test_list_of_records_in_an_object_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "set" / "a.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"version": "1", "data": [{"n": 1, "text": "plum"}]}))
    assert [source.format for source in corpus_of(path.parent).sources] == ["text"]
    assert "its list `data` has records with the field `text`" in caplog.text
    caplog.clear()
    path.write_text(json.dumps({"name": "package", "text": "none"}))
    corpus_of(path.parent)
    assert not caplog.text


def test_files_beside_those_of_a_saved_set_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(saved))
    write(saved, "notes.txt")
    caplog.set_level("INFO")
    (source,) = corpus_of(saved).sources
    assert source.name.endswith(".arrow")
    assert f"{saved}: is a saved data set, and does not list notes.txt: left out" in caplog.text


def test_a_state_of_another_program_is_named_with_a_way_out(tmp_path: Path) -> None:
    """The message was `'_data_files'`."""
    write(tmp_path, "state.json", "dataset_info.json", "a.jsonl")
    with pytest.raises(CorpusError, match="cannot be read: it lists no files as `_data_files`"):
        corpus_of(tmp_path)
    (source,) = corpus_of(tmp_path, exclude=("state.json",)).sources
    assert source.name.endswith("a.jsonl")
