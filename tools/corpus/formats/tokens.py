"""Files of token ids that other projects wrote: Megatron, nanoGPT, llm.c, OLMo and datatrove.

A file has ids of two or four bytes, one after another. `--task ids` reads them as the field
`input_ids`. An index beside the file says where rows end, or else the end token of the tokenizer:

    NAME.bin, NAME.idx            Megatron's IndexedDataset: documents of the index
    NAME.bin                      nanoGPT; llm.c, with a header: up to each end token
    NAME.npy, NAME.csv.gz         OLMo, dolma: rows of the table
    NAME.npy                      numpy.save, or ids alone: up to each end token
    NAME.ds, .ds.index, .metadata datatrove, nanotron: rows of the index

A part is a range of ids that begins and ends with a row. The whole index is checked when a file is
cut into parts, so a damaged or false index gives no row. These formats have no checksums of ids:
an id that changed before is found only if it is not in the vocabulary.
"""

import gzip
import io
import json
import logging
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa
from numpy.lib.format import (
    MAGIC_PREFIX,
    read_array_header_1_0,
    read_array_header_2_0,
    read_magic,
)
from pyarrow import csv

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.tools.corpus.formats.tables import column_problem
from tokenfeed.tools.corpus.input_files import FilePart, Format, InputFile
from tokenfeed.tools.corpus.locations import (
    FOREIGN_INDEX,
    Location,
    beside,
    names_beside,
    open_location,
    read_array,
    size_of,
)
from tokenfeed.tools.corpus.records import Fields, Records, rejected, too_long

ENDINGS = (".bin", ".npy", ".ds")
_CHUNK_IDS, _CHUNK_ROWS = 1 << 20, 1 << 20
"""Ids, and entries of an index, that are read at once."""
_TABLE_BYTES = 1 << 20
"""Bytes of a table that are read at once; no line may be longer."""
_SMALL_TABLE_BYTES = 1 << 24
"""A compressed table is kept in memory up to this size. Its file is cut into parts then."""
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.uint32())})
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""dtype by magic and version."""
_MEGATRON = {4: "<u4", 8: "<u2", 3: "<u2"}
"""dtype by its code in an index. Ids are never negative."""
_FOREIGN = {"chunks": "litData", "shards": "mosaicml-streaming"}
"""Keys of index.json in a data set of another project."""
_log = logging.getLogger(__name__)

Lengths = Callable[[int, int], Iterator[np.ndarray]]
"""Yields how many ids rows have, int64, some rows at a time, from a row and the id where it
begins."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """An open file of ids."""

    source: InputFile
    dtype: np.dtype
    first_byte: int
    """Where the ids begin."""
    num_ids: int
    lengths: Lengths
    has_index: bool = True
    can_cut: bool = True
    """Whether rows in the middle are found without reading the index from its beginning."""

    def rows(self, row: int, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the lengths of the rows between two ids. Empty rows at the end of a part belong to
        the next part.

        Raises:
            ValueError: The index is damaged, or belongs to another file.
        """
        at = start
        for lengths in self.lengths(row, start):
            ends = at + np.cumsum(lengths)
            at = int(ends[-1])
            if at >= stop < self.num_ids:
                last = int(np.searchsorted(ends, stop))
                at = int(ends[last])
                yield lengths[: last + 1]
                break
            if at > stop:
                break
            yield lengths
        if at != stop:
            raise ValueError(
                f"the index has rows up to id {at:,}, and the file has {stop:,} ids. Use the index "
                "that belongs to the file"
            )


def _opened(source: InputFile) -> _Tokens:
    """Open a file of ids, and recognize its format.

    Raises:
        ValueError: The file or its index is damaged.
        ConfigError: Rows end with the end token, but the tokenizer has none. Or the tokenizer has
            more ids than a file of this format can have.
        CorpusError: The file belongs to a data set of litData.
    """
    name = _name_of(source.path).lower()
    flat = partial(_flat, source)
    if name.endswith(".ds"):
        return _datatrove(source)
    if name.endswith(".npy"):
        table = _beside(source, ".csv.gz")
        by_table: Lengths | None = partial(_by_csv, table) if table else None
        can_cut = not table
        if isinstance(table, str) and os.path.getsize(table) < _SMALL_TABLE_BYTES:
            by_table, can_cut = partial(_by_small_csv, table), True
        with open_location(source.path) as file:
            head = file.read(1 << 16)
        if head.startswith(MAGIC_PREFIX):
            own, first = _numpy_header(head, source.bytes)
            return replace(flat(own, by_table, first=first), can_cut=can_cut)
        assert source.ids
        if source.ids.dtype == "<u2":
            _refuse_four_bytes(source)
        return replace(flat(source.ids.dtype, by_table), can_cut=can_cut)
    if index := _beside(source, ".idx"):
        return _megatron(source, index)
    if other := _beside(source, FOREIGN_INDEX):
        refuse_foreign(other, source.name)
    header = [0]
    if source.bytes >= 1024:
        header = read_array(source.path, "<i4", 0, 256).tolist()
        if dtype := _LLM_C.get((header[0], header[1])):
            return flat(dtype, None, first=1024, count=header[2])
        if not any(header[3:]):
            raise ValueError("begins with an unknown header")
    if source.ids and source.ids.dtype != "<u2":
        raise ConfigError(
            f"{source.name}: has no header and no index, so its ids have two bytes, but those of "
            "the tokenizer need four. Save them by numpy.save, or put Megatron's .idx beside the "
            "file."
        )
    _refuse_four_bytes(source)
    return flat("<u2", None)


def _flat(
    source: InputFile,
    dtype: "np.dtype | str",
    lengths: Lengths | None,
    *,
    first: int = 0,
    count: int | None = None,
) -> _Tokens:
    dtype = np.dtype(dtype)
    counted, rest = divmod(source.bytes - first, dtype.itemsize)
    if rest or not counted or count not in (None, counted):
        expected = f" of {count:,}" if count is not None else ""
        after = f" after {first} bytes of a header" if first else ""
        raise ValueError(
            f"{source.bytes:,} bytes are no ids{expected} of {dtype.itemsize} bytes each{after}"
        )
    by_end = partial(_by_end, source, dtype, first, counted)
    return _Tokens(source, dtype, first, counted, lengths or by_end, has_index=bool(lengths))


def _by_end(
    source: InputFile, dtype: np.dtype, first: int, stop: int, row: int, start: int
) -> Iterator[np.ndarray]:
    """Find the rows of a file without an index: each ends with the end token."""
    if source.ids is None or source.ids.end_id is None:
        raise ConfigError(
            f"{source.name}: has no index, and the tokenizer no end token that ends a row. Name it "
            "by `--end-token`."
        )
    begin = start
    for place in range(start, stop, _CHUNK_IDS):
        size = min(_CHUNK_IDS, stop - place)
        chunk = read_array(source.path, dtype, first + place * dtype.itemsize, size)
        ends = place + np.flatnonzero(chunk == source.ids.end_id) + 1
        if len(ends):
            yield np.diff(ends, prepend=begin)
            begin = int(ends[-1])
    if begin < stop:
        yield np.array([stop - begin])


def _refuse_four_bytes(source: InputFile) -> None:
    """Refuse a file that does not say how long ids are, if every second id of two bytes is 0."""
    ids = read_array(source.path, "<u2", 0, min(source.bytes // 2, _CHUNK_IDS))
    if len(ids) >= 16 and not ids[1::2].any():
        raise ValueError(
            "every second id of two bytes is 0, so the ids have four bytes. If the file is of "
            "Megatron, put its .idx beside it; else write the ids as uint16, or by numpy.save"
        )


def refuse_foreign(index: Location, name: str) -> None:
    """Refuse a data set of a project whose files are not read.

    Args:
        index: A file index.json.
        name: What of the data set the user gave, for the message.

    Raises:
        CorpusError: The file is the index of such a data set.
    """
    try:
        with open_location(index) as file:
            found = json.loads(file.read())
    except (ValueError, RecursionError):
        return
    for key, project in _FOREIGN.items():
        listed = found.get(key) if isinstance(found, dict) else None
        if isinstance(listed, list) and listed and isinstance(listed[0], dict):
            raise CorpusError(
                f"{name}: is a data set of {project}, which is not read. Give its rows from "
                f"Python: tokenfeed.pretokenize(rows, OUT), where {project} reads the rows."
            )


def _numpy_header(head: bytes, num_bytes: int) -> tuple[np.dtype, int]:
    """Return the dtype in the header of `numpy.save`, and where the ids begin."""
    file = io.BytesIO(head)
    try:
        read = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}[read_magic(file)]
        with warnings.catch_warnings(action="ignore"):  # a header that Python 2 wrote is as good
            shape, _, dtype = read(file)
    except Exception:  # of many kinds, some of which name an address in memory
        raise ValueError("has a damaged header of numpy, like one that was cut off") from None
    counted = (num_bytes - file.tell()) // max(dtype.itemsize, 1)
    if len(shape) != 1 or dtype.kind not in "iu" or not dtype.isnative or shape[0] != counted:
        raise ValueError(
            f"has {counted:,} values and a header that says {dtype} of the shape {shape}, expected "
            "whole numbers of one dimension in the byte order of this machine. Save "
            "`ids.astype('uint32').ravel()`"
        )
    return np.dtype(f"<u{dtype.itemsize}"), file.tell()


def _megatron(source: InputFile, index: Location) -> _Tokens:
    """Read an index: 34 bytes of a head, the ids of each sequence (int32), where each begins in
    bytes (int64), and the first sequence of each document, with the end (int64)."""
    with open_location(index) as file:
        head = file.read(34)
    if len(head) < 34 or not head.startswith(b"MMIDIDX\0\0" + (1).to_bytes(8, "little")):
        raise ValueError(f"{_name_of(index)} is no index of version 1 of Megatron")
    if head[17] not in _MEGATRON:
        raise ValueError(f"{_name_of(index)} has ids of type code {head[17]}, expected 3, 4 or 8")
    sequences, borders = np.frombuffer(head, "<u8", 2, 18).tolist()
    documents = 34 + 12 * sequences
    expected, size = documents + 8 * borders, size_of(index)
    if size not in (expected, expected + sequences) or borders < 1:  # a mode of a byte may follow
        raise ValueError(f"{_name_of(index)} has {size:,} bytes, expected {expected:,}")
    ends = read_array(index, "<i8", documents, 1)[0], read_array(index, "<i8", expected - 8, 1)[0]
    if ends != (0, sequences) or not sequences:
        raise ValueError(f"the documents of {_name_of(index)} do not cover its sequences")

    def lengths(row: int, at: int) -> Iterator[np.ndarray]:
        while row < borders - 1:
            count = min(_CHUNK_ROWS, borders - 1 - row)
            some = read_array(index, "<i8", documents + 8 * row, count + 1)
            first, of_some = int(some[0]), int(some[-1]) - int(some[0])
            if (some[1:] < some[:-1]).any() or first < 0 or first + of_some > sequences:
                raise ValueError(f"the documents of {_name_of(index)} are out of order")
            sizes = read_array(index, "<i4", 34 + 4 * first, of_some)
            begins = np.append(0, np.cumsum(sizes, dtype=np.int64))
            stored = read_array(index, "<i8", 34 + 4 * sequences + 8 * first, of_some)
            places = (at + begins[:-1]) * dtype.itemsize
            if (stored != places).any() or (sizes < 0).any():
                raise ValueError(
                    f"the sequences of {_name_of(index)} do not follow one another in the file. "
                    "Merge them by Megatron's tools first"
                )
            at, row = at + int(begins[-1]), row + count
            yield np.diff(begins[some - first])

    dtype = np.dtype(_MEGATRON[head[17]])
    return _flat(source, dtype, lengths)


def _datatrove(source: InputFile) -> _Tokens:
    """Read where rows end from `.ds.index`, and the size of ids from `.ds.metadata`."""
    index, metadata = _beside(source, ".index"), _beside(source, ".metadata")
    if not index or not metadata:
        raise ValueError(f"{source.name}.{'metadata' if index else 'index'} is missing beside it")
    with open_location(metadata) as file:
        width = file.read(1 << 16).split(b"\n")[0].strip().rpartition(b"|")[2]
    if width not in (b"2", b"4"):
        raise ValueError(
            f"{source.name}.metadata says ids of {width[:20]!r} bytes, expected 2 or 4"
        )
    rows, rest = divmod(size_of(index), 8)
    if rest:
        raise ValueError(f"{source.name}.index has {size_of(index):,} bytes, not 8 a row")

    def lengths(row: int, at: int) -> Iterator[np.ndarray]:
        while row < rows:
            ends = read_array(index, "<i8", 8 * row, min(_CHUNK_ROWS, rows - row))
            yield _between(ends, at)
            row, at = row + len(ends), int(ends[-1])

    return _flat(source, f"<u{width.decode()}", lengths)


def _by_csv(table: Location, row: int, end: int) -> Iterator[np.ndarray]:
    """Read the starts and ends of all rows from dolma's table: the first two columns."""
    read = csv.ReadOptions(
        autogenerate_column_names=True, block_size=_TABLE_BYTES, use_threads=False
    )
    parse = csv.ParseOptions(newlines_in_values=True)  # in the names of documents
    convert = csv.ConvertOptions(
        include_columns=["f0", "f1"],
        column_types=dict.fromkeys(("f0", "f1"), pa.int64()),
        null_values=[],
    )
    assert row == end == 0
    with open_location(table) as opened, gzip.open(opened, "rb") as file:
        try:
            batches = csv.open_csv(file, read, parse, convert)
            for batch in batches:
                starts, ends = map(np.from_dlpack, batch.columns)  # `to_numpy` imports pandas
                if not len(ends):
                    continue
                if starts[0] != end or (starts[1:] != ends[:-1]).any():
                    raise ValueError("its rows do not follow one another")
                yield _between(ends, end)
                end = int(ends[-1])
        except (ValueError, OSError, EOFError, zlib.error, pa.ArrowException, KeyError) as error:
            raise ValueError(f"{_name_of(table)} is damaged: {error}") from None


def _by_small_csv(table: str, row: int, end: int) -> Iterator[np.ndarray]:
    """Yield the same, from any row on."""
    lengths = _lengths_in(table, os.stat(table).st_mtime_ns)
    if lengths[:row].sum() != end:
        raise ValueError(f"{_name_of(table)} has changed")
    for at in range(row, len(lengths), _CHUNK_ROWS):
        yield lengths[at : at + _CHUNK_ROWS]


@lru_cache(maxsize=2)
def _lengths_in(table: str, _modified: int) -> np.ndarray:
    """Return the lengths of all rows in a table, for all parts of the file."""
    return np.concatenate([np.empty(0, np.int64), *_by_csv(table, 0, 0)])


def _between(ends: np.ndarray, begin: int) -> np.ndarray:
    begins = np.append(begin, ends[:-1])
    if (ends < begins).any():  # differences of damaged numbers may overflow
        raise ValueError("the rows of its index are out of order")
    lengths: np.ndarray = ends - begins
    return lengths


def _name_of(place: Location) -> str:
    return os.path.basename(place if isinstance(place, str) else place.info.name)


def _beside(source: InputFile, ending: str) -> Location | None:
    """Return the file with this ending beside a file of ids; None if it is missing."""
    names = (n for n in names_beside(_name_of(source.path)) if n.lower().endswith(ending))
    found = (beside(source.path, name) for name in names)
    return next((each for each in found if each), None)


def _cut(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
    """Yield rows with about `shard_bytes` of ids. A damaged file becomes a part without ids, to be
    rejected when it is read."""
    try:
        yield from [*_parts(_opened(source), shard_bytes)]
    except ConfigError:
        raise
    except (OSError, ValueError):
        yield FilePart(source=source, stop=0, weight_bytes=source.text_bytes)


def _parts(tokens: _Tokens, shard_bytes: int) -> Iterator[FilePart]:
    width = tokens.dtype.itemsize
    wanted = max(shard_bytes // width, 1) if tokens.can_cut else tokens.num_ids
    start = first = at = row = 0
    good = bad = example = 0
    """Rows that end with the end token, others, and the first of the others."""

    def part(stop: int) -> FilePart:
        size = (stop - start) * width
        return FilePart(
            source=tokens.source, start=start, stop=stop, first_record=first, weight_bytes=size
        )

    for lengths in tokens.rows(0, 0, tokens.num_ids):
        ends = at + np.cumsum(lengths)
        is_end = _has_end_token(tokens, ends)
        if not is_end.all() and not bad:
            example = row + int(np.argmin(is_end))
        good, bad = good + int(is_end.sum()), bad + int((~is_end).sum())
        while ends[-1] - start > wanted:
            place = int(np.searchsorted(ends, start + wanted, "right")) - 1
            if place < 0 or ends[place] <= start:  # a row that is longer
                place = int(np.searchsorted(ends, start, "right"))
            stop = int(ends[place])
            yield part(stop)
            start, first = stop, row + int(np.searchsorted(ends, stop)) + 1
        at, row = int(ends[-1]), row + len(lengths)
    if start < at:
        yield part(at)
    if good > bad > 0:
        _log.warning(
            "%s: %s rows end with the end token, and %s do not, like row %s. Does the index belong "
            "to the file?",
            *(tokens.source.name, f"{good:,}", f"{bad:,}", f"{example:,}"),
        )
    elif not tokens.has_index and row == 1 and tokens.source.ids:
        _log.warning(
            "%s: has no end token (id %s) before its end, so all ids are one row. Check "
            "`--tokenizer` and `--end-token`.",
            *(tokens.source.name, tokens.source.ids.end_id),
        )


def _has_end_token(tokens: _Tokens, ends: np.ndarray) -> np.ndarray:
    """Return which rows of a file on this machine end with the end token; True for other files."""
    path, end_id = tokens.source.path, tokens.source.ids and tokens.source.ids.end_id
    if not tokens.has_index or end_id is None or not isinstance(path, str):
        return np.ones(len(ends), bool)
    ids = np.memmap(path, tokens.dtype, "r", tokens.first_byte, (tokens.num_ids,))
    is_end: np.ndarray = ids[np.maximum(ends, 1) - 1] == end_id
    return is_end


def _read(part: FilePart, fields: Fields) -> Iterator[Records]:
    if problem := column_problem(_SCHEMA, fields):
        if not part.start:  # once for the file
            yield rejected(part.first_record, fields, problem)
        return
    tokens = _opened(part.source)
    if part.stop == 0:
        for _ in tokens.rows(0, 0, tokens.num_ids):
            pass  # raises the error that `_cut` met
    stop = tokens.num_ids if part.stop is None else part.stop
    row, at, width = part.first_record, part.start, tokens.dtype.itemsize
    most = part.source.max_record_bytes // width
    for lengths in tokens.rows(row, at, stop):
        ends = np.cumsum(lengths)
        begins, long = ends - lengths, np.append(np.flatnonzero(lengths > most), len(lengths))
        done = 0
        while done < len(lengths):
            before, next_long = int(begins[done]), int(long[np.searchsorted(long, done)])
            some = int(np.searchsorted(ends, before + _CHUNK_IDS)) + 1 - done
            some = max(min(some, next_long - done), 1)
            count = int(ends[done + some - 1]) - before
            if done == next_long:
                reason = f"field `input_ids` {too_long(count * width, most * width)}"
                yield replace(rejected(row, fields, reason), weight_bytes=count * width)
            else:
                place = tokens.first_byte + at * width
                ids = read_array(part.source.path, tokens.dtype, place, count)
                rows = Ragged(ids, lengths[done : done + some])
                numbers = np.arange(row, row + some, dtype=np.uint64)
                yield Records(numbers, dict.fromkeys(fields, rows), weight_bytes=count * width)
            row, at, done = row + some, at + count, done + some


TOKENS = Format(name="tokens", endings=(), read=_read, cut=_cut)
