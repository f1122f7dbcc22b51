"""Text that is not UTF-8 becomes the same rows as its UTF-8, or a reject that says what to do."""

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import call, error_of, run
from support.pretokenizing import make

from tokenfeed.tools import shards
from tokenfeed.tools.corpus import blocks
from tokenfeed.tools.corpus.blocks import Blocks
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus
from tokenfeed.tools.corpus.units import cut_units, read_records

ENCODINGS = {
    "latin-1": "Käse für Jérôme, 100 £. ",
    "cp1252": "“Žádný” œuvre, 5 €. ",
    "shift_jis": "日本語のテキスト。カタカナ。",
    "gbk": "汉字文本。",
    "koi8-r": "Русский текст. ",
    "utf-16-le": "no mark: 日本語 \U0001f600 ",
    "iso2022_jp": "日本語のテキスト。",
    "utf-7": "Käse + 日本語 ",
    "hz": "汉字 ~ 文本。",
    "utf-16": "a mark: 日本語 \U0001f600 ",
    "utf-32": "a mark: 日本語 \U0001f600 ",
}


def file_of(ending: str, texts: list[str]) -> str:
    """Return the content of a file with texts."""
    if ending == ".txt":
        return "".join(texts)
    if ending == ".csv":
        table = io.StringIO()
        csv.writer(table).writerows([["n", "text"], *enumerate(texts)])
        return table.getvalue()
    records = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    return f"[{', '.join(records)}]" if ending == ".json" else "\n".join(records) + "\n"


def texts_in(folder: Path, encoding: str | None, shard_bytes: int = 1 << 30) -> list[str]:
    corpus = find_corpus((str(folder),), out=None, field="text", encoding=encoding)
    found = []
    for unit in cut_units(corpus.sources, shard_bytes):
        for part in unit.parts:
            assert isinstance(part, FilePart)
            for records in read_records(part, {"text": FieldKind.TEXT}):
                assert records.rejects == []
                found += [text.decode() for text in records.fields["text"]]
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("pack", [False, True])
def test_texts_of_an_encoding_are_those_of_utf8(
    tmp_path: Path, encoding: str, ending: str, pack: bool
) -> None:
    rng, sample = random.Random(f"{encoding}{ending}"), ENCODINGS[encoding]
    texts = [sample[: rng.randrange(3, len(sample))] * rng.randrange(1, 40) for _ in range(300)]
    content = file_of(ending, texts)
    assert len(content) > 1 << 12
    for name, data in (("other", content.encode(encoding)), ("utf8", content.encode())):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / f"a{ending}{'.gz' * pack}"
        path.write_bytes(gzip.compress(data) if pack else data)
    has_mark = encoding in ("utf-16", "utf-32")
    found = texts_in(tmp_path / "other", None if has_mark else encoding, shard_bytes=1 << 12)
    assert found == texts_in(tmp_path / "utf8", None) != []
    for other in ("koi8-r", "utf-16-le", "cp500"):  # UTF-8 stays as it is
        assert found == texts_in(tmp_path / "utf8", other)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-7", "cp500"])
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".json", ".csv"])
def test_ascii_of_an_encoding_is_told_from_plain_ascii(
    tmp_path: Path, encoding: str, ending: str
) -> None:
    """UTF-16 pads ASCII with NUL, which is valid UTF-8."""
    texts = [f"line {number} = plain, with no other letters" for number in range(50)]
    for name, used in (("other", encoding), ("plain", "ascii")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"a{ending}").write_bytes(file_of(ending, texts).encode(used))
        whole = ["".join(texts)] if ending == ".txt" else texts
        assert texts_in(tmp_path / name, encoding) == whole


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".json", ".csv", ".jsonl.gz"])
@pytest.mark.parametrize("letters", ["plain ASCII", "Русский текст, чай", "日本語 text"])
def test_wide_text_without_a_mark_is_rejected_with_its_encoding(
    encoding: str, ending: str, letters: str, tmp_path: Path
) -> None:
    """ASCII and Russian in UTF-16 are also UTF-8, with NULs."""
    texts = [f"{letters} {number}" for number in range(40)]
    content = file_of(ending, texts).encode(encoding)
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    for other in {None, "latin-1", "utf-16-le", "utf-16-be"} - {encoding}:
        (reason,) = rejects_of(path, other)
        assert f"without a byte-order mark. Give --encoding {encoding}" in reason
    assert texts_in(tmp_path, encoding) in (texts, ["".join(texts)])


def rejects_of(path: Path, encoding: str | None = None) -> list[str]:
    corpus = find_corpus((str(path),), out=None, field="text", encoding=encoding)
    units = cut_units(corpus.sources, 100)  # a file of records is cut
    parts = [part for unit in units for part in unit.parts]
    found = (read_records(part, {"text": FieldKind.TEXT}) for part in parts)
    return [reject.reason for records in chain.from_iterable(found) for reject in records.rejects]


@pytest.mark.parametrize("text", [b"\0", b"a\0b\0cd\0e", b"\0" * 99, b"words, one NUL\0 more"])
def test_a_text_with_some_nuls_is_read_as_utf8(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    assert rejects_of(tmp_path / "a.txt") == []


@pytest.mark.parametrize(("ending", "most"), [(".txt", 2_000_000), ("", 72_000_000)])
def test_look_at_a_packed_file_reads_its_beginning(tmp_path: Path, ending: str, most: int) -> None:
    """What is read to find the format decides about the encoding too. Without an ending, these are
    64 KB, and then 32 MB."""
    path = tmp_path / f"a{ending}.gz"
    path.write_bytes(gzip.compress(b"plain \n" * 14_000_000))
    read: list[int] = []

    class Counted(Blocks):
        def __iter__(self) -> Iterator[bytes]:
            for block in super().__iter__():
                read.append(len(block))
                yield block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "Blocks", Counted)
        find_corpus((str(tmp_path),), out=None, field="text", encoding="latin-1")
    assert sum(read) < most


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    encoding=st.sampled_from(["utf-16", "utf-32", "utf-8-sig"]),
)
def test_any_text_with_a_mark_is_read(
    tmp_path_factory: pytest.TempPathFactory, text: str, encoding: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.txt").write_bytes(text.encode(encoding))
    assert texts_in(folder, None) == [text]


def test_text_that_is_not_utf8_is_rejected_with_a_remedy(tmp_path: Path, tokenizer: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("plain")
    (corpus / "b.txt").write_bytes("Käse".encode("latin-1"))
    (corpus / "c.jsonl").write_bytes('{"text": "Käse"}\n'.encode("latin-1"))
    (corpus / "d.txt").write_bytes("cut short".encode("utf-16")[:-1])
    (corpus / "e.jsonl").write_bytes(gzip.compress(b'{"text": "a"}', mtime=0))  # no line break
    assert make(corpus, tmp_path / "out", tokenizer).rejected == 4
    lines = map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines())
    reasons = {Path(line["file"]).name: line["reason"] for line in lines}
    for name in ("b.txt", "c.jsonl"):
        assert "Give --encoding NAME if all such files have the encoding NAME" in reasons[name]
    assert "utf-16" in reasons["d.txt"]
    assert "The file is compressed: let its name end in .gz" in reasons["e.jsonl"]
    (corpus / "e.jsonl").unlink()
    again = make(corpus, tmp_path / "latin", tokenizer, encoding="latin-1")
    assert (again.documents, again.rejected) == (3, 1)
    message = error_of(corpus, tmp_path / "wrong", "--encoding", "latin-99", expect=2)
    assert message.startswith(
        "error: `--encoding`=latin-99: Python knows no encoding of texts with"
    )
    assert message.endswith("Give one like latin-1, cp1252, shift_jis, gbk, koi8-r or utf-16-le.")
    assert "`--encoding`=hex: Python knows no encoding of texts" in error_of(
        corpus, tmp_path / "wrong", "--encoding", "hex", expect=2
    )


NAMES = {
    "novel.epub": ("an e-book", b"PK\3\4\0"),
    "letter.docx": ("a document of a word processor", b"PK\3\4\0"),
    "thesis.pdf": ("a PDF", b"%PDF-1.4\nall of it looks like text\n"),
    "all.zip": ("an archive", b"PK\3\4\0"),
    "photo.png": ("a binary file", b"\x89PNG\0"),
}


def test_text_and_images_that_do_not_have_the_given_encoding_become_no_rows(
    tmp_path: Path, tokenizer: Path
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "plain.txt").write_text("plain words")
    (corpus / "latin.txt").write_bytes("Le café est bon, très bon.".encode("latin-1"))
    (corpus / "kana.txt").write_bytes("日本語のテキスト".encode("utf-16-le"))
    (corpus / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x81\x8d")
    lines = {}
    for encoding in ("utf-16-le", "cp1252"):
        out = tmp_path / encoding
        run(corpus, out, "--tokenizer", tokenizer, "--encoding", encoding)
        rejects = map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
        lines[encoding] = {Path(each["file"]).name: each["reason"] for each in rejects}
    assert "neither UTF-8 nor utf-16-le" in lines["utf-16-le"].pop("latin.txt")
    assert lines["utf-16-le"].keys() == {"image.png"}
    assert "a binary file" in lines["cp1252"]["image.png"]
    assert "latin.txt" not in lines["cp1252"]


def test_each_kind_of_reject_is_named_once_with_its_number(tmp_path: Path, tokenizer: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    (corpus / "a.txt").write_text("some words")
    for number in range(3):
        (corpus / f"latin-{number}.txt").write_bytes(b"caf\xe9 au lait")
    (corpus / "table.csv").write_text("id,review\n1,good\n")
    printed = run(corpus, out, "--tokenizer", tokenizer).stdout
    assert "latin-0.txt, record 0: the text has invalid UTF-8 at byte 3" in printed
    assert " (and 2 like it)\n" in printed
    assert "no column `text`; it has: id, review. Name it: --field text=NAME\n" in printed
    (corpus / "b.txt").write_text("more words")
    error = error_of(corpus, out, "--tokenizer", tokenizer, expect=2)
    assert f"`pretokenize NEW OUT --tokenizer {out}`, then `train --shards {out} OUT`" in error


def test_every_file_left_out_is_named_with_a_remedy(tmp_path: Path, tokenizer: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"{number}.txt").write_text("some words")
    for number in range(7):
        (corpus / f"{number}.bin").write_bytes(b"\0")
    for name, (_, data) in NAMES.items():
        (corpus / name).write_bytes(data)
    for name, (kind, _) in NAMES.items():
        if kind != "a binary file":
            message = error_of(corpus / name, tmp_path / "none")
            assert message.startswith(f"error: {corpus / name}: is {kind}, which is not read: ")
    printed = run(corpus, out, "--tokenizer", tokenizer).stdout
    assert f"1 PDF ({corpus}/thesis.pdf): convert it, like `pdftotext FILE`\n" in printed
    first = ", ".join(f"{corpus}/{number}.bin" for number in range(5))
    assert f"8 binary files ({first}, ...): if it is text, name its --encoding\n" in printed
    assert f"{out}/rejects.jsonl lists each\n" in printed
    lines = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert {line["file"] for line in lines} == {
        str(path) for path in corpus.iterdir() if path.suffix != ".txt"
    }
    for line in lines:
        kind, _ = NAMES.get(Path(line["file"]).name, ("a binary file", b""))
        assert line["reason"].startswith(f"is {kind}, which is not read: ")
    assert call(shards.main, "verify", out).returncode == 0
    dropped = tmp_path / "dropped"
    call(shards.main, "select", out, dropped, "--where", "origin *0.txt", "--drop")
    assert (dropped / "rejects.jsonl").read_text() == ""


def test_markup_that_is_read_as_text_is_counted(tmp_path: Path, tokenizer: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.html", "b.HTML", "c.svg", "d.txt", "e.md", "f.svg.gz", "g.csv.old"):
        data = b"<p>some words</p>"
        (corpus / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    made = make(corpus, tmp_path / "out", tokenizer)
    assert made.facts()["read as text"].startswith(
        "2 .html, 2 .svg, 1 .csv.old, with their markup. "
    )
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.md").write_text("# words")
    assert make(tmp_path / "plain", tmp_path / "none", tokenizer).facts()["read as text"] == ""
