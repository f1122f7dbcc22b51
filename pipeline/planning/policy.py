"""What a batching policy is: one class, which arranges the rows of a window.

`batching` deals out what a policy has arranged; `policies` has those that users choose among.
Torch-free.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.planning.length_bands import steps_by_length
from tokenfeed.pipeline.planning.order import Draw
from tokenfeed.pipeline.planning.pieces import Pieces, cut_rows, random_order, regroup

__all__ = ["Arranged", "Batching", "ByLength", "LongRows"]

LongRows = Literal["cut", "truncate", "refuse"]
"""What happens to a row that is longer than a micro-batch may be. cut: it becomes pieces, each of
which continues where the one before ends. truncate: the first piece is kept, the others are
dropped. refuse: the data set is refused at the start."""


class Arranged(NamedTuple):
    """The sequences of a window in the order of delivery, and which of them form a step."""

    cut: Pieces
    """What the rows were cut into."""
    order: np.ndarray
    """All sequences, shape (S,), int64. Unless they are packed, a sequence is a piece of `cut`."""
    step_offsets: np.ndarray
    """Where each step begins in `order`, shape (steps + 1,), int64."""
    packed: tuple[np.ndarray, np.ndarray] | None = None
    """The pieces of all sequences, shape (P,), and where each sequence begins in them, (S + 1,)."""

    def check(self, lengths: np.ndarray, batching: "Batching") -> None:
        """Refuse what leaves out or repeats a part of the rows: whoever wrote the policy is told.

        Raises:
            ConfigError: Names the policy and what is wrong.
        """
        count, sequences = len(self.cut.lengths), len(self.order)
        kept = self.cut.beginnings if batching.long_rows == "truncate" else np.arange(count)
        wholes = {
            "`cut` does not hold every token once": self.cut.offsets[-1] == lengths.sum(),
            "`step_offsets` do not cut `order` into steps": _cuts(self.step_offsets, sequences),
        }
        if self.packed:
            pieces, offsets = self.packed
            wholes["`packed` does not hold every piece once"] = _once(pieces, kept)
            wholes["`packed` has an empty sequence"] = _cuts(offsets, len(pieces))
            kept = np.arange(len(offsets) - 1)
        wholes["`order` does not hold every sequence once"] = _once(self.order, kept)
        for name, is_whole in wholes.items():
            if not is_whole:
                raise ConfigError(
                    f"{batching}: what it arranges is not every row once: {name}. Mend `arrange`."
                )


class Batching(ABC):
    """What a policy is; its class is a frozen dataclass, for a saved state has its repr."""

    __slots__ = ()
    packs: ClassVar[bool] = False
    """Whether a sequence holds several documents, kept apart by their positions."""

    @property
    @abstractmethod
    def multiple_of(self) -> int:
        """Padded lengths are rounded up to this."""

    @property
    @abstractmethod
    def long_rows(self) -> LongRows:
        """What happens to rows longer than `longest_piece`."""

    @property
    @abstractmethod
    def longest_piece(self) -> int:
        """Rows are cut into pieces of at most this many tokens."""

    @abstractmethod
    def tokens_per_batch(self, mean_tokens: float) -> int:
        """About how many tokens a micro-batch has, of rows of `mean_tokens`: sizes a window."""

    @abstractmethod
    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Cut the rows of a window, join them to sequences, and these to steps.

        A pure function: what it depends on is in the arguments.

        Args:
            lengths: Tokens of each row, shape (R,), every value at least 1.
            step_size: Micro-batches of a step.
            draw: The window's randomness; None for none.
            labels: The label of each row, shape (R,), where each has one; such rows are not cut.
        """


class ByLength(Batching):
    """What Padded and Fixed share: a sequence is a row, and its neighbours are about as long."""

    __slots__ = ()

    @property
    @abstractmethod
    def spread(self) -> float:
        """How far rows may be from their place in order of length."""

    @abstractmethod
    def rows_of(self, longest: int) -> int:
        """Rows of a micro-batch whose longest row is `longest`."""

    @abstractmethod
    def batches_of(self, lengths: np.ndarray) -> float:
        """About how many micro-batches rows of some lengths become."""

    def arrange(
        self, lengths: np.ndarray, step_size: int, draw: Draw | None, labels: np.ndarray | None
    ) -> Arranged:
        """Sort by length, in bands; steps come in random order."""
        cut = cut_rows(lengths, self.longest_piece)
        kept = cut.beginnings if self.long_rows == "truncate" else slice(None)
        pieces, step_offsets = steps_by_length(
            cut.lengths[kept], self, step_size=step_size, draw=draw, labels=labels
        )
        if isinstance(kept, np.ndarray):
            pieces = kept[pieces]
        if draw:
            order = random_order(len(step_offsets) - 1, draw.key ^ 2)
            pieces, step_offsets = regroup(pieces, step_offsets, order)
        return Arranged(cut, pieces, step_offsets)


def _once(numbers: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether `numbers` are those of `wanted`, which ascend, each once, in some order."""
    numbers = np.asarray(numbers).astype(np.int64, casting="safe", copy=False)
    count = int(wanted[-1]) + 1
    if len(numbers) != len(wanted) or numbers.view(np.uint64).max() >= count:  # as is what is < 0
        return False
    seen = np.zeros(count, np.bool_)
    seen[numbers] = True
    return bool(seen[wanted].all())


def _cuts(offsets: np.ndarray, count: int) -> bool:
    """Whether `offsets` cut range(count) into parts of which none is empty."""
    whole = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == count
    return bool(whole and (np.diff(offsets) > 0).all())
