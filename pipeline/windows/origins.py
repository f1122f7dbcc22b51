"""Origins: the file, the record and the tokens in it that pieces of rows were made from.

For people, who want to look at what a micro-batch held; it reads some record batches of each shard
that has one of the rows, and nothing in a training loop calls it. Torch-free.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.errors import ManifestError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD
from tokenfeed.pipeline.format.shard import ShardReader

__all__ = ["Origin", "origins_of"]


class Origin(NamedTuple):
    """Where a piece of a row was made from."""

    file: str
    """The input file, as `pretokenize` was given it."""
    record: int
    """The record in it, counted from 0: in JSON Lines the line."""
    start: int
    """First token of the piece, within those of the record."""
    stop: int
    """The token after its last."""


def origins_of(
    sources: tuple[OpenedSplit, ...], rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> list[Origin]:
    """The origin of each of P pieces.

    Args:
        sources: The data sets.
        rows: The row of each piece, counted over all sources, shape (P,).
        starts: First token of each piece within its row, shape (P,).
        lengths: Tokens of each piece, shape (P,).

    Raises:
        ShardFormatError: A shard is missing or damaged.
        ManifestError: The list of input files is.
    """
    wanted, places = np.unique(rows, return_inverse=True)
    found = list(_of_sources(sources, wanted))
    spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    named = zip((found[place] for place in places.tolist()), spans, strict=True)
    return [Origin(file, record, *span) for (file, record), span in named]


def _of_sources(sources: tuple[OpenedSplit, ...], rows: np.ndarray) -> Iterator[tuple[str, int]]:
    """File and record of rows, which rise."""
    first = 0
    for source in sources:
        own = _between(rows, first, first + source.rows)
        if len(own):
            names = _names(source)
            yield from ((names[file], record) for file, record in _of_source(source, own))
        first += source.rows


def _names(source: OpenedSplit) -> list[str]:
    """The input files by their numbers."""
    file = source.manifest.sources.file
    try:
        lines = source.store.read(file).splitlines()
        return [json.loads(line)["path"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(
            f"{source.store.path(file)}: cannot be read ({error}). Restore it."
        ) from error


def _of_source(source: OpenedSplit, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Number of the file, and record, of rows of one source, which rise."""
    infos = source.split.shards
    starts = offsets_of(np.array([info.rows for info in infos])).tolist()
    only = (INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD)
    for info, first in zip(infos, starts, strict=False):
        own = _between(rows, first, first + info.rows)
        if len(own):
            reader = ShardReader.open(source.store, source.manifest, info, only=only)
            yield from _of_shard(reader, info.batches, own)


def _of_shard(reader: ShardReader, batches: int, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """The same of rows of one shard: finds the record batch of the first of them, and goes on."""
    low = 0
    while len(rows):
        low, batch, first = _batch_of(reader, low, batches, int(rows[0]))
        here = _between(rows, first, first + len(batch))
        files, records = batch.per_row[ORIGIN_FILE][here], batch.per_row[ORIGIN_RECORD][here]
        yield from zip(files.tolist(), records.tolist(), strict=True)
        rows = rows[len(here) :]


def _batch_of(reader: ShardReader, low: int, high: int, row: int) -> tuple[int, Rows, int]:
    """The record batch from `low` up to `high` that has a row, its number and its first row."""
    while True:
        middle = (low + high) // 2
        batch, first = reader.read(middle)
        if row < first:
            high = middle
        elif row >= first + len(batch):
            low = middle + 1
        else:
            return middle, batch, first


def _between(rows: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Those of rising rows that are from `first` up to `stop`, counted from there."""
    begin, end = np.searchsorted(rows, (first, stop))
    return rows[begin:end] - first
