"""Joining: rows of many record batches as one, each copied when it comes.

Nobody keeps record batches until the last of them is there, and every window has the memory of the
one before: it takes its memory once instead of three times, and no page of it comes anew from the
system. Torch-free.
"""

import sys
from collections.abc import Iterable, Mapping

import numpy as np

from tokenfeed.pipeline.format.rows import Rows

__all__ = ["Joiner"]

_ROOM, _GROWTH = 1.25, 1.5
"""Times what is foreseen, for parts differ, and times what that was too little for. What nobody
writes to takes no memory."""


class Joiner:
    """Joins rows again and again; for one thread. A copy has memory of its own."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def __reduce__(self) -> "tuple[type[Joiner], tuple[()]]":
        return Joiner, ()

    def join(self, parts: Iterable[Rows], count: int) -> Rows:
        """One part after the other; all have the same columns, and there is one at least.

        Args:
            parts: Each is copied when it comes.
            count: About how many, of about the same size; more and larger ones cost a copy.
        """
        for column in self._columns.values():
            column.begin()
        for part in parts:
            self._append({"": part.lengths}, count)
            self._append(part.per_token, count)
            self._append(part.per_row, count)
        columns = self._columns
        return Rows(
            columns[""].whole(),
            {name: columns[name].whole() for name in part.per_token},
            {name: columns[name].whole() for name in part.per_row},
        )

    def _append(self, columns: Mapping[str, np.ndarray], count: int) -> None:
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = _Column(values.dtype)
            self._columns[name].append(values, count)


class _Column:
    """An array that grows, in memory that is used again once nobody has anything of it."""

    def __init__(self, dtype: np.dtype) -> None:
        self._size = 0
        self._allocate(0, dtype)

    def begin(self) -> None:
        """Append from the beginning; what was given out stays as it is."""
        self._size = 0
        if self._references() > self._own_references:
            self._allocate(0, self._memory.dtype)

    def append(self, values: np.ndarray, count: int) -> None:
        end = self._size + len(values)
        if end > len(self._memory):
            before = self.whole()
            room = _GROWTH * end if self._size else _ROOM * count * len(values)
            self._allocate(int(room), values.dtype)
            self._memory[: self._size] = before
        self._memory[self._size : end] = values
        self._size = end

    def whole(self) -> np.ndarray:
        return self._memory[: self._size]

    def _allocate(self, room: int, dtype: np.dtype) -> None:
        self._memory = np.empty(room, dtype)
        self._own_references = self._references()

    def _references(self) -> int:
        """How many have the memory: every array that is a part of it counts, and its parts."""
        return sys.getrefcount(self._memory)
