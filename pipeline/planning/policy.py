"""The base classes of batching policies. A policy arranges the rows of a window in sequences.

A row that is too long is cut into pieces. `policies` has the policies of tokenfeed; `batching`
makes micro-batches of what they arrange. Torch-free.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import ceil_div, offsets_of, ranges
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.length_bands import steps_by_length
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.pipeline.planning.permutation import evenly, mix64


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a window, in the order of its rows."""

    offsets: np.ndarray
    """Where each piece begins in the tokens of the window, and the end, shape (P + 1,), int64."""
    lengths: np.ndarray
    """Tokens of each piece, shape (P,), int64."""
    cut_from: np.ndarray | None
    """Row of each piece, shape (P,), int64; None: no row was cut, and P = R."""

    @property
    def beginnings(self) -> np.ndarray:
        """First piece of each row, shape (R,), int64."""
        if self.cut_from is None:
            return np.arange(len(self.lengths))
        return np.flatnonzero(np.diff(self.cut_from, prepend=-1))

    def in_order_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the pieces row by row, where `rows` are all rows in some order, shape (P,)."""
        if self.cut_from is None:
            return rows
        return ranges(self.beginnings[rows], np.bincount(self.cut_from)[rows])

    @property
    def rows(self) -> np.ndarray:
        """Row of each piece, shape (P,), int64."""
        return np.arange(len(self.lengths)) if self.cut_from is None else self.cut_from


def cut_rows(lengths: np.ndarray, longest: int) -> Pieces:
    """Cut rows into pieces of at most `longest` tokens."""
    if lengths.max() <= longest:
        return Pieces(offsets_of(lengths), lengths, None)
    counts = ceil_div(lengths, longest)
    rows = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.cumsum(lengths) - lengths)[rows] + nth * longest
    offsets = np.append(starts, lengths.sum())
    return Pieces(offsets, np.diff(offsets), rows)


def regroup(
    items: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Take groups of consecutive items in another order, keeping the order inside each.

    Returns:
        The items, and the offsets of the groups into them, shape (len(order) + 1,).
    """
    starts, sizes = offsets[:-1][order], np.diff(offsets)[order]
    new_offsets = offsets_of(sizes)
    if len(items) > 64 * len(offsets):  # few large groups: a copy per group is cheaper
        pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        taken = [items[start:stop] for start, stop in pairs]
        return np.concatenate(taken) if taken else items[:0], new_offsets
    return items[ranges(starts, sizes)], new_offsets


def random_order(count: int, key: int) -> np.ndarray:
    """Return a permutation of range(count), int64, that depends on a 64-bit key."""
    keys = mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(keys)  # all keys differ, so every sort gives the same order


LongRows = Literal["cut", "truncate", "refuse", "crop"]
"""What happens to a row that is too long for a micro-batch. "cut": it becomes several pieces.
"truncate": only the first piece is used. "refuse": the loader raises a ConfigError. "crop": see
`Packed`."""


class Arranged(NamedTuple):
    """The sequences of a window in delivery order, and which of them form a step."""

    cut: Pieces
    """The pieces of the rows."""
    order: np.ndarray
    """Numbers of all sequences, shape (S,), int64. Without packing, a sequence is a piece of
    `cut`."""
    step_offsets: np.ndarray
    """Where each step begins in `order`, shape (steps + 1,), int64."""
    packed: tuple[np.ndarray, np.ndarray] | None = None
    """With packing: the pieces of all sequences, shape (P,), and where each sequence begins in
    them, shape (S + 1,)."""


class Batching(ABC):
    """Base class of batching policies. A policy is a frozen dataclass, and a saved state stores its
    repr."""

    __slots__ = ()
    packs: ClassVar[bool] = False
    """Whether a sequence may have several documents."""

    @property
    @abstractmethod
    def multiple_of(self) -> int:
        """Padded lengths are rounded up to a multiple of this."""

    @property
    def begin_token(self) -> int | None:
        """Id that is put before every piece; None for no such token."""
        return None

    @property
    @abstractmethod
    def long_rows(self) -> LongRows:
        """What happens to rows longer than `longest_piece`."""

    @property
    @abstractmethod
    def longest_piece(self) -> int:
        """Largest number of tokens of a piece."""

    def rows_to_fill(self, padded_length: int) -> int:
        """Return the number of rows of a full micro-batch of this padded length.

        Rows of padding fill smaller micro-batches. 0: do not fill.
        """
        return 0

    @abstractmethod
    def tokens_per_batch(self, mean_tokens: float) -> int:
        """Return the approximate tokens of a micro-batch, if rows have `mean_tokens` on average.

        It determines the default size of a window.
        """

    @abstractmethod
    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Cut the rows of a window into pieces, and arrange these in sequences and steps.

        A pure function: the result must depend on the arguments only.

        Args:
            lengths: Tokens of each row, shape (R,), every value at least 1.
            step_size: Micro-batches of a step.
            draw: The random keys of the window; None without shuffling.
            labels: Label of each row, shape (R,); None if rows have none. Labelled rows are not
                cut.
        """

    def in_order(self, lengths: np.ndarray, rows: np.ndarray) -> Arranged:
        """Arrange rows strictly one after the other, for `order`="file".

        Args:
            lengths: Tokens of each row of the window, shape (R,).
            rows: All rows in the order of delivery, a permutation of range(R).

        Returns:
            Sequences in the order of rows. Each step has one micro-batch.

        Raises:
            ConfigError: The policy chooses rows by their lengths.
        """
        raise ConfigError(
            f"`order`='file': {self} does not keep the order of rows. Use another policy."
        )


class ByLength(Batching):
    """Base class of Padded and Fixed: a sequence is a row, and a micro-batch has similar
    lengths."""

    __slots__ = ()

    spread: float
    """Width of a length band, from 0 to 1."""
    fill: bool
    """Whether micro-batches are filled up to `rows_of` their padded length."""

    @abstractmethod
    def rows_of(self, longest: int) -> int:
        """Return the number of rows of a micro-batch whose longest row has `longest` tokens."""

    def rows_to_fill(self, padded_length: int) -> int:
        """Return `rows_of` if `fill` is set, else 0."""
        return self.rows_of(padded_length) if self.fill else 0

    @abstractmethod
    def batches_of(self, lengths: np.ndarray) -> float:
        """Return the approximate number of micro-batches of rows with these lengths."""

    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Sort by length, deal length bands to steps, and put the steps in random order."""
        cut = cut_rows(lengths, self.longest_piece)
        kept = cut.beginnings if self.long_rows == "truncate" else slice(None)
        pieces, step_offsets = steps_by_length(
            cut.lengths[kept], self, step_size=step_size, draw=draw, labels=labels
        )
        if isinstance(kept, np.ndarray):
            pieces = kept[pieces]
        if draw:
            count, key = len(step_offsets) - 1, draw.key ^ 2
            even = evenly(np.arange(count), count, key) if draw.is_even else None
            order = random_order(count, key) if even is None else even
            pieces, step_offsets = regroup(pieces, step_offsets, order)
        return Arranged(cut, pieces, step_offsets)

    def in_order(self, lengths: np.ndarray, rows: np.ndarray) -> Arranged:
        """Fill each micro-batch with the next rows, as many as fit."""
        cut = cut_rows(lengths, self.longest_piece)
        pieces = cut.beginnings[rows] if self.long_rows == "truncate" else cut.in_order_of(rows)
        sizes, edges = cut.lengths[pieces], [0]
        while edges[-1] < len(sizes):
            edges.append(edges[-1] + self._fitting(sizes[edges[-1] :]))
        return Arranged(cut, pieces, np.array(edges))

    def _fitting(self, sizes: np.ndarray) -> int:
        """Return how many of the first pieces fit into a micro-batch, at least 1."""
        longest = np.maximum.accumulate(sizes[: self.rows_of(int(sizes[0]))])
        counts = range(1, len(longest) + 1)
        return bisect_left(counts, True, key=lambda n: n > self.rows_of(int(longest[n - 1])))
