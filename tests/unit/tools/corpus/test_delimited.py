"""CSV and TSV that swallow lines, doubled columns, lists that no column holds."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.corpora import read, read_bytes

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus import blocks
from tokenfeed.tools.corpus.formats import delimited
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.sources import find_corpus


def test_a_quote_that_never_closes_names_the_lines_it_swallows(tmp_path: Path) -> None:
    lines = [b"text", b"a", b'"b', *(b"line %d" % number for number in range(99))]
    for data in (b"\n".join(lines), b"\r\n".join([*lines, b""])):
        good, bad = read_bytes(tmp_path / "a.csv", data)
        assert good == {0: b"a"}
        reason = "a quoted value never ends: lines 3 to 102 are lost; is a quote not closed?"
        assert bad == {1: reason}


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_a_byte_order_mark_in_a_value_survives(tmp_path: Path, name: str) -> None:
    comma, mark = b"\t" if name == "a.tsv" else b",", b"\xef\xbb\xbf"
    values = [mark + b"a", b"b", mark + mark + b"c", mark + b"d", b"\xef\xbb", mark] * 3
    rows = [comma.join((value, b"1")) for value in [mark + b"text", *values]]
    rows[7:7] = [b"a row with too many values" + comma * 5]
    data = b"\n".join(rows)
    pack = gzip.compress if name.endswith(".gz") else bytes
    good, bad = read_bytes(tmp_path / name, pack(data))
    assert list(good.values()) == [value for value in values if value != b"\xef\xbb"]
    assert sorted(bad) == [4, 6, 11, 17]


def test_a_quote_that_never_closes_beyond_max_record_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "FIRST_BLOCK_BYTES", 1 << 8)
    (tmp_path / "a.csv").write_bytes(b'text\na\n"b\n' + b"line\n" * 1000)
    good, bad = read(tmp_path / "a.csv", max_record_bytes=1 << 10)
    assert (good, list(bad)) == ({0: b"a"}, [1])
    assert bad[1] == (
        "the row has 5,002 bytes, more than the 1,024 of `--max-record`: lines 3 to 1003 are lost; "
        "is a quote not closed?"
    )


def test_a_row_too_long_for_memory_ends_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "LONGEST_ROW_BYTES", 1 << 12)
    monkeypatch.setattr(blocks, "FIRST_BLOCK_BYTES", 1 << 8)
    (tmp_path / "a.csv").write_bytes(b'text\na\n"b\n' + b"line\n" * 1000 + b'"\nc\n')
    good, bad = read(tmp_path / "a.csv", max_record_bytes=1 << 10)
    reason = "cannot be read from here on: the row that begins in line 3 has more than 4,096 bytes"
    assert (good, bad) == ({0: b"a"}, {1: reason})


QUOTES = [b'"b', b"c", b'say "x"', b'"y"', b'"']
CASES: list[tuple[str, bytes, dict[int, bytes], dict[int, str]]] = [
    ("a.csv", b'text\na\n"b\nc\n"d\ne\n', {0: b"a", 2: b"e"}, {1: "lines 3 to 5 are lost"}),
    ("a.csv", b'text\n5" pipe\nsay "hi"\n"a" b\n', {0: b'5" pipe', 1: b'say "hi"', 2: b"a b"}, {}),
    ("a.csv", b'id,text\n4,"x\ny"\n5,""\n"6","q""q"\n', {0: b"x\ny", 1: b"", 2: b'q"q'}, {}),
    ("a.tsv", b"\n".join([b"text", *QUOTES]), dict(enumerate(QUOTES)), {}),
    ("a.csv", b"text,id,text\na,1,b\n", {}, {0: "has 2 columns `text`"}),
    ("a.tsv", b"text\tid\ttext\na\t1\tb\n", {}, {0: "has 2 columns `text`"}),
    ("a.csv", b"text,id\n\xfc\n1,\xfc\n", {1: b"1"}, {0: "has 1 values, expected 2"}),
    ("a.csv", b"id;text\n1;a\n", {}, {0: "has one column, 'id;text': separate values by commas"}),
    ("a.tsv", b"id\ttext\n\xfc\tb\n2\t\xfc\n", {0: b"b"}, {1: "has invalid UTF-8 at byte 0"}),
]


@pytest.mark.parametrize(("name", "data", "good", "bad"), CASES)
def test_rows_that_cannot_be_read_are_named_and_cost_themselves(
    tmp_path: Path, name: str, data: bytes, good: dict[int, bytes], bad: dict[int, str]
) -> None:
    found, rejects = read_bytes(tmp_path / name, data)
    assert (found, list(rejects)) == (good, list(bad))
    assert all(bad[number] in reason for number, reason in rejects.items())


@pytest.mark.parametrize("header", [b"id,text", b"\xef\xbb\xbfid,text", b'\r\n"id","text"'])
def test_a_header_alone_is_an_empty_table(tmp_path: Path, header: bytes) -> None:
    for end in (b"", b"\n", b"\r\n", b"\r", b"\n\n"):
        assert read_bytes(tmp_path / "a.csv", header + end) == ({}, {})


def test_lists_from_a_csv_are_refused_in_a_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,tags\n[],[]\n")
    with pytest.raises(CorpusError, match=r"a\.csv: `text` must hold lists.*JSON Lines or Parquet"):
        read(tmp_path / "a.csv", FieldKind.WORDS)


@pytest.mark.parametrize(
    ("line", "is_said"),
    [('"say ""hi"""\t1', True), ('1\t"""x"" y"', True), ('"say" it\t1', False), ('""\t""', False)],
)
def test_quoted_values_of_a_tsv_are_a_warning(
    line: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.tsv").write_text(f"text\tlabel\n{line}\n")
    find_corpus((str(tmp_path / "a.tsv"),), out=None, field="text")
    assert ("a.tsv: has quoted values" in caplog.text) == is_said


PIECES = st.sampled_from(['"', '"', '""', ",", "\n", "\r\n", "a", "b c", '","', '"\n"', "1,"])


@pytest.mark.slow
@given(text=st.lists(PIECES, max_size=30).map("".join), block_bytes=st.integers(1, 9))
@example(text='"a\n"b\n"c', block_bytes=3)
@example(text='"a""\n', block_bytes=4)
def test_no_line_is_lost_in_silence_wherever_blocks_end(
    tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int
) -> None:
    """Blocks change nothing, and without a reject the standard library reads the same rows."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    data = f"id,text\n{text}".encode()
    whole = read_bytes(path, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        assert read(path) == whole
    if not whole[1]:
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        assert [row[1].encode() for row in rows] == list(whole[0].values())


@given(
    values=st.lists(st.text('ab,"\n\r', max_size=40), max_size=12),
    block_bytes=st.integers(1, 30),
    ending=st.sampled_from([".csv", ".tsv"]),
    is_quoted=st.booleans(),
)
@example(values=["a" * 30 + '"', 'b"', '"c'], block_bytes=9, ending=".csv", is_quoted=False)
@example(values=["a" * 23 + '"' + "a" * 9], block_bytes=9, ending=".csv", is_quoted=True)
def test_rows_beyond_max_record_are_rejected_wherever_blocks_end(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[str],
    block_bytes: int,
    ending: str,
    is_quoted: bool,
) -> None:
    plain = [value.replace("\n", "").replace("\r", "") for value in values]
    if ending == ".csv" and is_quoted:
        rows = [f'1,"{value.replace(chr(34), chr(34) * 2)}"' for value in values]
    elif ending == ".csv":
        values = [f"q{value.replace(',', '')}" for value in plain]
        rows = [f"1,{value}" for value in values]
    else:
        values, rows = plain, [f"1\t{value}" for value in plain]
    path = tmp_path_factory.mktemp("rows") / f"a{ending}"
    path.write_bytes("\n".join(["i\ttext" if ending == ".tsv" else "i,text", *rows]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "FIRST_BLOCK_BYTES", block_bytes)
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        good, bad = read(path, max_record_bytes=25)
    long = [number for number, row in enumerate(rows) if len(row) > 25]
    assert good == {n: value.encode() for n, value in enumerate(values) if n not in long}
    assert list(bad) == long
    for number in long:
        assert bad[number].startswith(f"the row has {len(rows[number])} bytes, more than the 25 of")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_header_beyond_max_record_is_one_reject(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(mark + b"text," + b"b" * 95 + b"\nc,d\n")
    good, bad = read(tmp_path / "a.csv", max_record_bytes=25)
    assert (good, list(bad)) == ({}, [0])
    assert bad[0].startswith("the header cannot be read: the row has 100 bytes")
