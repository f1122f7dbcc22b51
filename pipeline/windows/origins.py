"""Origins: the input file, the record and the token range that a piece of a row was made from.

For inspecting a micro-batch. It reads several record batches of each shard that has one of the
rows, so a training loop should not call it for every batch. Torch-free.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.manifest import read_checked
from tokenfeed.pipeline.format.schema import INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD
from tokenfeed.pipeline.format.shard import ShardReader


class Origin(NamedTuple):
    """The input that a piece of a row was made from."""

    file: str
    """The input file, as it was passed to `pretokenize`."""
    record: int
    """Number of the record in the file, from 0; in JSON Lines the line."""
    start: int
    """First token of the piece, counted in the tokens of the record."""
    stop: int
    """The token after the last one of the piece."""
    data_set: str
    """Name of the data set."""
    row: int
    """Number of the row in the split, as `skip` of `ShardLoader` takes it."""


def origins_of(
    sources: tuple[OpenedSplit, ...], rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> list[Origin]:
    """Return the origin of each of P pieces.

    Args:
        sources: The data sets.
        rows: Number of the row of each piece, over all sources, shape (P,), int64.
        starts: First token of each piece in its row, shape (P,), int64.
        lengths: Tokens of each piece, shape (P,).

    Raises:
        ConfigError: The data sets have fewer rows.
        ShardFormatError: A shard is missing or damaged.
        ManifestError: The list of input files is missing or damaged.
    """
    if len(rows) and rows.max() >= sum(source.rows for source in sources):
        raise ConfigError(
            f"`batch`: has row {rows.max():,}, but {', '.join(source.name for source in sources)} "
            f"has rows 0 to {sum(source.rows for source in sources) - 1:,}. Use the loader that "
            "delivered the batch."
        )
    wanted, places = np.unique(rows, return_inverse=True)
    found = list(_of_sources(sources, wanted))
    row_starts = offsets_of(np.array([source.rows for source in sources]))
    of_source = np.searchsorted(row_starts, rows, side="right") - 1
    own_rows = (rows - row_starts[of_source]).tolist()
    return [
        Origin(file, record, start, stop, sources[source].name, row)
        for (file, record), start, stop, source, row in zip(
            (found[place] for place in places.tolist()),
            starts.tolist(),
            (starts + lengths).tolist(),
            of_source.tolist(),
            own_rows,
            strict=True,
        )
    ]


def _of_sources(sources: tuple[OpenedSplit, ...], rows: np.ndarray) -> Iterator[tuple[str, int]]:
    """Yield file and record of rows, which ascend."""
    first = 0
    for source in sources:
        own = _between(rows, first, first + source.rows)
        if len(own):
            names = _names(source)
            yield from ((names[file], record) for file, record in _of_source(source, own))
        first += source.rows


def _names(source: OpenedSplit) -> list[str]:
    """Return the paths of the input files, by number."""
    lines = read_checked(source.store, source.manifest.sources).splitlines()
    return [json.loads(line)["path"] for line in lines]


def _of_source(source: OpenedSplit, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield file number and record of ascending rows of one source."""
    infos = source.split.shards
    starts = offsets_of(np.array([info.rows for info in infos])).tolist()
    only = (INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD)
    for info, first in zip(infos, starts, strict=False):
        own = _between(rows, first, first + info.rows)
        if len(own):
            reader = ShardReader.open(source.store, source.manifest, info, only=only)
            yield from _of_shard(reader, info.batches, own)


def _of_shard(reader: ShardReader, batches: int, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield file number and record of ascending rows of one shard, record batch by record batch."""
    number = 0
    while len(rows):
        numbers, row = range(batches), int(rows[0])
        number = bisect_right(numbers, row, lo=number, key=lambda n: reader.read(n)[1]) - 1
        batch, first = reader.read(number)
        here = _between(rows, first, first + len(batch))
        files, records = batch.per_row[ORIGIN_FILE][here], batch.per_row[ORIGIN_RECORD][here]
        yield from zip(files.tolist(), records.tolist(), strict=True)
        rows = rows[len(here) :]


def _between(rows: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return the ascending rows in [first, stop), counted from `first`."""
    begin, end = np.searchsorted(rows, (first, stop))
    return rows[begin:end] - first
