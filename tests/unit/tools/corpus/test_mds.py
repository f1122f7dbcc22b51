"""Shards of mosaicml-streaming: the values that its writer stored, or an error."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import rows_in
from support.token_rows import mds_shard, save_words

from tokenfeed import pretokenize
from tokenfeed.tools.corpus.formats.containers import read_mds

CODES = {"uint16": 16, "uint32": 32, "int32": 33, "int64": 65}


def array(row: list[int], dtype: str, *, is_named: bool) -> bytes:
    """An array as the peer's `NDArray` encodes it: the type unless it is named, the number of
    dimensions and the width of lengths, the length, the values."""
    width = next(n for n in range(4) if len(row) < 1 << (8 << n))
    head = b"" if is_named else bytes([CODES[dtype]])
    return (
        head
        + bytes([1 << 2 | width])
        + len(row).to_bytes(1 << width, "little")
        + np.array(row, dtype).tobytes()
    )


def shard(rows: list[list[int]], dtype: str, *, is_named: bool) -> bytes:
    config = {
        "column_names": ["input_ids", "number", "pickled", "text"],
        "column_encodings": [f"ndarray:{dtype}" if is_named else "ndarray", "int", "pkl", "str"],
        "column_sizes": [None, 8, None, None],
    }
    samples = [
        [array(row, dtype, is_named=is_named), np.int64(n).tobytes(), b"!" * n, f"té {n}".encode()]
        for n, row in enumerate(rows)
    ]
    return mds_shard(samples, config)


def read(content: bytes) -> list[dict[str, Any]]:
    return [row for table in read_mds(io.BytesIO(content)) for row in table.to_pylist()]


@given(
    rows=st.lists(st.lists(st.integers(0, 60_000), max_size=300), min_size=1, max_size=9),
    dtype=st.sampled_from([*CODES]),
    is_named=st.booleans(),
    chunk=st.sampled_from([1, 500, 1 << 22]),
)
def test_mds_has_the_values_of_every_column_it_reads(
    rows: list[list[int]], dtype: str, is_named: bool, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenfeed.tools.corpus.formats.containers.CHUNK_BYTES", chunk)
        found = read(shard(rows, dtype, is_named=is_named))
    assert found == [
        {"input_ids": row, "number": n, "text": f"té {n}"} for n, row in enumerate(rows)
    ]


def test_mds_of_any_bytes_is_read_or_is_a_value_error() -> None:
    good, draw, refused = shard([[1, 2, 3]] * 9, "uint16", is_named=False), random.Random(0), 0
    for _ in range(400):
        at = draw.randrange(len(good))
        flipped = bytes([good[at] ^ 1 << draw.randrange(8)])
        bad = good[:at] if draw.random() < 0.2 else good[:at] + flipped + good[at + 1 :]
        try:
            read(bad)
        except (ValueError, KeyError, TypeError):  # each rejects the rest of the file
            refused += 1
    assert refused > 100


def test_mds_that_claims_gigabytes_is_refused_before_they_are_read() -> None:
    config = b'{"column_names": [], "column_encodings": [], "column_sizes": []}'
    for numbers in ([1 << 30, 0], [1, 1 << 31, 1 << 31], [1, 12 + len(config), 1 << 31]):
        with pytest.raises(ValueError, match=r"bytes, more than the 64,000,000 of `--max-record`"):
            read(np.array(numbers, np.uint32).tobytes() + config)


def test_mds_column_that_is_needed_and_not_read_names_its_encoding() -> None:
    content = shard([[1]], "int32", is_named=True)
    with pytest.raises(ValueError, match="column 'pickled' has the encoding 'pkl'"):
        next(read_mds(io.BytesIO(content), needed=("pickled",)))


def test_ids_of_mds_shards_become_rows(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [699], [4, 700], [5]]
    (tmp_path / "a.mds").write_bytes(shard(rows, "int32", is_named=True))
    words = save_words(tmp_path / "t.json", 700)
    made = pretokenize(tmp_path / "a.mds", tmp_path / "out", task="ids", tokenizer=words)
    assert [reject["record"] for reject in made.rejects] == [2]
    assert rows_in(tmp_path / "out") == [[1, 2, 3], [699], [5]]
