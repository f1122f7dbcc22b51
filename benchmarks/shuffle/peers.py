"""The orders of other loaders, from their own code, over rows that are only numbered.

Each function gives one epoch of one process with 2 workers, where the peer's order depends on them.
Files and chunks have 64 MB of 2-byte ids, as the peers write them by default. This file, like
metrics.py, needs numpy and the peer alone: it runs where tokenfeed is not installed.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.text_loaders.peers import import_streaming

__all__ = ["PEERS", "Peer"]

CHUNK_TOKENS = (1 << 26) // 2
WORKERS = 2
TAR_ROWS = 20_000


def chunk_ends(lengths: np.ndarray) -> np.ndarray:
    """Where the chunks end among the rows."""
    chunk = (np.cumsum(lengths) - 1) // CHUNK_TOKENS
    return np.append(np.flatnonzero(np.diff(chunk)) + 1, len(lengths))


def random_sampler(lengths: np.ndarray, rows_a_batch: int, epoch: int) -> np.ndarray:
    import torch
    from torch.utils.data import RandomSampler

    generator = torch.Generator().manual_seed(epoch)
    return np.fromiter(RandomSampler(range(len(lengths)), generator=generator), np.int64)


def by_length(lengths: np.ndarray, rows_a_batch: int, epoch: int) -> np.ndarray:
    """The sampler that `train_sampling_strategy="group_by_length"` gives to the Trainer."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(epoch)
    sampler = LengthGroupedSampler(rows_a_batch, lengths=lengths.tolist(), generator=generator)
    return np.fromiter(sampler, np.int64)


def as_it_is(rows: Any) -> np.ndarray:
    return np.asarray(rows)


def row_numbers(samples: list[dict[str, int]]) -> np.ndarray:
    return np.array([sample["row"] for sample in samples])


def rows_between(edges: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
    """What `datasets` reads from its files."""
    for first, end in edges:
        for row in range(first, end):
            yield {"row": row}


def datasets_buffer(
    lengths: np.ndarray, rows_a_batch: int, epoch: int, *, buffer: int
) -> np.ndarray:
    from datasets import IterableDataset
    from torch.utils.data import DataLoader

    edges = list(itertools.pairwise([0, *chunk_ends(lengths).tolist()]))
    data = IterableDataset.from_generator(rows_between, gen_kwargs={"edges": edges})
    data = data.shuffle(seed=0, buffer_size=buffer)
    data.set_epoch(epoch)
    loader: Any = DataLoader(data, rows_a_batch, num_workers=WORKERS, collate_fn=row_numbers)
    return np.concatenate(list(loader))


def mosaic(
    lengths: np.ndarray, rows_a_batch: int, epoch: int, *, algorithm: str, block: int | None
) -> np.ndarray:
    import_streaming()
    from streaming.base.shuffle import get_shuffle

    sizes = np.diff(chunk_ends(lengths), prepend=0)
    block = block or 4_000_000  # what StreamingDataset chooses on one node
    return np.asarray(get_shuffle(algorithm, sizes, 1, 0, epoch, block))


class _Cache:
    """What litData's shuffle asks of the files."""

    def __init__(self, lengths: np.ndarray) -> None:
        from litdata.streaming.item_loader import Interval

        ends = [0, *chunk_ends(lengths).tolist()]
        self._intervals = [Interval(a, a, b, b) for a, b in itertools.pairwise(ends)]
        self._reader = self

    def get_chunk_intervals(self) -> list[Any]:
        return self._intervals


def litdata(lengths: np.ndarray, rows_a_batch: int, epoch: int) -> np.ndarray:
    from litdata.streaming.shuffle import FullShuffle
    from litdata.utilities.env import _DistributedEnv

    cache: Any = _Cache(lengths)
    shuffle = FullShuffle(cache, 42, drop_last=False)
    env = _DistributedEnv(1, 0, 1)
    dealt = shuffle.get_chunks_and_intervals_per_workers(env, WORKERS, rows_a_batch, epoch + 1)
    streams = []
    for chunks, intervals in zip(*dealt, strict=True):
        rows = [
            shuffle(np.arange(interval[1], interval[2]), len(cache._intervals), epoch + 1, chunk)
            for chunk, interval in zip(chunks, intervals, strict=True)
        ]
        streams.append(np.concatenate(rows))
    return in_turn(streams, rows_a_batch)


def in_turn(streams: list[np.ndarray], rows_a_batch: int) -> np.ndarray:
    """Batches of several workers, one of each at a time."""
    cut = [np.split(rows, range(rows_a_batch, len(rows), rows_a_batch)) for rows in streams]
    batches = itertools.chain.from_iterable(itertools.zip_longest(*cut))
    return np.concatenate([batch for batch in batches if batch is not None])


def expand(urls: Any, ends: np.ndarray) -> Iterator[int]:
    """The rows of each tar file."""
    for url in urls:
        number = int(url["url"])
        yield from range(number * TAR_ROWS, min((number + 1) * TAR_ROWS, int(ends[-1])))


def webdataset(lengths: np.ndarray, rows_a_batch: int, epoch: int) -> np.ndarray:
    import webdataset

    names = [str(number) for number in range(-(-len(lengths) // TAR_ROWS))]
    data = webdataset.DataPipeline(
        webdataset.SimpleShardList(names),
        webdataset.detshuffle(100, seed=0, epoch=epoch - 1),
        webdataset.split_by_worker,
        partial(expand, ends=np.array([len(lengths)])),
        webdataset.shuffle(1000, seed=epoch),
        webdataset.batched(rows_a_batch, collation_fn=as_it_is),
    )
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=WORKERS)
    return np.concatenate([np.asarray(batch) for batch in loader])


@dataclass(frozen=True)
class Peer:
    """A loader to compare with."""

    packages: tuple[str, ...]
    """Distributions it needs."""
    order: Callable[[np.ndarray, int, int], np.ndarray]
    """Lengths, rows of a batch, epoch -> rows in the order of delivery."""

    def give(self, lengths: np.ndarray, rows_a_batch: int, epoch: int) -> np.ndarray:
        """The order; what the peer says meanwhile is not shown."""
        with contextlib.redirect_stdout(None):
            return self.order(lengths, rows_a_batch, epoch)


PEERS = {
    "full shuffle (datasets, map-style)": Peer(("torch",), random_sampler),
    "transformers group_by_length": Peer(("transformers",), by_length),
    "datasets buffer 10,000": Peer(("datasets",), partial(datasets_buffer, buffer=10_000)),
    "mosaicml-streaming py1e": Peer(
        ("mosaicml-streaming",), partial(mosaic, algorithm="py1e", block=None)
    ),
    "mosaicml-streaming py1e, 16 nodes": Peer(
        ("mosaicml-streaming",), partial(mosaic, algorithm="py1e", block=1 << 18)
    ),
    "mosaicml-streaming py1br, 16 nodes": Peer(
        ("mosaicml-streaming",), partial(mosaic, algorithm="py1br", block=1 << 18)
    ),
    "webdataset buffer 1,000": Peer(("webdataset",), webdataset),
    "litdata": Peer(("litdata",), litdata),
}
