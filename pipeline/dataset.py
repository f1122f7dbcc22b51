"""Workers and windows: an IterableDataset whose items are one rank's share of a window.

Worker w of n computes windows w, w + n, w + 2n, ... and the DataLoader hands items out in turn, so
the sequence is the same for any number of workers, none included. It runs on over the end of an
epoch, so nothing stops at the seam.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tokenfeed.pipeline.batch import Batch, RaggedBatch, build_on_host
from tokenfeed.pipeline.batching import Batching
from tokenfeed.pipeline.manifest import Manifest
from tokenfeed.pipeline.plan import Plan, Position
from tokenfeed.pipeline.window import ShareArrays, SplitReader

__all__ = ["ShardDataset", "WindowShare"]

_INDEX_FIELDS = (
    "piece_rows",
    "piece_starts",
    "piece_lengths",
    "sequence_offsets",
    "batch_offsets",
)


@dataclass(frozen=True, slots=True)
class WindowShare:
    """One rank's share of a window in two tensors; iterating it builds its CPU batches."""

    epoch: int
    window: int
    ids: torch.Tensor
    """Tokens in the order of delivery, shape (N,), int16 or int32 holding unsigned ids."""
    index: torch.Tensor
    """The arrays of `ShareArrays` after `ids`, one after the other, int64."""
    index_sizes: tuple[int, ...]
    """Lengths of those arrays."""
    multiple_of: int
    pad_id: int

    @classmethod
    def of(
        cls, share: ShareArrays, plan: Plan, epoch: int, window: int, pad_id: int
    ) -> "WindowShare":
        """Put a share into tensors, which cross processes through shared memory."""
        arrays = [getattr(share, name) for name in _INDEX_FIELDS]
        return cls(
            epoch,
            window,
            _shared_tensor([share.ids.view(f"i{share.ids.itemsize}")]),
            _shared_tensor(arrays),
            tuple(len(array) for array in arrays),
            plan.batching.multiple_of,
            pad_id,
        )

    @property
    def num_batches(self) -> int:
        """Micro-batches of this share: one per gang of the window."""
        return self.index_sizes[-1] - 1

    def pin_memory(self) -> "WindowShare":
        """The same in page-locked memory; the DataLoader calls this once per window."""
        return WindowShare(
            self.epoch,
            self.window,
            self.ids.pin_memory(),
            self.index,
            self.index_sizes,
            self.multiple_of,
            self.pad_id,
        )

    def ragged_batches(self, first: int = 0) -> Iterator[RaggedBatch]:
        """The micro-batches from number `first` on, as views, unpadded."""
        ids = self.ids.numpy().view(f"u{self.ids.element_size()}")
        edges = np.cumsum(self.index_sizes)[:-1]
        rows, starts, lengths, sequence_offsets, batch_offsets = np.split(self.index.numpy(), edges)
        tokens = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=tokens[1:])
        sequence_lengths = np.diff(tokens[sequence_offsets])
        for start, stop in zip(batch_offsets[first:-1], batch_offsets[first + 1 :], strict=True):
            pieces = slice(sequence_offsets[start], sequence_offsets[stop])
            yield RaggedBatch(
                ids[tokens[pieces.start] : tokens[pieces.stop]],
                rows[pieces],
                starts[pieces],
                lengths[pieces],
                sequence_offsets[start : stop + 1] - pieces.start,
                sequence_lengths[start:stop],
                self.multiple_of,
            )

    def __iter__(self) -> Iterator[Batch]:
        return (build_on_host(ragged, self.pad_id) for ragged in self.ragged_batches())


class ShardDataset(IterableDataset[WindowShare]):
    """Shares of windows, in order, for a plain `DataLoader(dataset, batch_size=None)`.

        for share in DataLoader(ShardDataset("out/", Padded(16_384)), batch_size=None):
            for batch in share:
                ...

    `ShardLoader` adds what a training loop needs: a device, batches ready ahead, a saved state.
    """

    def __init__(
        self,
        path: str | Path,
        batching: Batching,
        *,
        split: str = "train",
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Read the manifest and make the plan; no shard is opened yet.

        Args:
            path: Output folder of `pretokenize`.
            batching: How micro-batches are made.
            split: Which split of the data set.
            seed: Decides every order.
            shuffle: False gives the order of the files, sorted by length within a window.
            epochs: How many passes; None for no end.
            rank: Whose share.
            world_size: Number of ranks that share each gang.

        Raises:
            ManifestError: The folder holds no such data set or split.
        """
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        self.plan = Plan.of(
            self.manifest, split, batching, seed=seed, shuffle=shuffle, world_size=world_size
        )
        self.rank = rank
        self.epochs = epochs
        self.start = Position(0, 0, 0)
        """Where iteration begins; its window is delivered whole, the loader skips gangs."""

    def __iter__(self) -> Iterator[WindowShare]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        windows = self.plan.order.num_windows
        reader = SplitReader(self.path, self.manifest, self.plan.split)
        pad_id = self.manifest.tokenizer.pad_id
        first = self.start.epoch * windows + self.start.window + worker_id
        for number in count(first, num_workers):
            epoch, window = divmod(number, windows)
            if self.epochs is not None and epoch >= self.end_epoch:
                return
            share = self.plan.read_share(reader, epoch, window, self.rank)
            yield WindowShare.of(share, self.plan, epoch, window, pad_id)

    @property
    def end_epoch(self) -> int:
        """The epoch before which this pass ends. Passes are aligned: one that was stopped within
        epochs 3 to 5 of three-epoch passes goes on to the end of 5, wherever it stopped."""
        if self.epochs is None:
            raise ValueError("a dataset without an end has no last epoch")
        return (self.start.epoch // self.epochs + 1) * self.epochs


def _shared_tensor(arrays: list[np.ndarray]) -> torch.Tensor:
    """Concatenate arrays of one dtype into a tensor; in a worker, straight into shared memory.

    Elsewhere the DataLoader would copy an ordinary tensor into shared memory once more.
    """
    size = sum(map(len, arrays))
    dtype = torch.from_numpy(arrays[0][:0].copy()).dtype
    if get_worker_info() is None:
        tensor = torch.empty(size, dtype=dtype)
    else:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(  # type: ignore[no-untyped-call]
            size * dtype.itemsize
        )
        tensor = torch.empty(0, dtype=dtype).set_(storage)
    np.concatenate(arrays, out=tensor.numpy())
    return tensor
