"""ShardDataset: an IterableDataset of window slices, for a plain DataLoader.

Worker w of n makes windows w, w + n, w + 2n, ... and the DataLoader hands items out in turn, so the
sequence is the same for any number of workers, also for 0.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NoReturn

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch, BatchForm, make_batches
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.plan import Position
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.planning.stages import Stage
from tokenfeed.pipeline.windows.rank_slice import RankSlice


class WindowSlice:
    """One rank's slice of a window, in a single tensor. Iterating over it builds its CPU
    batches."""

    def __init__(self, data: torch.Tensor, form: BatchForm, *, is_pinned: bool = False) -> None:
        self._data = data
        self._form = form
        self._is_pinned = is_pinned

    @classmethod
    def from_rank_slice(cls, rank_slice: RankSlice, form: BatchForm) -> "WindowSlice":
        """Copy a slice into a tensor; in a worker, directly into shared memory."""
        size = rank_slice.num_bytes
        if get_worker_info() is None:
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
        else:  # an ordinary tensor would be copied into shared memory once more
            data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(_shared_memory(size))
        rank_slice.write(data.numpy().data)
        return cls(data, form)

    def __iter__(self) -> Iterator[Batch]:
        rank_slice = RankSlice.read(self._data.numpy().data)
        batches = (batch for batch, _ in make_batches(rank_slice, self._form) if batch is not None)
        return (batch.pin_memory() for batch in batches) if self._is_pinned else batches

    def pin_memory(self) -> "WindowSlice":
        """Return a slice whose batches are in page-locked memory, for `non_blocking` copies.

        A DataLoader with `pin_memory=True` calls it. Each batch is page-locked when it is built,
        because the slice itself is never copied to the device.
        """
        return WindowSlice(self._data, self._form, is_pinned=True)


def _shared_memory(size: int) -> torch.UntypedStorage:
    """Return shared memory for a slice.

    Raises:
        ConfigError: The system refuses it, as a container with a small /dev/shm does.
    """
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"the system refused {size:,} bytes of shared memory for a window "
            f"({' '.join(str(error).split())}). Set a smaller `window_tokens`, enlarge /dev/shm "
            "(`docker run --shm-size=1g`), or use a ShardLoader, which does not need /dev/shm."
        ) from error
    return storage


def _refuse_collation(batch: object, **_: object) -> NoReturn:
    raise ConfigError(
        "a DataLoader around a ShardDataset must not collate: an item is a slice with many "
        "batches. Set `batch_size`=None, and iterate over each item."
    )


default_collate_fn_map[WindowSlice] = _refuse_collation  # how torch documents new types


_OF_TRANSFORMERS = (
    "for `transformers.Trainer`, use `ShardTrainer` of `tokenfeed.integrations.transformers` and a "
    "ShardLoader"
)
_OF_LOADERS = {"device", "num_workers", "prefetch", "timeout", "num_streams"}


class ShardDataset(IterableDataset[WindowSlice]):
    """Slices of windows, in order, for a plain `DataLoader(dataset, batch_size=None)`.

        for window_slice in DataLoader(ShardDataset("out/", Padded(16_384)), batch_size=None):
            for batch in window_slice:
                ...

    Every iteration begins at the start of `epoch`. Increase `epoch` for the next pass, else the
    order is the same again. With `pin_memory=True` of the DataLoader, batches are in page-locked
    memory. `ShardLoader` adds a device, prefetched batches and a saved state.
    """

    def __init__(
        self,
        path: StorePath | Sequence[StorePath] | Mixture | Sequence[Stage],
        batching: Batching,
        **settings: Any,
    ) -> None:
        """Read the manifest and make the plan. No shard is opened yet.

        Args:
            path: Output folder of `pretokenize`, a list or a Mixture of several, or a list of
                `Stage`s.
            batching: How micro-batches are made.
            settings: Other settings of `ShardLoader`: the split, the order, ranks, targets, the
                form of batches. `epochs` is the number of epochs of an iteration.

        Raises:
            ManifestError: The folder has no such data set or split.
            ConfigError: A setting is out of range or does not fit the data, or is one of the
                device, the workers or streams of a loader.
        """
        if unfit := sorted(_OF_LOADERS & settings.keys()):
            raise ConfigError(
                f"`{unfit[0]}`: a ShardDataset has no such setting, because the DataLoader has the "
                "workers and the loop moves the batches. Use a ShardLoader, or leave it out."
            )
        loader = ShardLoader(path, batching=batching, num_workers=0, **settings)
        self._maker, self._form = loader._window_maker(), loader._form
        self._ranks = loader._ranks
        self.epochs = loader.epochs
        self._epoch = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._share_epoch()

    @property
    def epoch(self) -> int:
        """The first epoch of the next iteration. Set it between two iterations; persistent workers
        of a DataLoader see the change."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(checks.whole("epoch", epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set `epoch`, as frameworks do. If Accelerate does, which counts iterations of its own,
        `epoch` stays as it is.

        Raises:
            ConfigError: Accelerate would divide the items between ranks once more.
        """
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") != "accelerate.data_loader":
            self.epoch = epoch
        elif type(caller.f_locals.get("self")).__name__ != "DataLoaderShard":
            raise ConfigError(
                "Accelerate would divide the items of a ShardDataset between the ranks, but each "
                "rank has items of its own already. Leave its DataLoader out of `prepare`, or "
                "prepare a `StatefulShardLoader` of `tokenfeed.integrations.dataloader` instead; "
                f"{_OF_TRANSFORMERS}."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled copy has its own epoch counter, shared with its own workers."""
        self.__dict__.update(state)
        self._share_epoch()

    def __iter__(self) -> Iterator[WindowSlice]:
        self._ranks.check_now()
        collator = sys._getframe(1).f_locals.get("collate_fn")
        if (getattr(collator, "__module__", None) or "").startswith("transformers."):
            raise ConfigError(
                "a collator of transformers would join items of a ShardDataset, which are slices "
                f"with many batches: {_OF_TRANSFORMERS}."
            )
        worker = get_worker_info()
        return self._slices(self.epoch, *((worker.id, worker.num_workers) if worker else (0, 1)))

    def _share_epoch(self) -> None:
        """Share the epoch with persistent workers of a DataLoader."""
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def _slices(self, epoch: int, worker: int, num_workers: int) -> Iterator[WindowSlice]:
        windows = self._maker.plan.order.num_windows
        first = epoch * windows
        for number in count(first + worker, num_workers):
            if self.epochs is not None and number >= first + self.epochs * windows:
                return
            rank_slice = self._maker.make(Position(*divmod(number, windows), 0))
            yield WindowSlice.from_rank_slice(rank_slice, self._form)
