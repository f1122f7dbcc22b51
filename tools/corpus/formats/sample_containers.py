"""Containers of samples, as mosaicml-streaming and litData write them, and indexes beside files.

A container is the number n of its samples and n + 1 offsets of samples, all uint32, then a head,
then the samples. It is read in order, some samples at a time, because a small compressed file may
claim gigabytes.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa

from tokenfeed.tools.corpus.blocks import Blocks
from tokenfeed.tools.corpus.formats.tables import (
    BATCH_ROWS,
    batch_records,
    column_problem,
    without_long,
)
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.locations import Location, beside
from tokenfeed.tools.corpus.records import Fields, Records, rejected, too_long

CHUNK_BYTES = 4 << 20


class Container(NamedTuple):
    """An open container."""

    offsets: np.ndarray
    """The beginning of each sample, and the end, int64."""
    head: bytes
    samples: Iterator[tuple[np.ndarray, np.ndarray]]
    """Some samples at a time: their bytes, and their offsets therein. Raises ValueError if the
    samples do not fill the container."""


def open_container(file: BinaryIO, most_bytes: int) -> Container:
    """Read the offsets and the head of a container.

    Args:
        file: The container, decompressed.
        most_bytes: Greatest size of a sample, and of all offsets.

    Raises:
        ValueError: The container is damaged.
    """
    read = partial(_read, file, most_bytes=max(most_bytes, CHUNK_BYTES))
    first = 4 * (int(read(4).view("<u4")[0]) + 2)
    offsets = read(first - 4).view("<u4").astype(np.int64)
    if offsets[0] < first or (np.diff(offsets) < 0).any():
        raise ValueError("the offsets of its samples are not inside the file")
    head = read(int(offsets[0]) - first).tobytes()

    def samples() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        start = 0
        while start < len(offsets) - 1:
            full = np.searchsorted(offsets, offsets[start] + CHUNK_BYTES, "right") - 1
            stop = min(max(int(full), start + 1), len(offsets) - 1)
            some = offsets[start : stop + 1] - offsets[start]
            yield read(int(some[-1])), some
            start = stop
        if file.read(1):
            raise ValueError("the offsets of its samples do not fill the file")

    return Container(offsets, head, samples())


def _read(file: BinaryIO, num_bytes: int, *, most_bytes: int) -> np.ndarray:
    """Return the next bytes.

    Raises:
        ValueError: There are more than `most_bytes`, or the file ends within them.
    """
    if num_bytes > most_bytes:
        raise ValueError(f"a sample, or the head, {too_long(num_bytes, most_bytes)}")
    content = file.read(num_bytes)
    if len(content) < num_bytes:
        raise ValueError("ends before its content does")
    return np.frombuffer(content, np.uint8)


def records_of_tables(
    tables: Iterable[pa.RecordBatch], part: FilePart, fields: Fields
) -> Iterator[Records]:
    """Yield the rows of tables that follow one another. If a column is missing, the file is one
    reject."""
    record = part.first_record
    for table in tables:
        if problem := column_problem(table.schema, fields):
            if not part.start:  # once for the file
                yield rejected(part.first_record, fields, problem)
            return
        for start in range(0, len(table), BATCH_ROWS):
            rows = table.slice(start, BATCH_ROWS)
            numbers = np.arange(record, record + len(rows), dtype=np.uint64)
            records = batch_records(rows, fields, numbers)
            yield without_long(records, fields, part.source.max_record_bytes)
            record += len(rows)


def weighed(records: Iterable[Records], part: FilePart, blocks: Blocks) -> Iterator[Records]:
    """Yield records with their share of the weight of a part, by the bytes read before them."""
    consumed = 0
    for each in records:
        yield replace(each, weight_bytes=part.weight_of(blocks.consumed_bytes - consumed))
        consumed = blocks.consumed_bytes


def name_of(place: Location) -> str:
    """Return the name of a file without its folder."""
    return os.path.basename(place if isinstance(place, str) else place.info.name)


def read_index(part: FilePart) -> dict[str, Any] | None:
    """Return the content of index.json in the folder of a file; None if it is missing.

    Raises:
        ValueError: The index is not JSON.
    """
    place = beside(part.source.path, "index.json")
    if place is None:
        return None
    return cast(dict[str, Any], json.loads(b"".join(Blocks(place))))
