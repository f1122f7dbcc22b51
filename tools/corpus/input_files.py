"""Input files at the start of a run, parts of these files, and the interface of their formats."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import xxhash

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.format.storage import open_regular
from tokenfeed.tools.corpus.blocks import Compression, TextBlocks
from tokenfeed.tools.corpus.locations import PUT_BACK, Location, RemoteFile, names_beside
from tokenfeed.tools.corpus.records import Fields, Records

STANDARD_INPUT = "-"
MAX_RECORD_BYTES = 64_000_000
"""The default of `--max-record`."""


_FIXED_UNTIL_NS = 631_152_000 * 10**9
"""1990. Archives and images of containers set earlier times, which do not change with a file."""
_END_BYTES = 1 << 16


def size_and_state(path: str) -> tuple[int, int]:
    """Return the bytes and the modification time of a file of this machine.

    The times of files that it needs beside it are added, and, if the time says nothing, a checksum
    of the file's beginning and end.

    Raises:
        OSError: The file cannot be read.
    """
    found = os.stat(path)
    state = found.st_mtime_ns
    if state < _FIXED_UNTIL_NS:
        with open_regular(path) as file:
            beginning = file.read(_END_BYTES)
            file.seek(max(0, found.st_size - _END_BYTES))
            state += xxhash.xxh3_64_intdigest(beginning + file.read(_END_BYTES)) >> 2
    for each in names_beside(path):
        with suppress(OSError):
            state += os.stat(each).st_mtime_ns
    return found.st_size, state


class IdFacts(NamedTuple):
    """What a file of token ids does not say itself."""

    dtype: str
    """Of the ids of the tokenizer, for files without a header."""
    end_id: int | None
    """The end token of the tokenizer, for files without an index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """An input file at the start of the run."""

    index: int
    """Line of the file in sources.jsonl, counted from 0."""
    name: str
    """Path from the command line, or below it."""
    path: Location
    """The place to read the file. Spooled input has another name."""
    bytes: int
    text_bytes: int
    """Expected bytes of text. A compressed file has more than `bytes`."""
    state: int | str
    """A value that changes with the file: the time of `size_and_state`, the version in a store, the
    commit of a data set of the Hub, or the checksum of spooled input."""
    format: str
    """Name of the format in the registry."""
    compression: Compression | None
    max_record_bytes: int = MAX_RECORD_BYTES
    """Longer records are rejected."""
    encoding: str | None = None
    """The encoding of text that is not UTF-8, from `--encoding`."""
    split: str | None = None
    """The split of all records. None: a hash chooses the split of each record."""
    is_spooled: bool = False
    """Whether the file is a temporary copy of standard input or of Python objects."""
    ids: IdFacts | None = None
    """For files of token ids; None for other tasks than `ids`."""
    class_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """See `Spooled.class_names`."""

    def check_unchanged(self) -> None:
        """Check that the file has not changed since the start of the run.

        Raises:
            CorpusError: The file is missing or changed. A part of it may already be in a shard.
        """
        if self.is_spooled or isinstance(self.path, RemoteFile):
            return  # of an object each answer is compared
        try:
            now_bytes, now_state = size_and_state(self.path)
        except FileNotFoundError:
            raise CorpusError(
                f"{self.name}: vanished while the corpus was read. {PUT_BACK}"
            ) from None
        is_commit = isinstance(self.state, str)  # of the Hub; the file is a copy in a cache
        if now_bytes != self.bytes or not (is_commit or now_state == self.state):
            raise CorpusError(f"{self.name}: changed while the corpus was read. {PUT_BACK}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """Consecutive records of one input file."""

    source: InputFile
    start: int = 0
    """First byte, row group or record batch, depending on the format."""
    stop: int | None = None
    """End of the range, exclusive; None: the end of the file."""
    first_record: int = 0
    weight_bytes: int
    """Expected bytes of text, for the division of work and for progress."""

    def text_blocks(self) -> TextBlocks:
        """Return the text of the part as UTF-8. `start` and `stop` must be bytes."""
        source = self.source
        return TextBlocks(source.path, source.compression, self.start, self.stop, source.encoding)

    def weight_of(self, consumed_bytes: int) -> float:
        """Return the share of the weight for a number of bytes of the file."""
        part_bytes = self.source.bytes if self.stop is None else self.stop - self.start
        return self.weight_bytes * consumed_bytes / max(part_bytes, 1)


def whole(source: InputFile, shard_bytes: int) -> Iterator[FilePart]:
    """Yield the file as one part, for formats that cannot be read from the middle."""
    yield FilePart(source=source, weight_bytes=source.text_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of input files. Workers receive only its name."""

    name: str
    endings: tuple[str, ...]
    """Endings of file names, in lower case."""
    read: Callable[[FilePart, Fields], Iterator[Records]]
    """Reads a part. Raises one of `DAMAGE` if the rest of the part cannot be read."""
    cut: Callable[[InputFile, int], Iterator[FilePart]] = whole
    """Cuts a file into parts with about a number of bytes of text, the same parts in every run."""
    cut_at_once: int = 1
    """Number of objects in a store that are cut at the same time."""
    begins: Callable[[bytes, str], bool] | None = None
    """Returns whether a file with this beginning has the format: a record has the field, or no
    other format fits. None: only the ending of a name decides."""
    is_vague: bool = False
    """Whether files with these endings may have another format, so the content decides."""
    schema: Callable[[Location], pa.Schema] | None = None
    """Returns the schema of a table. Raises the errors of `OpenTable`."""
    text_ratio: int = 1
    """Estimated bytes of text per byte of the file, for the division of work."""
    is_text: bool = False
    """Whether files are text, which may be compressed (.gz and others) and have any `--encoding`.
    `read` must then use `FilePart.text_blocks`."""
    has_record_per_line: bool = False
    """Whether the number of a record is the number of its line, with blank lines counted."""
