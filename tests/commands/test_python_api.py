"""`tokenfeed.pretokenize` makes what the command makes, of paths and of Python objects."""

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from support import warm
from support.commands import run
from support.corpora import texts
from support.data_sets import files_of

import tokenfeed
from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.corpus.spool import NAMED_RECORDS, json_lines
from tokenfeed.tools.pretokenizing.options import Options

NOT_IN_PYTHON = {"paths", "json", "part", "finish"}
"""Options of the command alone: its output, and job arrays."""
TEXT = {"text": FieldKind.TEXT}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [{"text": text, "label": at % 3, "at": at} for at, text in enumerate(texts(400))]


def shards_of(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(out).items() if name.endswith(".arrow")}


def test_the_function_has_the_options_of_the_command_with_their_defaults() -> None:
    parameters = inspect.signature(tokenfeed.pretokenize).parameters
    options = {field.name: field.default for field in dataclasses.fields(Options)}
    assert set(parameters) == {"source", "out"} | set(options) - NOT_IN_PYTHON
    for name in set(parameters) - {"source", "out"}:
        assert (parameters[name].default or None) == (options[name] or None), name


def polars_frame(rows: list[dict[str, Any]]) -> Any:
    import polars  # a fifth of a second

    return polars.DataFrame(rows)


SOURCES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "a list of dicts": lambda rows: rows,
    "a function that returns dicts": lambda rows: lambda: iter(rows),
    "a function that returns texts": lambda rows: lambda: (row["text"] for row in rows),
    "a function that returns tables": lambda rows: (
        lambda: (pa.Table.from_pylist(rows[at : at + 7]) for at in range(0, len(rows), 7))
    ),
    "a pyarrow table": pa.Table.from_pylist,
    "a table of binary texts": lambda rows: pa.table(
        {"text": pa.array([row["text"].encode() for row in rows])}
    ),
    "a pandas frame": pd.DataFrame,
    "a polars frame": polars_frame,
    "a column of pandas": lambda rows: pd.DataFrame(rows)["text"],
    "a column of polars": lambda rows: polars_frame(rows)["text"],
    "an array of pyarrow": lambda rows: pa.array([row["text"] for row in rows]),
    "a Dataset": datasets.Dataset.from_list,
    "a column of a Dataset": lambda rows: datasets.Dataset.from_list(rows)["text"],
    "a shuffled and restored Dataset": lambda rows: datasets.Dataset.from_list(rows[::-1]).select(
        range(len(rows) - 1, -1, -1)
    ),
    "an IterableDataset": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_objects_become_the_json_lines_of_the_same_rows(
    kind: str, rows: list[dict[str, Any]]
) -> None:
    lines = b"".join(json_lines("rows", SOURCES[kind](rows), TEXT)).splitlines()
    assert [json.loads(line) for line in lines] == [{"text": row["text"]} for row in rows]


def test_objects_give_the_shards_of_the_same_rows_in_a_file(
    rows: list[dict[str, Any]], tmp_path: Path, tokenizer: Path
) -> None:
    lines = json_lines("rows", rows, TEXT, named=NAMED_RECORDS)
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines))
    run(tmp_path / "rows.jsonl", tmp_path / "out", "--tokenizer", tokenizer, "--shard-size", "20KB")
    made = tokenfeed.pretokenize(
        pd.DataFrame(rows), tmp_path / "python", tokenizer=tokenizer, shard_size="20KB"
    )
    assert len(shards_of(tmp_path / "python")) > 3
    assert shards_of(tmp_path / "python") == shards_of(tmp_path / "out")
    assert made.summary.documents == made.manifest.ledger.written == len(rows)
    assert str(made).startswith("split")


def test_paths_give_the_data_set_of_the_command(
    corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    run(corpus, tmp_path / "command", "--tokenizer", tokenizer, "--split", "test=*0.txt")
    made = tokenfeed.pretokenize(
        [corpus], tmp_path / "python", tokenizer=tokenizer, split={"test": "*0.txt"}
    )
    assert files_of(tmp_path / "command") == files_of(tmp_path / "python")
    assert [reject["record"] for reject in made.rejects] == [201, 202]


def test_labels_and_fields_of_other_names(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    made = tokenfeed.pretokenize(
        pd.DataFrame(rows).rename(columns={"text": "review"}),
        tmp_path / "out",
        task="classify",
        field={"text": "review"},
        validation=0.1,
    )
    assert made.manifest.label_names == ("0", "1", "2")
    assert made.manifest.splits["validation"].rows > 10


def test_a_dict_of_records_names_their_splits(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(rows)
    by_split = datasets.DatasetDict({"train": data, "test": data.select(range(30))})
    made = tokenfeed.pretokenize(by_split, tmp_path / "out")
    assert {name: split.rows for name, split in made.manifest.splits.items()} == {
        "train": 400,
        "test": 30,
    }
    lines = (tmp_path / "out/sources.jsonl").read_text().splitlines()
    names = [json.loads(line)["path"] for line in lines]
    assert sorted(names) == ["records/test", "records/train"]


def test_a_record_that_cannot_be_used_is_rejected_and_the_rest_goes_on(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"text": "good"},
        {"text": None},
        {"text": "a lone \ud800 surrogate"},
        {"body": "no text"},
        {"text": b"\xff\xfe no UTF-8"},
        {"text": b"bytes of UTF-8"},
        {"text": 3},
    ]
    made = tokenfeed.pretokenize(records, tmp_path / "out", validation=0)
    assert made.summary.documents == 2
    reasons = {reject["record"]: reject["reason"] for reject in made.rejects}
    assert sorted(reasons) == [1, 2, 3, 4, 6]
    assert "surrogate" in reasons[2]
    assert "no field `text`" in reasons[3]
    assert "invalid UTF-8" in reasons[4]
    assert {reject["file"] for reject in made.rejects} == {"records"}


def test_a_conversation_that_is_nested_too_deeply_is_one_reject(
    tmp_path: Path, tokenizer: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # Python's default, which some libraries raise
    (tmp_path / "chat.jinja").write_text(
        "{% for message in messages %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% endfor %}"
    )
    deep: Any = functools.reduce(lambda inner, _: {"a": inner}, range(700), 1)
    calls = ([{"function": {"name": "f", "arguments": each}}] for each in ({}, deep, {}))
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": call}]}
        for call in calls
    ]
    made = tokenfeed.pretokenize(
        records,
        tmp_path / "out",
        task="chat",
        tokenizer=tokenizer,
        chat_template=tmp_path / "chat.jinja",
        validation=0,
    )
    assert made.summary.documents == 2
    assert [(each["record"], each["reason"]) for each in made.rejects] == [
        (1, "is nested too deeply")
    ]


class OldFrame:
    """A table without Arrow, like a frame of Dask. Its iterator returns names of columns."""

    columns = ("text",)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


USED_UP = (row for row in list[Any]())
assert not [*USED_UP]

WRONG: dict[str, tuple[object, type[Exception], str]] = {
    "a used generator": (lambda: USED_UP, ConfigError, "a generator that was read before"),
    "a frame that iterates its columns": (OldFrame(), ConfigError, "records: got .*OldFrame"),
    "a table with a column twice": (
        pa.table([["a"], ["b"]], names=["text", "text"]),
        CorpusError,
        "several columns `text`",
    ),
    "a frame of mixed values": (pd.DataFrame({"text": ["a", 5]}), CorpusError, "as a table: "),
    "a Dataset with a transform": (
        datasets.Dataset.from_list([{"text": "a"}]).with_transform(lambda rows: rows),
        ConfigError,
        "has a transform",
    ),
    "a value that is too deep": (
        [{"text": "a"}, {"text": functools.reduce(lambda inner, _: [inner], range(9_999), 0)}],
        CorpusError,
        "record 1: cannot be written",
    ),
    "an object as a value": ([{"text": object()}], CorpusError, "record 0: cannot be written"),
}


def test_options_may_be_texts_as_on_a_command_line(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"text": f"text {number}"} for number in range(40)]
    given: dict[str, Any] = {"validation": "0.5", "workers": "1", "exclude": "x"}
    made = tokenfeed.pretokenize(rows, tmp_path / "out", tokenizer=tokenizer, **given)
    assert made.manifest.splits["validation"].rows > 5


@pytest.mark.parametrize("make", [list, polars_frame, datasets.Dataset.from_list])
def test_a_wrong_field_names_the_fields_of_objects(make: Any, tmp_path: Path) -> None:
    rows = make([{"body": "a", "label": 1}] * 9)
    tasks: list[Any] = ["lm", "classify"]
    for task in tasks:
        with pytest.raises(CorpusError, match="`text`; it has: body, label"):
            tokenfeed.pretokenize(rows, tmp_path / "out", task=task)


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_source_is_one_line_and_leaves_nothing(
    kind: str, tmp_path: Path, tokenizer: Path
) -> None:
    source, error, message = WRONG[kind]
    with pytest.raises(error, match=message) as raised:
        tokenfeed.pretokenize(source, tmp_path / "out", tokenizer=tokenizer)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_records_need_the_workers_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read objects of this process"):
        tokenfeed.pretokenize([{"text": "a"}], tmp_path / "out", runner="dask")


def test_a_finished_data_set_is_recognised_by_its_records(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    make = partial(tokenfeed.pretokenize, out=tmp_path / "out")
    assert not make(rows).summary.already_finished
    before = set(os.listdir("/proc/self/fd"))
    assert make(pd.DataFrame(rows)).summary.already_finished, "the same records in another form"
    assert set(os.listdir("/proc/self/fd")) <= before, "the copy of the records is deleted"
    with pytest.raises(ConfigError, match="of another command or input"):
        make(rows[1:])


SCRIPT = """
import sys, tokenfeed

def records():
    for at in range(2_000):
        yield {"text": f"document {at} " + " ".join(str(at * k) for k in range(1, 120))}

out, tokenizer, workers = sys.argv[1:]
tokenfeed.pretokenize(
    records, out, tokenizer=tokenizer, shard_size="100KB", workers=int(workers)
)
"""


def test_a_script_without_a_main_guard_uses_workers(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for workers in ("1", "2"):
        words = [tmp_path / "script.py", tmp_path / workers, tokenizer, workers]
        assert warm.run(words).returncode == 0
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_arrays_of_numpy_are_lists() -> None:
    def records() -> Iterator[dict[str, Any]]:
        yield {"tokens": np.array(["a", "b"]), "tags": np.array([1, 2]), "score": np.float32(0.5)}

    fields = {"tokens": FieldKind.WORDS, "tags": FieldKind.LABELS, "score": FieldKind.NUMBER}
    (line,) = b"".join(json_lines("records", records, fields)).splitlines()
    assert json.loads(line) == {"tokens": ["a", "b"], "tags": [1, 2], "score": 0.5}
