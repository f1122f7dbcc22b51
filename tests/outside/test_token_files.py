"""Files of token ids of other projects, there and back through `pretokenize --task ids`."""

import csv
import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import call
from support.data_sets import rows_in
from support.object_server import Remote, as_own_process, remote_store
from support.token_rows import (
    Rows,
    ids_of,
    save_words,
    write_datatrove,
    write_llm_c,
    write_megatron,
    write_nanogpt,
    write_numpy,
    write_olmo,
)

from tokenfeed import Manifest, pretokenize
from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenfeedError
from tokenfeed.tools import pretokenize as pretokenize_command

IDS, END = 700, 5
Write = Callable[..., Path]
WRITERS: dict[str, Write] = {
    "Megatron": write_megatron,
    "nanoGPT": write_nanogpt,
    "llm.c": write_llm_c,
    "OLMo": write_olmo,
    "numpy.save": write_numpy,
    "datatrove": write_datatrove,
}
INDEXES = {"Megatron": "train.idx", "OLMo": "part-0.csv.gz", "datatrove": "0.ds.index"}


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """An empty bucket. The process of the test is a program of ours."""
    pytest.importorskip("obstore")
    as_own_process(monkeypatch)
    with remote_store(monkeypatch) as remote:
        yield remote


def made_rows(count: int, seed: int) -> Rows:
    """Rows of which each ends with the end token, and has it nowhere else."""
    draw = random.Random(seed)
    others = [token for token in range(IDS) if token != END]
    return [[*draw.choices(others, k=draw.randint(0, 60)), END] for _ in range(count)]


ROWS = made_rows(120, 1)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 700 ids."""
    return save_words(tmp_path_factory.mktemp("words") / "tokenizer.json", IDS)


def copied(source: object, out: Path, tokenizer: Path, **options: Any) -> Rows:
    options = {"validation": 0, "end_token": f"w{END}"} | options
    pretokenize(source, out, task="ids", tokenizer=tokenizer, **options)
    return rows_in(out)


@pytest.mark.parametrize("kind", WRITERS)
def test_folder_of_another_project_gives_its_rows(kind: str, tmp_path: Path, words: Path) -> None:
    """The files beside the ids are no records of their own, and any cut gives the same rows."""
    (tmp_path / "theirs").mkdir()
    WRITERS[kind](tmp_path / "theirs", ROWS)
    for number, size in enumerate((300, "1KB", "auto")):
        out = tmp_path / f"out{number}"
        assert copied(tmp_path / "theirs", out, words, shard_size=str(size)) == ROWS
        manifest = Manifest.read(out)
        assert (manifest.ledger.read, manifest.ledger.rejected) == (len(ROWS), 0)
        assert (len([*out.glob("train/*.arrow")]) > 3) == (size != "auto")
        assert not (out / "rejects.jsonl").read_bytes()
        assert len((out / "sources.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind not in ("nanoGPT", "OLMo")])
def test_ids_of_four_bytes_are_read_too(kind: str, tmp_path: Path, words: Path) -> None:
    (tmp_path / "theirs").mkdir()
    WRITERS[kind](tmp_path / "theirs", ROWS, width=4)
    assert copied(tmp_path / "theirs", tmp_path / "out", words, shard_size="1KB") == ROWS


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=60).filter(any),
    kind=st.sampled_from(sorted(INDEXES)),
    size=st.integers(1, 400),
)
def test_rows_of_any_lengths_keep_their_borders(
    lengths: list[int],
    kind: str,
    size: int,
    tmp_path_factory: pytest.TempPathFactory,
    words: Path,
) -> None:
    folder = tmp_path_factory.mktemp("theirs")
    rows = [[(number + 1) % IDS] * length for number, length in enumerate(lengths)]
    (folder / "theirs").mkdir()
    WRITERS[kind](folder / "theirs", rows)
    made = copied(folder / "theirs", folder / "out", words, shard_size=str(size))
    assert made == [row for row in rows if row]
    ledger = Manifest.read(folder / "out").ledger
    assert (ledger.read, ledger.empty) == (len(rows), lengths.count(0))


@pytest.mark.parametrize("kind", INDEXES)
def test_changed_index_never_gives_rows_that_the_index_does_not_say(
    kind: str, tmp_path: Path, words: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 40 changes, each is refused, warned of, or without an effect."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    WRITERS[kind](theirs, ROWS)
    index, draw = theirs / INDEXES[kind], random.Random(kind)
    sound, refused = index.read_bytes(), 0
    for number in range(40):
        changed = bytearray(sound)
        if number % 10:
            changed[draw.randrange(len(sound))] ^= 1 << draw.randrange(8)
        else:
            del changed[draw.randrange(len(sound)) :]
        index.write_bytes(changed)
        caplog.clear()
        try:
            made = copied(theirs, tmp_path / f"out{number}", words)
        except TokenfeedError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        assert made == ROWS or "Does the index belong to the file?" in caplog.text
    assert refused > 25


@pytest.mark.parametrize("kind", WRITERS)
def test_changed_ids_change_no_other_row(kind: str, tmp_path: Path, words: Path) -> None:
    """These formats have no checksums of ids: an id beyond the vocabulary is a reject."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    path = WRITERS[kind](theirs, ROWS)
    sound, draw = path.read_bytes(), random.Random(kind)
    head = len(sound) - 2 * len(ids_of(ROWS))
    for number in range(6):
        changed = bytearray(sound)
        changed[draw.randrange(head, len(sound))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        made = copied(theirs, tmp_path / f"out{number}", words)
        wrong = [row for row in made if row not in ROWS]
        missing = [row for row in ROWS if row not in made]
        assert len(wrong) <= 2
        assert len(missing) <= 2


@pytest.mark.parametrize("kind", WRITERS)
def test_file_that_was_cut_short_is_refused(kind: str, tmp_path: Path, words: Path) -> None:
    path = WRITERS[kind](tmp_path, ROWS)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorpusError, match=r"bytes|has rows up to id|values and a header"):
        copied(path, tmp_path / "out", words)


@pytest.mark.parametrize("kind", INDEXES)
def test_index_of_another_file_is_refused(kind: str, tmp_path: Path, words: Path) -> None:
    (tmp_path / "other").mkdir()
    WRITERS[kind](tmp_path / "other", made_rows(120, 2))
    path = WRITERS[kind](tmp_path, ROWS)
    (tmp_path / INDEXES[kind]).write_bytes((tmp_path / "other" / INDEXES[kind]).read_bytes())
    with pytest.raises(CorpusError, match=r"record 0: .*(has rows up to id|follow one another)"):
        copied(path, tmp_path / "out", words)


def test_file_without_index_needs_an_end_token(tmp_path: Path, words: Path) -> None:
    path = write_nanogpt(tmp_path, ROWS)
    with pytest.raises(TokenfeedError, match=r"train\.bin: has no index, .* by `--end-token`"):
        copied(path, tmp_path / "out", words, end_token=None)


def test_missing_end_token_stops_before_other_files_are_copied(tmp_path: Path, words: Path) -> None:
    write_olmo(tmp_path, ROWS)
    write_nanogpt(tmp_path, ROWS)
    with pytest.raises(ConfigError, match=r"^\S+train\.bin: has no index, [^\n]*`--end-token`\.$"):
        copied(tmp_path, tmp_path / "out", words, end_token=None)


@pytest.mark.parametrize("kind", WRITERS)
def test_glob_of_all_files_of_a_folder_rejects_no_index(
    kind: str, tmp_path: Path, words: Path
) -> None:
    WRITERS[kind](tmp_path, ROWS)
    out, files = tmp_path / "out", sorted(tmp_path.glob("*.*"))
    options = (
        "--task",
        "ids",
        "--tokenizer",
        words,
        "--end-token",
        f"w{END}",
        "--max-rejects",
        "0",
    )
    call(pretokenize_command.main, *files, out, *options, "--validation", 0, "--workers", 1)
    assert rows_in(out) == ROWS


@pytest.mark.parametrize("kind", INDEXES)
def test_names_in_upper_case_have_their_index(kind: str, tmp_path: Path, words: Path) -> None:
    """The rows have no end token, so only the index has their borders."""
    rows, theirs = [[1, 2], [3], [4, 6, 7]], tmp_path / "IDS \u00fc"
    theirs.mkdir()
    WRITERS[kind](theirs, rows)
    for file in [*theirs.iterdir()]:
        file.rename(theirs / file.name.upper())
    assert copied(theirs, tmp_path / "out", words, max_rejects=0) == rows
    assert Manifest.read(tmp_path / "out").ledger.read == len(rows)
    for file in theirs.glob("*.*[XZ]"):  # the index was read: a change makes the input another
        os.utime(file, ns=(1, 1))
    with pytest.raises(TokenfeedError, match="names, sizes and times of the input files"):
        copied(theirs, tmp_path / "out", words, max_rejects=0)


def test_names_of_documents_in_a_table_may_have_commas_and_line_breaks(
    tmp_path: Path, words: Path
) -> None:
    path = write_olmo(tmp_path, ROWS)
    with gzip.open(tmp_path / "part-0.csv.gz", "rt") as table:
        lines = [line.split(",") for line in table]
    with gzip.open(tmp_path / "part-0.csv.gz", "wt", newline="") as table:
        rows = ([a, b, f'a, "b"\n{name}', source, 0] for a, b, name, source, _ in lines)
        csv.writer(table).writerows(rows)
    assert copied(path, tmp_path / "out", words) == ROWS
    with gzip.open(tmp_path / "part-0.csv.gz", "at") as table:
        table.write(f"{len(ids_of(ROWS))},,name,source,0\n")
    with pytest.raises(CorpusError, match=r"part-0\.csv\.gz is damaged"):
        copied(path, tmp_path / "none", words)


@pytest.mark.parametrize("dtype", ["<i8", "<u8", "<i2"])
def test_numpy_whole_numbers_of_any_size_are_read(dtype: str, tmp_path: Path, words: Path) -> None:
    np.save(tmp_path / "a.npy", ids_of(ROWS).astype(dtype))
    assert copied(tmp_path / "a.npy", tmp_path / "out", words) == ROWS


def test_numpy_header_of_python_2_is_read_without_a_warning(
    tmp_path: Path, words: Path, recwarn: pytest.WarningsRecorder
) -> None:
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (%dL,), }\n" % len(ids_of(ROWS))
    magic = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(magic + header + ids_of(ROWS).tobytes())
    assert copied(tmp_path / "a.npy", tmp_path / "out", words) == ROWS
    assert not [each for each in recwarn if "Python 2" in str(each.message)]


@pytest.mark.parametrize("odd", [np.zeros(9, ">i4"), np.zeros((3, 3), "<u2"), np.zeros(9)])
def test_numpy_array_that_is_not_read_names_what_to_save(
    odd: np.ndarray, tmp_path: Path, words: Path
) -> None:
    np.save(tmp_path / "a.npy", odd)
    with pytest.raises(CorpusError, match=r"^[^\n]*Save `ids\.astype\('uint32'\)\.ravel\(\)`\.$"):
        copied(tmp_path / "a.npy", tmp_path / "out", words)


@pytest.mark.parametrize("counts", [(2**64 - 1, 2**64 - 1), (2**63, 5), (1, 2**61)], ids=str)
def test_huge_counts_in_a_megatron_index_are_refused(
    counts: tuple[int, int], tmp_path: Path, words: Path
) -> None:
    path = write_megatron(tmp_path, ROWS)
    index = bytearray((tmp_path / "train.idx").read_bytes())
    index[18:34] = np.array(counts, "<u8").tobytes()
    (tmp_path / "train.idx").write_bytes(index)
    with pytest.raises(CorpusError, match=r"train\.idx has [\d,]+ bytes, expected [\d,]{9,}\."):
        copied(path, tmp_path / "out", words)


def test_ids_of_four_bytes_without_a_header_are_refused(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "train.bin"
    ids_of(ROWS, width=4).tofile(path)
    with pytest.raises(CorpusError, match="every second id of two bytes is 0"):
        copied(path, tmp_path / "out", words)


def test_ids_without_a_header_are_refused_if_the_tokenizer_needs_four_bytes(
    tmp_path: Path,
) -> None:
    """Such a file never says that its ids have four bytes. Every second one of two is below 3."""
    path, ids = tmp_path / "train.bin", np.arange(1000, dtype="<u4") * 170
    ids.tofile(path)
    large = save_words(tmp_path / "large.json", 170_000)
    with pytest.raises(ConfigError) as refused:
        copied(path, tmp_path / "out", large, end_token="w5")
    assert str(refused.value) == (
        f"{path}: has no header and no index, so its ids have two bytes, but those of the "
        "tokenizer need four. Save them by numpy.save, or put Megatron's .idx beside the file."
    )
    np.save(tmp_path / "train.npy", ids)
    made = copied(tmp_path / "train.npy", tmp_path / "out", large, end_token="w170")
    assert made == [[0, 170], ids[2:].tolist()]


def test_row_that_is_longer_than_a_record_may_be_is_rejected(tmp_path: Path, words: Path) -> None:
    rows = [[1, END], [2] * 3000 + [END], [3, END]]
    path = write_megatron(tmp_path, rows)
    assert copied(path, tmp_path / "out", words, max_record="1KB") == [rows[0], rows[2]]
    assert "6,002 bytes, more than the" in (tmp_path / "out/rejects.jsonl").read_text()


def left_out_of(out: Path) -> list[str]:
    """The names of the files that a run did not read, as `rejects.jsonl` lists them."""
    lines = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
    return sorted(Path(line["file"]).name for line in lines if "record" not in line)


@pytest.mark.parametrize("is_remote", [False, True])
def test_token_files_are_left_out_of_a_corpus_of_texts_and_named(
    is_remote: bool, tmp_path: Path, words: Path, remote: Remote
) -> None:
    (tmp_path / "corpus").mkdir()
    write_datatrove(tmp_path / "corpus", ROWS)
    write_megatron(tmp_path / "corpus", ROWS)
    (tmp_path / "corpus/a.txt").write_text("w1 w2")
    remote.put_folder(tmp_path / "corpus")
    source = f"s3://{remote.prefix}" if is_remote else tmp_path / "corpus"
    pretokenize(source, tmp_path / "out", tokenizer=words, end_token="w5")
    assert Manifest.read(tmp_path / "out").ledger.read == 1
    names = ["0.ds", "0.ds.index", "0.ds.metadata", "train.bin", "train.idx"]
    assert left_out_of(tmp_path / "out") == names


@pytest.mark.parametrize("has_glob", [False, True])
def test_files_beside_ids_that_are_not_read_are_named(
    has_glob: bool, tmp_path: Path, words: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write_datatrove(theirs, ROWS)
    write_megatron(theirs, ROWS)
    (theirs / "0.ds.loss").write_bytes(b"\1" * len(ids_of(ROWS)))
    (theirs / "lost.idx").write_bytes((theirs / "train.idx").read_bytes())
    files = sorted(theirs.iterdir()) if has_glob else [theirs]
    options = ("--task", "ids", "--tokenizer", words, "--end-token", f"w{END}", "--validation", 0)
    done = call(pretokenize_command.main, *files, tmp_path / "out", *options, "--workers", 1)
    assert left_out_of(tmp_path / "out") == ["0.ds.loss", "lost.idx"]
    assert f"1 index of token ids ({theirs}/lost.idx): put it beside its file, and " in done.stdout
    assert f"1 loss mask of datatrove ({theirs}/0.ds.loss): " in done.stdout
    assert rows_in(tmp_path / "out") == ROWS + ROWS


@pytest.mark.parametrize(
    ("content", "project"),
    [
        ('{"chunks": [{"filename": "chunk-0-0.bin"}], "config": {}}', "litData"),
        ('{"shards": [{"raw_data": {"basename": "shard.0.mds"}}]}', "mosaicml-streaming"),
    ],
)
def test_data_set_of_a_withdrawn_format_names_what_to_do(
    content: str, project: str, tmp_path: Path, words: Path
) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(CorpusError, match=rf"{project}, which is not read.*pretokenize\(rows"):
        copied(tmp_path, tmp_path / "out", words)


@pytest.mark.parametrize("given", ["file", "bucket", "object"])
def test_chunk_of_litdata_is_refused_wherever_it_stands(
    given: str, tmp_path: Path, words: Path, remote: Remote
) -> None:
    """Its ids have a header of offsets, which would be read as ids of two bytes."""
    path = write_nanogpt(tmp_path, ROWS)
    (tmp_path / "index.json").write_text('{"chunks": [{"filename": "train.bin"}], "config": {}}')
    remote.put_folder(tmp_path)
    source = {
        "file": str(path),
        "bucket": f"s3://{remote.prefix}",
        "object": f"s3://{remote.prefix}/train.bin",
    }[given]
    with pytest.raises(CorpusError, match=r"litData, which is not read.*pretokenize\(rows"):
        copied(source, tmp_path / "out", words)


@pytest.mark.parametrize("kind", INDEXES)
def test_files_of_a_bucket_have_their_index_beside_them(
    kind: str, tmp_path: Path, words: Path, remote: Remote
) -> None:
    (tmp_path / "theirs").mkdir()
    path = WRITERS[kind](tmp_path / "theirs", ROWS)
    remote.put_folder(tmp_path / "theirs")
    for number, name in enumerate((path.name, "")):
        source = f"s3://{remote.prefix}/{name}".rstrip("/")
        assert copied(source, tmp_path / f"out{number}", words, shard_size="1KB") == ROWS
    remote.put(INDEXES[kind], remote.content(INDEXES[kind]) + b" ")  # the ids are the same
    with pytest.raises(TokenfeedError, match="names, sizes and times of the input files"):
        copied(f"s3://{remote.prefix}/{path.name}", tmp_path / "out0", words, shard_size="1KB")


def test_any_number_of_workers_writes_the_same_shards(tmp_path: Path, words: Path) -> None:

    path = write_nanogpt(tmp_path, made_rows(3000, 3))
    for workers in (1, 2):
        copied(path, tmp_path / f"out{workers}", words, shard_size="20KB", workers=workers)
    files = [sorted((tmp_path / f"out{n}").rglob("*.arrow")) for n in (1, 2)]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    assert len(files[0]) > 5
    assert np.concatenate([np.array(row) for row in rows_in(tmp_path / "out1")]).size
