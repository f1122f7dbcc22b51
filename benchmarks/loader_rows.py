"""What all loaders of benchmarks/loader.py share: the rows, the batch of some rows, a stream.

This file, like loader_peers.py, needs numpy and torch alone: it runs where tokenfeed is not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["SEQUENCE", "Batch", "Rows", "Stream"]

SEQUENCE = 2048
BATCH_ROWS = {"short": 256, "check": 256, "medium": 32, "documents": 8}

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stream:
    """An opened loader."""

    batches: Iterable[Any]
    """An epoch each time it is iterated, or batches without end."""
    state: Callable[[], Any] | None = None
    load: Callable[[Any], None] | None = None


class Rows(Sequence[np.ndarray]):
    """Rows of uint16 ids in a memory map; documents are cut into rows of `SEQUENCE`."""

    def __init__(self, folder: Path, kind: str, part: int = 1) -> None:
        self._arguments = (folder, kind, part)
        self.ids = np.asarray(np.load(folder / kind / "ids.npy", mmap_mode="r"))
        self.same_length = kind == "documents"
        self.batch_rows = BATCH_ROWS[kind]
        if self.same_length:
            self.offsets = np.arange(0, len(self.ids) + 1, SEQUENCE)
        else:
            self.offsets = np.append(0, np.cumsum(np.load(folder / kind / "lengths.npy")))
        self.offsets = self.offsets[: (len(self.offsets) - 1) // part + 1]
        self.ids = self.ids[: self.offsets[-1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, self._arguments

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def grid(self) -> np.ndarray:
        """Whatever the kind, all ids in rows of one length; a view."""
        return self.ids[: len(self.ids) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)

    def collate(self, rows: Sequence[Any]) -> Batch:
        """The batch of some rows."""
        return stack(rows) if self.same_length else pad(rows)

    def gather(self, indices: Sequence[int]) -> Batch:
        """The batch of the rows at `indices`, straight from the memory map."""
        if self.same_length:
            return {"input_ids": torch.from_numpy(self.grid()[np.asarray(indices)].astype("i8"))}
        return pad([self[index] for index in indices])


def pad(rows: Sequence[Any]) -> Batch:
    """Pad to the longest row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(rows)
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def stack(rows: Sequence[Any]) -> Batch:
    """Rows of one length need no mask."""
    return {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}
