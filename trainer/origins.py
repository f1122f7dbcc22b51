"""Where rows came from: the file and the record in it, for rows that a training failed on."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import ORIGIN_FILE, ORIGIN_RECORD
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.format.store import StorePath, open_store
from tokenfeed.trainer.config import Shards
from tokenfeed.trainer.data_sets import DataSets

__all__ = ["origins", "write_origins"]


def write_origins(path: Path, shards: Shards, rows: np.ndarray) -> str:
    """Write a line for each of some rows of the train split; gives the first, for a message.

    Of several data sets the rows are numbered through, in their order.
    """
    places: list[tuple[str, int]] = []
    data, first = DataSets.read(shards), 0
    for folder, manifest in zip(data.weights, data.manifests, strict=True):
        count = manifest.split("train").rows
        own = rows[(rows >= first) & (rows < first + count)] - first
        places += origins(folder, "train", own)
        first += count
    lines = [json.dumps({"file": file, "record": record}) for file, record in places]
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
    file, record = places[0]
    return f"{file} record {record}"


def origins(shards: StorePath, split: str, rows: np.ndarray) -> list[tuple[str, int]]:
    """File and record of some rows of a split, in the order of the corpus; reads whole shards.

    Args:
        shards: The data set.
        split: Whose rows.
        rows: Their numbers within the split, in any order; each is listed once.
    """
    store, manifest = open_store(shards), Manifest.read(shards)
    lines = store.read(manifest.sources.file).splitlines()
    infos, rows = manifest.split(split).shards, np.unique(rows)
    starts = offsets_of(np.array([info.rows for info in infos]))
    places: list[tuple[str, int]] = []
    for info, first in zip(infos, starts, strict=False):
        within = rows[(rows >= first) & (rows < first + info.rows)] - first
        if len(within):
            reader = ShardReader.open(store, manifest, info)
            for file, record in _of_shard(reader, info.batches, within):
                places.append((json.loads(lines[file])["path"], record))
    return places


def _of_shard(reader: ShardReader, batches: int, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Number of the file, and record, of rows of one shard."""
    for index in range(batches):
        batch, first = reader.read(index)
        here = rows[(rows >= first) & (rows < first + len(batch))] - first
        yield from zip(
            batch.per_row[ORIGIN_FILE][here].tolist(),
            batch.per_row[ORIGIN_RECORD][here].tolist(),
            strict=True,
        )
