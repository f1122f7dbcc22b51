"""`shards adopt FILE... OUT --tokenizer T`: make a data set of flat token files, in place.

The tokens stay in their files: each shard is a stitched file, which the loader reads like any
other. One pass reads every token once, to find the ends of rows, to compare ids with the
vocabulary, and to write the checksum of each record batch. So a file that changes later is detected
when it is read.
"""

import fnmatch
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import ipc

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
    REJECTS_FILE,
    SOURCES_FILE,
    TOKENIZER_FILE,
    FileInfo,
    Manifest,
    RecordCounts,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    length_histogram,
)
from tokenfeed.pipeline.format.rows import Rows, record_batch
from tokenfeed.pipeline.format.schema import (
    FORMAT_VERSION,
    INPUT_IDS,
    ORIGIN_FILE,
    ORIGIN_RECORD,
    shard_schema,
    token_dtype,
)
from tokenfeed.pipeline.format.shard import (
    BATCH_ROWS,
    BATCH_TOKENS,
    FIRST_ROW_KEY,
    SEAL_KEY,
    UNSEALED,
    batch_checksums,
    shard_metadata,
)
from tokenfeed.pipeline.format.stitched import STITCHED_SUFFIX, OtherFile, write_stitched
from tokenfeed.pipeline.format.storage import atomic_file
from tokenfeed.pipeline.format.store import LocalStore, local_path, open_store
from tokenfeed.tools.data_sets.inspection import describe
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.jobs.crew import Progress
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.jobs.run_records import claimed
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

__all__ = ["Adopt", "adopt"]

SHARD_TOKENS = 1 << 26
CHUNK_TOKENS = 1 << 22
CHUNK_ROWS = 1 << 20
_LINES, _LONGEST_LINE = 1 << 14, 1 << 12
_SPLIT = re.compile(r"\w[\w-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt:
    """Make a data set of the flat token files of Megatron, nanoGPT, llm.c, OLMo or datatrove,
    without copying the tokens."""

    paths: tuple[Annotated[str, text("FILE... OUT")], ...]
    """Files with tokens (.bin, .npy, .ds); then a new or empty folder for the data set. The files
    must stay where they are."""
    tokenizer: Annotated[str, text("FILE|FOLDER|HUB-ID")] | None = None
    """The tokenizer that made the ids: required."""
    split: tuple[Annotated[str, text("NAME=GLOB")], ...] = ()
    """Put the files whose names match GLOB into the split NAME. Default: val.bin and files named
    like `validation` or `val` into `validation`, the others into `train`."""
    end_token: Annotated[str, text("TOKEN")] | None = None
    """Token that ends each document, in formats without an index. Default: found by its usual
    names."""
    json: bool = False
    """Print the manifest as JSON."""

    def run(self) -> int:
        """Adopt the files."""
        if len(self.paths) < 2 or not self.tokenizer:
            raise ConfigError(
                "expected FILE... OUT and `--tokenizer`, like `shards adopt train.bin out/ "
                "--tokenizer gpt2`."
            )
        tokenizer = TextTokenizer.load(
            fetch_tokenizer_json(self.tokenizer), origin=self.tokenizer, end_token=self.end_token
        )
        parted = (given.partition("=") for given in self.split)
        splits = tuple((name, glob) for name, _, glob in parted)
        manifest = adopt(self.paths[:-1], local_path(self.paths[-1]), tokenizer, splits)
        if self.json:
            print_json(manifest.content() | {"fingerprint": manifest.fingerprint})
        else:
            print(describe(open_store(self.paths[-1]), manifest))
        return 0


class _Flat(NamedTuple):
    """A file of token ids, one after the other."""

    name: str
    """As the user gave it."""
    path: str
    """Absolute."""
    bytes: int
    dtype: np.dtype
    first: int
    """Where the ids begin, in bytes."""
    tokens: int
    lengths: Callable[[], Iterator[np.ndarray]]
    """Yields the tokens of each row, some rows at a time, int64."""

    @property
    def weight_bytes(self) -> int:
        """What it counts in the progress."""
        return self.bytes

    def ids(self) -> np.ndarray:
        """Return all ids, mapped into memory."""
        return np.memmap(self.path, self.dtype, "r", self.first, (self.tokens,))


def adopt(
    paths: tuple[str, ...],
    out: Path,
    tokenizer: TextTokenizer,
    splits: tuple[tuple[str, str], ...] = (),
) -> Manifest:
    """Make a data set of flat token files.

    Args:
        paths: The files.
        out: A new or empty folder.
        tokenizer: What made the ids.
        splits: Splits, each with the pattern of its files; the first that matches counts.

    Raises:
        ConfigError: A file is of no known format, or the folder holds something.
        CorpusError: A file is damaged, or an id is not in the vocabulary.
    """
    files = [_opened(path, tokenizer) for path in paths]
    if wrong := [name for name, glob in splits if not (_SPLIT.fullmatch(name) and glob)]:
        raise ConfigError(f"`--split {wrong[0]}`: expected NAME=GLOB, like validation='*_val*'.")
    of_split: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        of_split.setdefault(_split_of(file.name, splits), []).append(number)
    output = LocalStore.from_path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty. Give a new or empty folder.")
    with claimed(output, {"shards adopt": [*paths]}), Bar(files) as bar:
        output.write(TOKENIZER_FILE, tokenizer.json_bytes)
        counts = [[0, 0] for _ in files]
        infos: dict[str, SplitInfo] = {}
        for split, numbers in sorted({"train": [], **of_split}.items()):
            shards: list[ShardInfo] = []
            histogram = length_histogram(np.empty(0))
            for number in numbers:
                for part in _shards(files[number]):
                    writer = _Stitcher(f"{split}/{len(shards):05d}.arrow", tokenizer, number)
                    shards.append(writer.write(output, files[number], part))
                    histogram += length_histogram(part.lengths)
                    counts[number][0] += len(part.lengths)
                    counts[number][1] += part.empty
                    num_tokens = int(part.lengths.sum())
                    share = num_tokens / max(files[number].tokens, 1)
                    bar.advance(Progress(files[number].bytes * share, num_tokens))
                bar.count_unit()
            infos[split] = SplitInfo(
                shards=tuple(shards), length_histogram=tuple(histogram.tolist())
            )
        return _manifest(output, files, counts, infos, tokenizer)


def _manifest(
    output: LocalStore,
    files: list[_Flat],
    counts: list[list[int]],
    splits: dict[str, SplitInfo],
    tokenizer: TextTokenizer,
) -> Manifest:
    ledgers = [
        {"path": file.name, "bytes": 0, "read": sum(count), "written": count[0], "empty": count[1]}
        | {"rejected": 0}
        for file, count in zip(files, counts, strict=True)
    ]
    sources = "".join(json.dumps(ledger) + "\n" for ledger in ledgers).encode()
    for name, content in ((SOURCES_FILE, sources), (REJECTS_FILE, b"")):
        output.write(name, content)
    written, empty = np.sum(counts, axis=0).tolist()
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        task="lm",
        columns=(),
        label_names=(),
        tokenizer=TokenizerInfo(
            file=TOKENIZER_FILE,
            bytes=len(tokenizer.json_bytes),
            xxh3=tokenizer.xxh3,
            vocabulary_size=tokenizer.vocabulary_size,
            end_id=tokenizer.end_id,
            pad_id=tokenizer.pad_id,
            engine="adopted",
            engine_version="",
            audited=0,
            differences=0,
            special_tokens_in_text="plain",
            special_tokens_added=False,
        ),
        splits=splits,
        ledger=RecordCounts(
            files=len(files),
            bytes=0,
            read=written + empty,
            written=written,
            empty=empty,
            rejected=0,
        ),
        sources=_info(SOURCES_FILE, sources),
        rejects=_info(REJECTS_FILE, b""),
    )
    output.write(MANIFEST_FILE, manifest.encoded())
    return manifest


def _info(name: str, content: bytes) -> FileInfo:
    return FileInfo(file=name, bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))


class _Part(NamedTuple):
    """Rows of a file that become a shard."""

    first_token: int
    first_row: int
    """Number of the first row in the file, empty rows included."""
    lengths: np.ndarray
    """Tokens of each row that has some, int64."""
    numbers: np.ndarray
    """Number of each of these rows in the file."""
    empty: int
    """Rows without tokens."""


def _shards(file: _Flat) -> Iterator[_Part]:
    """Yield the rows of each shard."""
    token = row = num_tokens = 0
    pending: list[np.ndarray] = []
    for lengths in _within(file):
        while len(lengths):
            ends = num_tokens + np.cumsum(lengths)
            stop = int(np.searchsorted(ends, SHARD_TOKENS)) + 1
            pending.append(lengths[:stop])
            num_tokens = int(ends[min(stop, len(ends)) - 1])
            lengths = lengths[stop:]
            if num_tokens >= SHARD_TOKENS:
                yield _part(token, row, pending)
                token, row = token + num_tokens, row + sum(map(len, pending))
                pending, num_tokens = [], 0
    if num_tokens:
        yield _part(token, row, pending)


def _within(file: _Flat) -> Iterator[np.ndarray]:
    """Yield the tokens of each row, some rows at a time, and check that they fill the file.

    Raises:
        CorpusError: The index is of another file.
    """
    total = 0
    for lengths in file.lengths():
        total += sum(lengths.tolist())  # a sum of int64 could overflow
        if total > file.tokens:
            break
        yield lengths
    if total != file.tokens:
        more = " or more" if total > file.tokens else ""
        raise CorpusError(
            f"{file.name}: the index has rows of {total:,} tokens{more}, the file has "
            f"{file.tokens:,}. Use the index that belongs to the file."
        )


def _part(first_token: int, first_row: int, pending: list[np.ndarray]) -> _Part:
    lengths = np.concatenate(pending)
    numbers = np.flatnonzero(lengths)
    empty = len(lengths) - len(numbers)
    return _Part(first_token, first_row, lengths[numbers], first_row + numbers, empty)


class _Stitcher:
    """Writes a shard of which the tokens stay where they are.

    Arrow writes the shard into `write`, which keeps all bytes but those of the tokens.
    """

    def __init__(self, name: str, tokenizer: TextTokenizer, source: int) -> None:
        self._name, self._source = name, source
        self._vocabulary_size = tokenizer.vocabulary_size
        self._dtype = token_dtype(self._vocabulary_size)
        self._own = io.BytesIO()
        self._pieces: list[tuple[int, int, int]] = []
        self._size = 0
        self._expected: tuple[bytes, int] | None = None
        """The ids of the present record batch, and where they are in the other file."""

    def write(self, output: LocalStore, file: _Flat, part: _Part) -> ShardInfo:
        """Write the stitched file of some rows, and return what the manifest says about it.

        Raises:
            CorpusError: An id is not in the vocabulary.
        """
        schema = shard_schema(self._vocabulary_size, ())
        described = schema.with_metadata(
            shard_metadata(self._name, self._vocabulary_size) | {SEAL_KEY: UNSEALED}
        )
        seal, ids = xxhash.xxh3_64(), file.ids()
        ends = np.cumsum(part.lengths)
        with ipc.new_file(pa.PythonFile(_Sink(self._write), "w"), described) as writer:
            row = batches = 0
            while row < len(ends):
                before = int(ends[row - 1]) if row else 0
                stop = int(np.searchsorted(ends, before + BATCH_TOKENS)) + 1
                stop = min(stop, row + BATCH_ROWS, len(ends))
                first = part.first_token + before
                taken = ids[first : part.first_token + int(ends[stop - 1])]
                batch, buffers = self._batch(file, first, taken, part, slice(row, stop), schema)
                checksums = batch_checksums(self._name, batches, row, buffers)
                place = file.first + first * file.dtype.itemsize
                self._expected = buffers[INPUT_IDS].tobytes(), place
                writer.write_batch(batch, custom_metadata={FIRST_ROW_KEY: str(row)} | checksums)
                assert self._expected is None
                seal.update(b"".join(checksums.values()))
                row, batches = stop, batches + 1
        own = self._own.getvalue().replace(UNSEALED.encode(), seal.hexdigest().encode())
        path = output.folder / f"{self._name}{STITCHED_SUFFIX}"
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as stitched:
            pieces = np.array(self._pieces, np.int64)
            others = (OtherFile(file.path, file.bytes),)
            write_stitched(stitched, others, pieces, self._size, own)
        return ShardInfo(
            file=self._name,
            bytes=self._size,
            xxh3=_checksum(output, self._name, self._size),
            rows=len(ends),
            tokens=int(ends[-1]),
            batches=batches,
            longest_row=int(part.lengths.max()),
            seal=seal.hexdigest(),
        )

    def _batch(
        self,
        file: _Flat,
        first: int,
        ids: np.ndarray,
        part: _Part,
        rows: slice,
        schema: pa.Schema,
    ) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
        wrong = (ids < 0) | (ids >= self._vocabulary_size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise CorpusError(
                f"{file.name}, token {first + at:,}: has the id {int(ids[at]):,}, and the "
                f"tokenizer has {self._vocabulary_size:,} ids. Give the tokenizer that made it."
            )
        lengths = part.lengths[rows]
        origin: dict[str, np.ndarray] = {
            ORIGIN_FILE: np.full(len(lengths), self._source, np.uint32),
            ORIGIN_RECORD: part.numbers[rows].astype(np.uint64),
        }
        plain = np.ascontiguousarray(ids).view(self._dtype)
        return record_batch(Rows(lengths, {INPUT_IDS: plain}, origin), schema)

    def _write(self, data: bytes) -> None:
        """Take the next bytes of the shard."""
        place, file = self._own.tell(), -1
        if self._expected and data == self._expected[0]:
            (_, place), file = self._expected, 0
            self._expected = None
        else:
            self._own.write(data)
        if not (self._pieces and file == self._pieces[-1][1] == -1):
            self._pieces.append((self._size, file, place))
        self._size += len(data)


class _Sink(io.RawIOBase):
    """Passes on what is written."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        self._write(bytes(data))
        self._position += len(data)
        return len(data)


def _checksum(store: LocalStore, name: str, size: int) -> str:
    digest = xxhash.xxh3_64()
    with store.open(name, size) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _split_of(name: str, splits: tuple[tuple[str, str], ...]) -> str:
    for split, pattern in splits:
        if any(fnmatch.fnmatchcase(each, pattern) for each in (name, Path(name).name)):
            return split
    words = Path(name).stem.lower().replace("-", "_").split("_")
    return "validation" if {"val", "valid", "validation"} & set(words) else "train"


def _opened(name: str, tokenizer: TextTokenizer) -> _Flat:
    """Recognize the format of a file by its name, its header and the files beside it."""
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: is not a file. Give the files with tokens: .bin, .npy or .ds.")
    if path.suffix == ".idx":
        raise ConfigError(f"{name}: is an index. Give the file beside it, {path.stem}.bin.")
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return _megatron(name, path)
    if path.suffix == ".bin":
        header = np.fromfile(path, "<i4", 256)
        if len(header) == 256 and (header[0], header[1]) in _LLM_C:
            dtype = np.dtype(_LLM_C[header[0], header[1]])
            return _flat(name, path, dtype, _by_end(tokenizer), first=1024, tokens=int(header[2]))
        return _flat(name, path, np.dtype("<u2"), _by_end(tokenizer))
    if path.suffix == ".ds":
        return _datatrove(name, path)
    if path.suffix == ".npy":
        dtype, rows = token_dtype(tokenizer.vocabulary_size), path.with_suffix(".csv.gz")
        return _flat(name, path, dtype, _by_csv(rows) if rows.is_file() else _by_end(tokenizer))
    raise ConfigError(
        f"{name}: of no known format. Known are .bin (with .idx: Megatron; else nanoGPT, llm.c), "
        ".npy (OLMo) and .ds (datatrove)."
    )


_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""dtype by magic and version."""
_MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""dtype by its code in an index."""
_Lengths = Callable[[_Flat], Iterator[np.ndarray]]


def _flat(
    name: str,
    path: Path,
    dtype: np.dtype,
    lengths: _Lengths,
    first: int = 0,
    tokens: int | None = None,
) -> _Flat:
    size = path.stat().st_size
    counted, rest = divmod(size - first, dtype.itemsize)
    if rest or not counted or (tokens is not None and tokens != counted):
        expected = f" of {tokens:,}" if tokens is not None else ""
        raise CorpusError(
            f"{name}: has {size:,} bytes, which are no ids{expected} of {dtype.itemsize} bytes each"
            f"{f' after {first} bytes of a header' if first else ''}. Copy it again."
        )
    flat = _Flat(name, str(path.absolute()), size, dtype, first, counted, lambda: lengths(flat))
    return flat


def _megatron(name: str, path: Path) -> _Flat:
    """Read the index of Megatron's `IndexedDataset`, version 1. A row is a document."""
    index = path.with_suffix(".idx")
    with index.open("rb") as file:
        head = file.read(34)
    if head[:17] != b"MMIDIDX\0\0" + (1).to_bytes(8, "little") or len(head) < 34:
        raise CorpusError(f"{index}: is no index of version 1 of Megatron.")
    code = head[17]
    dtype = np.dtype(_MEGATRON.get(code, "u1"))
    sequences, borders = np.frombuffer(head, "<u8", 2, 18).astype(int).tolist()
    size, modes = index.stat().st_size, 34 + 12 * sequences + 8 * borders
    if size not in (modes, modes + sequences) or borders < 1:
        raise CorpusError(f"{index}: has {size:,} bytes, expected {modes:,}. Copy it again.")
    if dtype.itemsize not in (2, 4):
        raise ConfigError(f"{index}: ids of type code {code}; adopted are those of 2 or 4 bytes.")
    if not sequences:
        raise CorpusError(f"{index}: has no rows.")

    def lengths(flat: _Flat) -> Iterator[np.ndarray]:
        of_sequences = np.memmap(index, "<i4", "r", 34, (sequences,))
        pointers = np.memmap(index, "<i8", "r", 34 + 4 * sequences, (sequences,))
        documents = np.memmap(index, "<i8", "r", 34 + 12 * sequences, (borders,))
        if documents[0] != 0 or documents[-1] != sequences:
            raise CorpusError(f"{index}: its documents do not cover its sequences.")
        at = 0
        for start in range(0, borders - 1, CHUNK_ROWS):
            some = np.array(documents[start : start + CHUNK_ROWS + 1])
            if (np.diff(some) < 0).any():
                raise CorpusError(f"{index}: its documents are out of order.")
            ends = np.cumsum(of_sequences[some[0] : some[-1]], dtype=np.int64)
            begins = np.concatenate([[0], ends])
            places = (at + begins[:-1]) * flat.dtype.itemsize
            if (pointers[some[0] : some[-1]] != places).any() or (np.diff(begins) < 0).any():
                raise CorpusError(
                    f"{index}: its sequences do not follow one another in {flat.name}. Merge them "
                    "by Megatron's tools first."
                )
            found: np.ndarray = np.diff(begins[some - some[0]])
            at += int(begins[-1])
            yield found

    return _flat(name, path, dtype, lengths)


def _datatrove(name: str, path: Path) -> _Flat:
    """Read the ends of rows from `.ds.index`, and the size of ids from `.ds.metadata`."""
    index, metadata = (path.with_name(f"{path.name}.{end}") for end in ("index", "metadata"))
    for file in (index, metadata):
        if not file.is_file():
            raise ConfigError(f"{file}: not found. {name} needs it.")
    with metadata.open("rb") as about:
        width = about.readline(1 << 16).strip().rpartition(b"|")[2].decode(errors="replace")
    if width not in ("2", "4"):
        raise CorpusError(f"{metadata}: says ids of {width[:20]!r} bytes, expected 2 or 4.")

    def lengths(flat: _Flat) -> Iterator[np.ndarray]:
        ends = np.fromfile(index, "<u8").astype(np.int64)
        yield _between(ends, str(index))

    return _flat(name, path, np.dtype(f"<u{width}"), lengths)


def _by_csv(path: Path) -> _Lengths:
    """Read the starts and ends of rows from dolma's table."""

    def lengths(flat: _Flat) -> Iterator[np.ndarray]:
        end = 0
        with gzip.open(path, "rb") as file:
            lines = iter(partial(file.readline, _LONGEST_LINE), b"")
            while True:
                try:
                    pairs = [line.split(b",", 2)[:2] for line in islice(lines, _LINES)]
                    starts, ends = np.array(pairs, np.int64).reshape(-1, 2).T
                except (ValueError, OverflowError, OSError, EOFError, zlib.error) as error:
                    raise CorpusError(f"{path}: is damaged: {error}. Copy it again.") from None
                if not pairs:
                    return
                if starts[0] != end or (starts[1:] != ends[:-1]).any():
                    raise CorpusError(f"{path}: its rows do not follow one another in {flat.name}.")
                yield _between(ends, str(path), end)
                end = int(ends[-1])

    return lengths


def _between(ends: np.ndarray, index: str, begin: int = 0) -> np.ndarray:
    lengths: np.ndarray = np.diff(ends, prepend=begin)
    if (lengths < 0).any():
        raise CorpusError(f"{index}: its rows are out of order. Copy it again.")
    return lengths


def _by_end(tokenizer: TextTokenizer) -> _Lengths:
    """Find the rows of a file without an index: each ends with the end token."""

    def lengths(flat: _Flat) -> Iterator[np.ndarray]:
        if tokenizer.end_id is None:
            raise ConfigError(
                f"{flat.name}: has no index, and the tokenizer no end token that ends a document. "
                "Name it by `--end-token`."
            )
        ids, begin = flat.ids(), 0
        for start in range(0, flat.tokens, CHUNK_TOKENS):
            chunk = ids[start : start + CHUNK_TOKENS]
            ends = start + np.flatnonzero(chunk == tokenizer.end_id) + 1
            if len(ends):
                yield np.diff(ends, prepend=begin)
                begin = int(ends[-1])
        if begin < flat.tokens:
            yield np.array([flat.tokens - begin])

    return lengths
