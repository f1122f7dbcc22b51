"""Rows that are joined one part after the other are what all parts joined at once are."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import random_rows

from tokenfeed.pipeline.format.schema import Rows
from tokenfeed.pipeline.windows.reader import Joiner

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(st.lists(lengths, min_size=1, max_size=12), st.integers(1, 12))
def test_parts_of_any_size_join_whatever_was_foreseen(
    parts: list[list[int]], foreseen: int
) -> None:
    rows = [random_rows(np.array(part), "tag") for part in parts]
    found, expected = Joiner().join(rows, foreseen), Rows.concatenate(rows)
    assert same(found, expected)


@given(st.lists(st.tuples(lengths, st.booleans()), min_size=2, max_size=12))
def test_what_somebody_still_has_is_not_written_over(
    windows: list[tuple[list[int], bool]],
) -> None:
    joiner, held = Joiner(), []
    for sizes, is_held in windows:
        rows = random_rows(np.array(sizes), "tag")
        found = joiner.join([rows, rows], 2)
        if is_held:
            held.append((found.slice(1, len(found)), Rows.concatenate([rows, rows])))
        del found
    assert all(same(part, whole.slice(1, len(whole))) for part, whole in held)


def test_a_window_that_is_used_leaves_its_memory_to_the_next() -> None:
    joiner, rows = Joiner(), random_rows(np.array([3, 4, 5]))
    places = {joiner.join([rows, rows], 2).ids.ctypes.data for _ in range(5)}
    assert len(places) == 1
    first = joiner.join([rows, rows], 2)
    assert joiner.join([rows, rows], 2).ids.ctypes.data != first.ids.ctypes.data


def test_an_error_between_parts_leaves_nothing_behind() -> None:
    joiner, rows = Joiner(), random_rows(np.array([3, 4, 5]))

    def failing() -> Iterator[Rows]:
        yield rows
        raise OSError

    with pytest.raises(OSError):
        joiner.join(failing(), 2)
    assert same(joiner.join([rows], 1), rows)


def same(one: Rows, other: Rows) -> bool:
    columns = [(one.per_token, other.per_token), (one.per_row, other.per_row)]
    return np.array_equal(one.lengths, other.lengths) and all(
        ours.keys() == theirs.keys()
        and all(
            ours[name].dtype == values.dtype and np.array_equal(ours[name], values)
            for name, values in theirs.items()
        )
        for ours, theirs in columns
    )
