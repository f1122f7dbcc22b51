"""Which records are used, and what of them: sizes, labels, ids, joined fields, and limits."""

import contextlib
import json
import os
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import call
from tokenizers import Tokenizer

import tokenfeed
from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.tools import shards

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


def test_lines_behind_a_line_of_many_blocks_are_used(tmp_path: Path, tokenizer: Path) -> None:
    short = [f'{{"text": "line {number}"}}' for number in range(40)]
    long = json.dumps({"text": "a" * 700_000})
    (tmp_path / "a.jsonl").write_text("\n".join([*short[:20], long, *short[20:]]))
    made = tokenfeed.pretokenize(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer, max_record="10KB", validation=0
    )
    assert [reject["record"] for reject in made.rejects] == [20]
    assert [row["text"] for row in rows_of(tmp_path / "out")] == [f"line {n}" for n in range(40)]


def made_of(rows: list[dict[str, Any]], out: Path, tokenizer: Path, **words: Any) -> Any:
    words = {"tokenizer": tokenizer, "validation": 0} | words
    return tokenfeed.pretokenize(rows, out, **words)


def rejects_of(made: Any) -> list[tuple[int, str]]:
    return [(reject["record"], reject["reason"].split(", expected")[0]) for reject in made.rejects]


def test_labels_are_names_or_whole_numbers_from_0(tmp_path: Path, tokenizer: Path) -> None:
    labels: list[Any] = [True, False, "true", -1, 1.5, None, "", "no"]
    rows = [{"text": "a word", "label": label} for label in labels]
    made = made_of(rows, tmp_path / "names", tokenizer, task="classify")
    assert [number for number, _ in rejects_of(made)] == [3, 4, 5, 6]
    assert set(made.manifest.label_names) == {"true", "false", "no"}
    numbers = [{"text": "a word", "label": label} for label in (0, 2, -1, 1)]
    made = made_of(numbers, tmp_path / "numbers", tokenizer, task="classify")
    assert rejects_of(made) == [(2, "field `label` is -1")]
    assert len(made.manifest.label_names) == 3


def test_labels_that_look_alike_stay_classes_and_are_named(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = ["positive"] * 9 + ["Positive"] * 2 + ["positive ", "good\u0301", "go\u014fd"]
    labels += ["caf\u00e9", "cafe\u0301", "other"]
    rows = [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)]
    made = tokenfeed.pretokenize(
        rows, tmp_path / "out", task="classify", tokenizer=tokenizer, validation=0
    )
    assert list(made.manifest.label_names) == sorted({*labels})
    (line,) = (each for each in caplog.messages if "differ only in" in each)
    assert "'positive' (9), 'Positive' (2), 'positive ' (1), and 1 more such group" in line


def test_decimals_of_tables_are_numbers_in_a_joined_field(tmp_path: Path, tokenizer: Path) -> None:
    table = pa.table({"price": pa.array([Decimal("1.50")]), "score": pa.array([Decimal("2.5")])})
    field = {"text": "price {price}"}
    made = tokenfeed.pretokenize(
        table, tmp_path / "out", task="score", field=field, tokenizer=tokenizer, validation=0
    )
    assert not made.rejects
    assert rows_of(tmp_path / "out")[0]["text"] == "price 1.50"


def test_values_in_a_joined_field_are_written_as_in_json(tmp_path: Path, tokenizer: Path) -> None:
    values: list[Any] = ["x", True, 1, 1.5, 1e30, None, "é"]
    made = made_of(
        [{"a": value, "b": {"c": [value]}} for value in values],
        tmp_path / "out",
        tokenizer,
        field={"text": "{a}|{b.c[0]}"},
    )
    written = ["x", "true", "1", "1.5", "1e+30", "", "é"]
    expected = [f"{each}|{each}" for each in written]
    assert [row["text"] for row in rows_of(tmp_path / "out")] == expected
    assert made.rejects == []


@pytest.mark.parametrize("kind", ["table", "objects", "parquet"])
def test_nulls_of_objects_in_a_joined_field_are_empty_as_in_json(
    kind: str, tmp_path: Path, tokenizer: Path
) -> None:
    rows = [{"t": {"en": "x", "de": None}}, {"t": {"en": None, "de": "y"}}, {"t": None}]
    sources: dict[str, Any] = {"table": pa.Table.from_pylist(rows), "objects": rows}
    pq.write_table(sources["table"], tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options: dict[str, Any] = {
        "field": {"text": "{t.en}|{t.de}"},
        "tokenizer": tokenizer,
        "validation": 0,
    }
    source = sources.get(kind, tmp_path / "a.parquet")
    made = tokenfeed.pretokenize(source, tmp_path / "out", **options)
    asked = tokenfeed.pretokenize(tmp_path / "a.jsonl", tmp_path / "asked", **options)
    assert made.summary.documents == asked.summary.documents == 2
    assert made.manifest.splits == asked.manifest.splits
    assert [each["reason"] for each in made.rejects] == [each["reason"] for each in asked.rejects]


@pytest.mark.parametrize("lines", ['{\n"text": "a"\n}\n', '{"text": "a"} {"text": "b"}\n'])
def test_lines_that_are_not_one_object_each_are_named_with_a_way_on(
    lines: str, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(CorpusError, match="needs one object: `jq -c"):
        tokenfeed.pretokenize(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)


def test_a_column_keeps_its_kind_beside_a_text_made_of_it(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"prompt": "why", "answer": "so"}, {"prompt": 1, "answer": "so"}]
    made = made_of(
        rows,
        tmp_path / "out",
        tokenizer,
        task="complete",
        field={"prompt": "prompt", "completion": "{prompt}: {answer}"},
    )
    assert [number for number, _ in rejects_of(made)] == [1]
    assert [row["text"] for row in rows_of(tmp_path / "out")] == ["whywhy: so"]


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_as_many_rejects_as_allowed_are_no_error(
    allowed: int, tmp_path: Path, tokenizer: Path
) -> None:
    rows = [{"text": "a word"}, {"text": 1}, {"text": None}, {"text": "more"}]
    with contextlib.ExitStack() as stack:
        if allowed < 2:
            stack.enter_context(pytest.raises(CorpusError, match="text"))
        made = made_of(rows, tmp_path / "out", tokenizer, max_rejects=allowed)
        assert len(made.rejects) == 2


def test_an_id_has_to_be_below_the_size_of_the_vocabulary(tmp_path: Path, tokenizer: Path) -> None:
    size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    rows = [{"input_ids": [0, last]} for last in (size - 1, size, -1)]
    made = made_of(rows, tmp_path / "out", tokenizer, task="ids")
    assert [number for number, _ in rejects_of(made)] == [1, 2]
    (shard,) = (tmp_path / "out/train").glob("*.arrow")
    table = pa.ipc.open_file(shard).read_all()
    assert table["input_ids"].to_pylist() == [[0, size - 1]]


def test_of_equal_texts_a_limit_takes_the_first(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, records in (("a", 3), ("b", 5)):
        lines = [*(f'{{"text": "{name} {n}"}}' for n in range(records)), '{"text": "same"}']
        (tmp_path / f"in/{name}.jsonl").write_text("\n".join(lines[::-1] if name == "b" else lines))
    kept = []
    for most in range(1, 11):
        tokenfeed.pretokenize(
            tmp_path / "in", out := tmp_path / str(most), tokenizer=tokenizer, limit=most
        )
        rows = rows_of(out)
        kept.append({(row["file"], row["record"]) for row in rows})
        assert len(kept[-1]) == most
    assert all(before < after for before, after in pairwise(kept))
    first = next(rows for rows in kept if any(is_same(row) for row in rows))
    assert [Path(file).name for file, record in first if is_same((file, record))] == ["a.jsonl"]


def test_a_file_of_a_fixed_time_is_known_by_its_content(tmp_path: Path, tokenizer: Path) -> None:
    """Archives and images give files one time, whatever is in them."""
    source, out = tmp_path / "docs.jsonl", tmp_path / "out"

    def write(word: str) -> None:
        source.write_text(json.dumps({"text": word}))
        os.utime(source, (1, 1))

    write("plum")
    for _ in range(2):
        tokenfeed.pretokenize(source, out, tokenizer=tokenizer, validation=0)
    write("pear")
    with pytest.raises(ConfigError, match="already holds"):
        tokenfeed.pretokenize(source, out, tokenizer=tokenizer, validation=0)
    assert [row["text"] for row in rows_of(out)] == ["plum"]


def is_same(row: tuple[str, int]) -> bool:
    return (Path(row[0]).name, row[1]) in {("a.jsonl", 3), ("b.jsonl", 0)}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    said = call(shards.main, "cat", folder, "--rows", 100, "--json").stdout
    return [json.loads(line) for line in said.splitlines()]
