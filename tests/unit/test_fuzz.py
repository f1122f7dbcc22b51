"""A short run of the fuzzer: `python -m tests.fuzz` runs longer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.parsers import PARSERS
from fuzz.run import Fuzzer

SLOW = {"manifest", "state", "shard"}
"""Parsers that take milliseconds for each mutation."""


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_files_give_one_line_errors_or_same_tokens(name: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(name, tmp_path)
    for file in fuzzer.files:
        assert fuzzer.try_bytes(file, (tmp_path / file).read_bytes()) == ("accepted", "")
    results = [fuzzer.try_mutation(number) for number in range(10 if name in SLOW else 60)]
    assert [str(finding) for _, finding in results if finding] == []


CUT = b'{"model": {"type": "BPE", "vocab": {"a": 0, "\xc3\xa9": 1}, "merges": ["a \xc3\xa9"], %s}}'
"""A tokenizer.json with which `tokenizers` ends the process: the prefix cuts the second token."""
CASES = {
    "saved": [("saved/state.json", b"[" * 100_000)],
    "tokenizer": [
        ("tokenizer.json", b'{"id": 1234567890, "a":' + b"[" * 100_000),
        ("tokenizer.json", b'{"version": "' + b"x" * 70_000 + b'"}'),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b\\n"]]}}',
        ),
        ("tokenizer.json", CUT % b'"continuing_subword_prefix": "a"'),
        ("tokenizer.json", CUT % b'"continuing_subword_prefix": "abc"'),  # a panic
        ("tokenizer.json", CUT % b'"continuing\\u005fsubword_prefix": "a"'),
    ],
    "state": [("state.json", b'{"version": 3, "plan": {"seed": "\\ud800"}}')],
}
"""Files that once gave another exception or a line of 70,000 characters."""


@pytest.mark.parametrize("name", CASES)
def test_files_that_were_once_read_wrongly_are_rejected(name: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(name, tmp_path)
    for file, data in CASES[name]:
        assert fuzzer.try_bytes(file, data) == ("rejected", "")


def _first(content: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = content["splits"]["train"]["shards"][0]
    return shard


def _file_info(info: dict[str, Any]) -> dict[str, Any]:
    return {key: info[key] for key in ("file", "bytes", "xxh3")}


SEALED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("manifest", lambda content: _first(content).update(rows="\ud800")),
    ("manifest", lambda content: content["splits"]["train"]["length_histogram"].pop()),
    ("manifest", lambda content: _first(content).update(batches=0)),
    ("manifest", lambda content: _first(content).update(tokens=10**400)),
    ("manifest", lambda content: content["tokenizer"].update(pad_id=2**63)),
    ("checkpoint", lambda content: content["files"].update({"state-0.safetensors": -4})),
    ("state", lambda content: content["plan"].update(dict.fromkeys(content["plan"], True))),
]


@pytest.mark.parametrize(("name", "change"), SEALED)
def test_sealed_files_with_impossible_values_are_rejected(
    name: str, change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    fuzzer = Fuzzer(name, tmp_path)
    file, layer = next(iter(PARSERS[name].layers.items()))
    content = json.loads((tmp_path / file).read_bytes())
    change(content)
    assert fuzzer.try_bytes(file, layer.seal(content)) == ("rejected", "")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: _first(content).update(seal="\ud800"),
        lambda content: content["sources"].update(_file_info(content["tokenizer"])),
        lambda content: content["sources"].update(_file_info(_first(content))),
    ],
)
def test_problems_of_a_manifest_raise_no_other_error(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    """`find_problems` returns the problem, so the outcome is `accepted`."""
    fuzzer = Fuzzer("manifest", tmp_path)
    ((file, layer),) = PARSERS["manifest"].layers.items()
    content = json.loads((tmp_path / file).read_bytes())
    change(content)
    assert fuzzer.try_bytes(file, layer.seal(content)) == ("accepted", "")


WRAPPING = np.append(np.array([1, 5, -7, -3], "<i8") << 60, 1695)
"""Ends of rows that rise if differences overflow. The last is the end of the file."""


@pytest.mark.parametrize(
    ("name", "file", "data"),
    [
        ("datatrove", "rows/0.ds.index", WRAPPING.tobytes()),
        ("datatrove", "rows/0.ds.metadata", b"\xff\n"),
        ("datatrove", "rows/0.ds.metadata", b""),
        ("datatrove", "rows/0.ds.index", b"\xff" * 7 + b"\x7f"),
        ("datatrove", "rows/0.ds", b"\0\0"),
        ("olmo", "rows/part-0.csv.gz", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 9),
        ("olmo", "rows/part-0.csv.gz", b""),
        ("olmo", "rows/part-0.npy", b"\0\0"),
        ("megatron", "rows/train.bin", b"\0\0"),
        ("a.csv", "a.csv", b'"te\nxt",n\na,1\n'),
    ],
)
def test_corpora_that_were_once_read_wrongly_are_rejects(
    name: str, file: str, data: bytes, tmp_path: Path
) -> None:
    assert Fuzzer(name, tmp_path).try_bytes(file, data) == ("accepted", "")


@pytest.mark.parametrize(
    ("name", "valid", "damaged"),
    [
        ("a.parquet", b"\x16\x06&", b"\x16\x01&"),
        ("a.arrow", b"@\x01" + bytes(6), b"\xff" * 7 + b"\x7f"),
    ],
)
def test_tables_that_once_raised_other_errors_raise_none(
    name: str, valid: bytes, damaged: bytes, tmp_path: Path
) -> None:
    """A row group of -1 instead of 3 rows, and a record batch of 2**63 - 1 instead of 320 bytes."""
    fuzzer = Fuzzer(name, tmp_path)
    before, found, after = (tmp_path / name).read_bytes().partition(valid)
    assert found
    assert fuzzer.try_bytes(name, before + damaged + after) == ("accepted", "")
