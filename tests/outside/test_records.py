"""Which records are used: `--max-record N` takes N bytes and refuses one more, in each format."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenfeed

LIMIT = 10_000


def write_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path)


def lines_of(begin: str, end: str = "", header: str = "") -> Callable[[Path, list[str]], None]:
    """Write each text as a line, of which `begin` and `end` are a part."""

    def write(path: Path, texts: list[str]) -> None:
        rows = [begin + text[len(begin + end) :] + end for text in texts]
        path.write_text("".join(f"{row}\n" for row in [*filter(None, [header]), *rows]))

    return write


FORMATS: dict[str, Callable[[Path, list[str]], None]] = {
    "a.jsonl": lines_of('{"text": "', '"}'),
    "a.csv": lines_of("1,", header="id,text"),
    "a.tsv": lines_of("1\t", header="id\ttext"),
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_of_the_largest_size_is_used_and_a_larger_one_is_not(
    name: str, tmp_path: Path, tokenizer: Path
) -> None:
    sizes = [20, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 2, 20]
    FORMATS[name](tmp_path / name, ["a" * size for size in sizes])
    made = tokenfeed.pretokenize(
        tmp_path / name, tmp_path / "out", tokenizer=tokenizer, max_record="10KB", validation=0
    )
    assert [reject["record"] for reject in made.rejects] == [3, 4]
    assert made.summary.documents == 4


def test_a_file_of_the_largest_size_is_used_and_a_larger_one_is_not(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "in").mkdir()
    for size in (LIMIT - 1, LIMIT, LIMIT + 1):
        (tmp_path / f"in/{size:06}.txt").write_text("a" * size)
    made = tokenfeed.pretokenize(
        tmp_path / "in", tmp_path / "out", tokenizer=tokenizer, max_record="10KB", validation=0
    )
    assert [Path(reject["file"]).name for reject in made.rejects] == [f"{LIMIT + 1:06}.txt"]
