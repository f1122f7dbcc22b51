"""Memory for rows that serves unit after unit.

The system clears each page of new memory, and takes it back when it is freed: that costs more than
to copy the rows of a unit.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from tokenfeed.pipeline.format.rows import Rows

__all__ = ["RowBuffer"]

_GROWTH = 1.25
"""Of what is asked for: pages that nobody touches cost nothing."""


_LENGTHS = ("", "row")
"""Stands beside the names of columns."""


class RowBuffer:
    """Joins rows in memory of its own."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str], np.ndarray] = {}

    def join(self, parts: Iterable[Rows], *, num_rows: float, num_tokens: float) -> Rows:
        """The rows of all parts, one part after the other; they last until the next call.

        Args:
            parts: At least one; of each no memory is kept.
            num_rows: How many may be expected.
            num_tokens: How many may be expected.
        """
        used, expected = {"row": 0, "token": 0}, {"row": num_rows, "token": num_tokens}
        for part in parts:
            for key, values in _columns(part):
                self._put(key, values, used[key[1]], expected[key[1]])
            used["row"] += len(part)
            used["token"] += len(part.ids)
        joined = {key: self._arrays[key][: used[key[1]]] for key, _ in _columns(part)}
        return Rows(
            joined.pop(_LENGTHS),
            {name: values for (name, per), values in joined.items() if per == "token"},
            {name: values for (name, per), values in joined.items() if per == "row"},
        )

    def _put(self, key: tuple[str, str], values: np.ndarray, start: int, expected: float) -> None:
        stop = start + len(values)
        array = self._arrays.get(key)
        if array is None or len(array) < stop:
            grown = np.empty(int(_GROWTH * max(stop, expected)), values.dtype)
            if array is not None:
                grown[:start] = array[:start]
            self._arrays[key] = array = grown
        array[start:stop] = values


def _columns(rows: Rows) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """Every column, by its name and what it has a value for."""
    yield _LENGTHS, rows.lengths
    yield from (((name, "row"), values) for name, values in rows.per_row.items())
    yield from (((name, "token"), values) for name, values in rows.per_token.items())
