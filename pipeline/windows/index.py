"""The index of a rank slice: everything that stands beside its tokens, as three typed records.

Torch-free. Sizes: P pieces, S sequences, M micro-batches (one a round).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from tokenfeed.pipeline.windows.layout import Layout

__all__ = ["Index", "PieceIndex", "RoundIndex"]


@dataclass(frozen=True, slots=True)
class PieceIndex:
    """Which pieces of which rows there are, and what belongs to each."""

    numbers: np.ndarray
    """The row within all sources, shape (P,), int64."""
    lengths: np.ndarray
    """Tokens, shape (P,), int32."""
    batches: np.ndarray
    """Where each micro-batch begins among the sequences, shape (M + 1,), int64."""
    starts: np.ndarray | None = None
    """First token within the row, shape (P,), int64; None: no row was cut."""
    sequences: np.ndarray | None = None
    """Where each sequence begins among the pieces, shape (S + 1,), int64; None: each is one."""
    targets: np.ndarray | None = None
    """The target of the row, shape (P,), in storage dtype; None: a row has none of its own."""


@dataclass(frozen=True, slots=True)
class RoundIndex:
    """What each micro-batch is to all ranks; shape (M,)."""

    filler: np.ndarray
    """Whether it repeats another rank's sequence, bool."""
    position: np.ndarray
    """Micro-batches of the window that are delivered after its round, int64."""
    ends_step: np.ndarray
    """Whether its round is the last of a step, bool."""
    digests: np.ndarray
    """What its round adds to the digest, uint64."""
    tokens: np.ndarray
    """Tokens of each source in its round, shape (M, sources), int64."""


@dataclass(frozen=True, slots=True)
class Index:
    """Everything that stands beside the tokens of a slice."""

    pieces: PieceIndex
    layout: Layout
    rounds: RoundIndex

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every array that there is, by a name like `pieces.lengths`."""
        for part in fields(self):
            record = getattr(self, part.name)
            for field in fields(record):
                if (array := getattr(record, field.name)) is not None:
                    yield f"{part.name}.{field.name}", array

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Index":
        """What `arrays` has given."""

        def of_part(part: str, kind: type) -> dict[str, np.ndarray | None]:
            return {field.name: arrays.get(f"{part}.{field.name}") for field in fields(kind)}

        return cls(
            PieceIndex(**of_part("pieces", PieceIndex)),  # type: ignore[arg-type]
            Layout(**of_part("layout", Layout)),  # type: ignore[arg-type]
            RoundIndex(**of_part("rounds", RoundIndex)),  # type: ignore[arg-type]
        )
