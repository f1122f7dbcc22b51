"""Joining and taking rows of unequal length is what lists do, whatever the dtype."""

from itertools import chain, pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.arithmetic import Ragged, binaries, join, take


def listed(ragged: Ragged) -> list[list[int]]:
    return [ragged.values[start:end].tolist() for start, end in pairwise(ragged.offsets)]


def ragged(rows: list[list[int]], dtype: str) -> Ragged:
    return Ragged(np.array([*chain(*rows)], dtype), np.array([*map(len, rows)], np.int64))


VALUES = st.lists(st.integers(0, 100), max_size=4)
DTYPE = st.sampled_from(["uint8", "int16", "uint16", "uint32"])


@given(data=st.data(), dtype=DTYPE, num_rows=st.integers(0, 5), kinds=st.permutations("rrccc"))
def test_join_is_addition_of_lists(
    data: st.DataObject, dtype: str, num_rows: int, kinds: list[str]
) -> None:
    kinds = kinds[: max(kinds.index("r") + 1, data.draw(st.integers(1, 5)))]
    rows = st.lists(VALUES, min_size=num_rows, max_size=num_rows)
    drawn: list[tuple[str, Any]] = [
        (kind, data.draw(rows if kind == "r" else VALUES)) for kind in kinds
    ]
    joined = join([ragged(one, dtype) if kind == "r" else np.array(one) for kind, one in drawn])
    assert listed(joined) == [
        [*chain(*(one[row] if kind == "r" else one for kind, one in drawn))]
        for row in range(num_rows)
    ]
    assert joined.values.dtype == dtype
    assert listed(join([np.array([-100]), ragged([[], [7]], "int16")])) == [[-100], [-100, 7]]


@given(data=st.data(), rows=st.lists(VALUES, max_size=6), dtype=DTYPE)
def test_take_is_indexing(data: st.DataObject, rows: list[list[int]], dtype: str) -> None:
    pieces = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    whole, places = ragged(rows, dtype), np.array(pieces, np.int64)
    taken = whole.take(places)
    assert listed(taken) == [rows[piece] for piece in pieces]
    assert taken.values.dtype == dtype
    shifted = np.concatenate([np.full(3, 9, dtype), whole.values])
    assert np.array_equal(take(shifted, whole.offsets + 3, places), taken.values)


@given(st.lists(st.binary(max_size=5)))
def test_byte_strings_as_an_arrow_array_are_themselves(values: list[bytes]) -> None:
    assert binaries(values).to_pylist() == values
