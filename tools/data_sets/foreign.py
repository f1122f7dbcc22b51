"""Token files of other projects: Megatron, nanoGPT, llm.c, OLMo and datatrove.

A file is on this machine or in a store. Its format is recognized by its name, its header and the
files beside it. Indexes and ids are read in pieces, so memory stays small.
"""

import gzip
import io
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.lib.format import (
    MAGIC_PREFIX,
    read_array_header_1_0,
    read_array_header_2_0,
    read_magic,
)

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.format.schema import token_dtype
from tokenfeed.pipeline.format.store import local_path, open_store
from tokenfeed.pipeline.remote.address import object_address
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.pipeline.text import public
from tokenfeed.tools.corpus.locations import Location, RemoteFile, open_location, read_array
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

CHUNK_TOKENS = 1 << 22
CHUNK_ROWS = 1 << 20
_LINES, _LONGEST_LINE = 1 << 14, 1 << 12
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ForeignFile:
    """A file on this machine or in a store."""

    path: str
    """Absolute path or address."""
    name: str
    """As messages show it."""
    place: Location
    size: int
    """In bytes."""

    @classmethod
    def of(cls, path: str) -> "_ForeignFile | None":
        """Return the file at a path or an address; None if it is missing.

        Raises:
            ConfigError: The address has a query, which may be a secret, or there is no such store.
                Or the path is not UTF-8.
        """
        if "://" not in path:
            absolute = str(local_path(path).absolute())
            if not os.path.isfile(absolute):
                return None
            if os.fsencode(absolute).decode(errors="replace") != absolute:
                raise ConfigError(f"{path!a}: its name is not UTF-8. Rename the file.")
            return cls(absolute, path, absolute, os.path.getsize(absolute))
        if public(path) != path:
            raise ConfigError(
                f"{public(path)}: the data set stores the address, so it may not have a user, a "
                "password or a query. Use keys in the environment, or copy the file."
            )
        folder, key = object_address(path)
        store = open_store(folder) if folder else None
        if not isinstance(store, ObjectStore):
            raise ConfigError(f"{path}: is not a file in a bucket or on a web server.")
        try:
            info = store.head(key)
        except FileNotFoundError:
            return None
        return cls(path, path, RemoteFile(store, info), info.size)

    @property
    def real_path(self) -> str:
        """Return the path without symbolic links, or the address."""
        return os.path.realpath(self.path) if isinstance(self.place, str) else self.path

    def beside(self, old: str, new: str) -> "_ForeignFile | None":
        """Return the file whose name ends with `new` instead of `old`; None if it is missing."""
        found = _ForeignFile.of(self.path.removesuffix(old) + new)
        return found and replace(found, name=self.name.removesuffix(old) + new)

    def open(self) -> BinaryIO:
        """Open the file, to read any part of it."""
        return open_location(self.place)

    def read(self, start: int, length: int) -> bytes:
        """Return some bytes; fewer at the end of the file."""
        with self.open() as file:
            file.seek(start)
            return file.read(length)

    def array(self, dtype: "np.dtype | str", start: int, count: int) -> np.ndarray:
        """Return an array that begins at a byte.

        Raises:
            CorpusError: The file was cut short.
        """
        try:
            return read_array(self.place, dtype, start, count)
        except ValueError:
            raise CorpusError(f"{self.name}: was cut short. Copy it again.") from None


Lengths = Callable[["TokenFile"], Iterator[np.ndarray]]


class TokenFile(NamedTuple):
    """A file that contains token ids, one after another, without gaps."""

    file: _ForeignFile
    dtype: np.dtype
    first: int
    """Where the ids begin, in bytes."""
    tokens: int
    end_id: int | None
    """The end token of the tokenizer."""
    by_index: Lengths | None
    """Yields the tokens of each row, some rows at a time, int64. None: rows end with `end_id`."""

    @property
    def name(self) -> str:
        """The file as the user gave it."""
        return self.file.name

    def ids(self, start: int, count: int) -> np.ndarray:
        """Return some ids."""
        return self.file.array(self.dtype, self.first + start * self.dtype.itemsize, count)

    def lengths(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each row, some rows at a time, int64. They fill the file.

        Raises:
            CorpusError: The index is damaged, or belongs to another file.
        """
        total = 0
        for lengths in self.by_index(self) if self.by_index else _by_end(self):
            total += sum(lengths.tolist())  # a sum of int64 could overflow
            if total > self.tokens:
                break
            yield lengths
        if total != self.tokens:
            more = " or more" if total > self.tokens else ""
            raise CorpusError(
                f"{self.name}: the index has rows of {total:,} tokens{more}, the file has "
                f"{self.tokens:,}. Use the index that belongs to the file."
            )


def open_tokens(name: str, tokenizer: TextTokenizer) -> TokenFile:
    """Open a file of token ids, and recognize its format.

    Raises:
        ConfigError: The file is missing or of no known format, or its ids have another size than
            those of the tokenizer.
        CorpusError: The file or its index is damaged.
    """
    found = _opened(name, tokenizer)
    expected = token_dtype(tokenizer.vocabulary_size).itemsize
    if found.dtype.itemsize != expected:
        raise ConfigError(
            f"{name}: has ids of {found.dtype.itemsize} bytes, and a data set with "
            f"{tokenizer.vocabulary_size:,} ids has {expected} bytes each. Check `--tokenizer`. "
            "Ids of another size cannot stay in place."
        )
    return found


def _opened(name: str, tokenizer: TextTokenizer) -> TokenFile:
    file, suffix = _ForeignFile.of(name), Path(name).suffix
    if file is None:
        raise ConfigError(f"{name}: is not a file. Give the files with tokens: .bin, .npy or .ds.")
    flat = partial(_flat, file, end_id=tokenizer.end_id)
    if suffix == ".idx":
        raise ConfigError(f"{name}: is an index. Give the file beside it, {Path(name).stem}.bin.")
    if suffix == ".bin" and (index := file.beside(".bin", ".idx")):
        return flat(*_megatron(index))
    if suffix == ".bin":
        header = file.array("<i4", 0, 256).tolist() if file.size >= 1024 else [0]
        if dtype := _LLM_C.get(tuple(header[:2])):
            return flat(dtype, None, first=1024, tokens=header[2])
        if file.size >= 1024 and not any(header[3:]):
            raise CorpusError(f"{name}: begins with an unknown header. Copy it again.")
        _refuse_four_bytes(file)
        return flat("<u2", None)
    if suffix == ".ds":
        return flat(*_datatrove(file))
    if suffix == ".npy":
        table = file.beside(".npy", ".csv.gz")
        by_index = partial(_by_csv, table) if table else None
        if file.read(0, len(MAGIC_PREFIX)) == MAGIC_PREFIX:
            values, first = _numpy_header(file)
            return flat(values, by_index, first=first)
        own = token_dtype(tokenizer.vocabulary_size)
        if own == np.uint16:
            _refuse_four_bytes(file)
        return flat(own, by_index)
    raise ConfigError(
        f"{name}: of no known format. Known are .bin (with .idx: Megatron; else nanoGPT, llm.c), "
        ".npy (OLMo) and .ds (datatrove). For texts, use `pretokenize`."
    )


_LLM_C: dict[tuple[int, ...], str] = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""dtype by magic and version."""
_MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""dtype by its code in an index."""


def _refuse_four_bytes(file: _ForeignFile) -> None:
    """Reject a file that does not say how long ids are, if every second id of two bytes is 0.

    Raises:
        CorpusError: The ids have four bytes.
    """
    ids = file.array("<u2", 0, min(file.size // 2, CHUNK_TOKENS))
    if len(ids) >= 16 and not ids[1::2].any():
        raise CorpusError(
            f"{file.name}: every second id of two bytes is 0, so the ids have four bytes. If it "
            "is of Megatron, put its .idx beside it. Else write the ids again as uint16."
        )


def _numpy_header(file: _ForeignFile) -> tuple[np.dtype, int]:
    """Return the dtype in the header of a file of `numpy.save`, and where the ids begin."""
    head = io.BytesIO(file.read(0, 1 << 16))
    try:
        read = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}[read_magic(head)]
        shape, _, dtype = read(head)
    except (ValueError, KeyError, SyntaxError) as error:
        raise CorpusError(f"{file.name}: has a damaged header of numpy: {error}.") from None
    counted = (file.size - head.tell()) // max(dtype.itemsize, 1)
    if len(shape) != 1 or dtype.kind not in "iu" or not dtype.isnative or shape[0] != counted:
        raise CorpusError(
            f"{file.name}: has {counted:,} values and a header that says {dtype} of the shape "
            f"{shape}, expected whole numbers of one dimension."
        )
    return dtype, head.tell()


def _flat(
    file: _ForeignFile,
    dtype: "np.dtype | str",
    by_index: Lengths | None,
    *,
    end_id: int | None,
    first: int = 0,
    tokens: int | None = None,
) -> TokenFile:
    dtype = np.dtype(dtype)
    counted, rest = divmod(file.size - first, dtype.itemsize)
    if rest or not counted or (tokens is not None and tokens != counted):
        expected = f" of {tokens:,}" if tokens is not None else ""
        raise CorpusError(
            f"{file.name}: has {file.size:,} bytes, which are no ids{expected} of "
            f"{dtype.itemsize} bytes each{f' after {first} bytes of a header' if first else ''}. "
            "Copy it again."
        )
    return TokenFile(file, dtype, first, counted, end_id, by_index)


class _MegatronColumns(NamedTuple):
    """Where an index of Megatron has its columns, in bytes. A document has some sequences."""

    sequences: int
    """Number of sequences."""
    borders: int
    """Number of documents + 1."""
    sizes: int
    """Tokens of each sequence, int32."""
    places: int
    """The beginning of each sequence in bytes, int64."""
    documents: int
    """The first sequence of each document, and the end, int64."""


def _megatron(index: _ForeignFile) -> tuple[np.dtype, Lengths]:
    """Read an index of Megatron's `IndexedDataset`, once called `mmap`. A row is a document."""
    head, version = index.read(0, 34), (1).to_bytes(8, "little")
    if not head.startswith(b"MMIDIDX\0\0" + version) or len(head) < 34:
        raise CorpusError(f"{index.name}: is no index of version 1 of Megatron's IndexedDataset.")
    code = head[17]
    sequences, borders = np.frombuffer(head, "<u8", 2, 18).astype(int).tolist()
    places, documents = 34 + 4 * sequences, 34 + 12 * sequences
    columns = _MegatronColumns(sequences, borders, 34, places, documents)
    dtype, end = np.dtype(_MEGATRON.get(code, "u1")), documents + 8 * borders
    if index.size not in (end, end + sequences) or borders < 1:  # a mode of a byte may follow
        raise CorpusError(
            f"{index.name}: has {index.size:,} bytes, expected {end:,}. Copy it again."
        )
    if dtype.itemsize not in (2, 4):
        raise ConfigError(
            f"{index.name}: ids of type code {code}; adopted are those of 2 or 4 bytes."
        )
    if not sequences:
        raise CorpusError(f"{index.name}: has no rows.")
    return dtype, partial(_by_index, index, columns)


def _by_index(
    index: _ForeignFile, columns: _MegatronColumns, tokens: TokenFile
) -> Iterator[np.ndarray]:
    """Read the rows of Megatron's index."""
    borders, documents = columns.borders, columns.documents
    last = index.array("<i8", documents + 8 * (borders - 1), 1)
    if index.array("<i8", documents, 1) != 0 or last != columns.sequences:
        raise CorpusError(f"{index.name}: its documents do not cover its sequences.")
    at = 0
    for start in range(0, borders - 1, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS + 1, borders)
        some = index.array("<i8", documents + 8 * start, stop - start)
        first, count = int(some[0]), int(some[-1]) - int(some[0])
        if (some[1:] < some[:-1]).any() or first < 0 or first + count > columns.sequences:
            raise CorpusError(f"{index.name}: its documents are out of order.")
        sizes = index.array("<i4", columns.sizes + 4 * first, count)
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = np.concatenate([[0], ends])
        places = (at + begins[:-1]) * tokens.dtype.itemsize
        stored = index.array("<i8", columns.places + 8 * first, count)
        if (stored != places).any() or (np.diff(begins) < 0).any():
            raise CorpusError(
                f"{index.name}: its sequences do not follow one another in {tokens.name}. Merge "
                "them by Megatron's tools first."
            )
        found: np.ndarray = np.diff(begins[some - first])
        at += int(begins[-1])
        yield found


def _datatrove(file: _ForeignFile) -> tuple[str, Lengths]:
    """Read the ends of rows from `.ds.index`, and the size of ids from `.ds.metadata`."""
    index, metadata = file.beside("", ".index"), file.beside("", ".metadata")
    if not index or not metadata:
        missing = "metadata" if index else "index"
        raise ConfigError(f"{file.name}.{missing}: not found. {file.name} needs it.")
    about = metadata.read(0, 1 << 16).splitlines() or [b""]
    width = about[0].strip().rpartition(b"|")[2].decode(errors="replace")
    if width not in ("2", "4"):
        raise CorpusError(f"{metadata.name}: says ids of {width[:20]!r} bytes, expected 2 or 4.")
    if index.size % 8:
        raise CorpusError(f"{index.name}: has {index.size:,} bytes, not 8 a row. Copy it again.")

    def lengths(_: TokenFile) -> Iterator[np.ndarray]:
        end, rows = 0, index.size // 8
        for start in range(0, rows, CHUNK_ROWS):
            ends = index.array("<i8", 8 * start, min(CHUNK_ROWS, rows - start))
            yield _between(ends, index.name, end)
            end = int(ends[-1])

    return f"<u{width}", lengths


def _by_csv(table: _ForeignFile, tokens: TokenFile) -> Iterator[np.ndarray]:
    """Read the starts and ends of rows from dolma's table."""
    end = 0
    with table.open() as opened, gzip.open(opened, "rb") as file:
        lines = iter(partial(file.readline, _LONGEST_LINE), b"")
        while True:
            try:
                pairs = [line.split(b",", 2)[:2] for line in islice(lines, _LINES)]
                starts, ends = np.array(pairs, np.int64).reshape(-1, 2).T
            except (ValueError, OverflowError, OSError, EOFError, zlib.error) as error:
                raise CorpusError(f"{table.name}: is damaged: {error}. Copy it again.") from None
            if not pairs:
                return
            if starts[0] != end or (starts[1:] != ends[:-1]).any():
                raise CorpusError(
                    f"{table.name}: its rows do not follow one another in {tokens.name}."
                )
            yield _between(ends, table.name, end)
            end = int(ends[-1])


def _between(ends: np.ndarray, index: str, begin: int) -> np.ndarray:
    begins = np.append(begin, ends[:-1])
    if (ends < begins).any():  # differences of damaged numbers may overflow
        raise CorpusError(f"{index}: its rows are out of order. Copy it again.")
    lengths: np.ndarray = ends - begins
    return lengths


def _by_end(tokens: TokenFile) -> Iterator[np.ndarray]:
    """Find the rows of a file without an index: each ends with the end token."""
    if tokens.end_id is None:
        raise ConfigError(
            f"{tokens.name}: has no index, and the tokenizer no end token that ends a document. "
            "Name it by `--end-token`."
        )
    begin = 0
    for start in range(0, tokens.tokens, CHUNK_TOKENS):
        chunk = tokens.ids(start, min(CHUNK_TOKENS, tokens.tokens - start))
        ends = start + np.flatnonzero(chunk == tokens.end_id) + 1
        if len(ends):
            yield np.diff(ends, prepend=begin)
            begin = int(ends[-1])
    if not begin:
        _log.warning(
            "%s: has no end token (id %s), so all ids are one row. Check `--tokenizer` and "
            "`--end-token`.",
            *(tokens.name, tokens.end_id),
        )
    if begin < tokens.tokens:
        yield np.array([tokens.tokens - begin])
