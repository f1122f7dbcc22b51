"""Find the input files of a corpus, in an order that depends on their names alone.

A file given by name is always read. In a folder, hidden entries, `__pycache__`, what `--exclude`
names, the output folder and binary files are left out; symbolic links are followed, but a file that
two ways lead to is read once. To tell binary from text, the start of every file is read here.
"""

import fnmatch
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.manifest import MANIFEST_FILE
from tokenfeed.tools.blocks import READ_ERRORS, Compression, read_blocks
from tokenfeed.tools.journal import JOURNAL_FILE
from tokenfeed.tools.tokenizer import TOKENIZER_FILE

__all__ = ["Corpus", "Source", "find_corpus"]

logger = logging.getLogger(__name__)

_SNIFFED_BYTES = 8192
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One input file as it was when the run began."""

    index: int
    """Its line in sources.jsonl, counted from 0."""
    path: str
    """As given on the command line, and below that as found."""
    bytes: int
    modified_ns: int
    kind: Literal["text", "jsonl", "parquet"]
    """By the name's ending; what is neither .jsonl nor .parquet is text: one document."""
    compression: Compression | None

    def check_unchanged(self) -> None:
        """Compare the file with what it was when the run began.

        Raises:
            CorpusError: It is gone or has changed: half of it may already be in a shard.
        """
        remedy = "Put it back, or start again with an empty output folder."
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            raise CorpusError(
                f"{self.path}: vanished while the corpus was read. {remedy}"
            ) from None
        if (now.st_size, now.st_mtime_ns) != (self.bytes, self.modified_ns):
            raise CorpusError(f"{self.path}: changed while the corpus was read. {remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The input files, and how many were left out for being binary."""

    sources: tuple[Source, ...]
    skipped_binary: int


def find_corpus(paths: tuple[Path, ...], *, out: Path, exclude: tuple[str, ...] = ()) -> Corpus:
    """Find every input file below `paths`, in the order of `paths` and then of names.

    Raises:
        CorpusError: A path is missing or cannot be listed, or there is no input file at all.
        ConfigError: A path lies in the output folder.
    """
    search = _Search(os.path.realpath(out), exclude)
    for path in paths:
        search.add(str(path))
    if not search.sources:
        binary = (
            f" ({search.skipped_binary:,} binary files skipped)" if search.skipped_binary else ""
        )
        places = ", ".join(map(str, paths))
        raise CorpusError(
            f"{places}: no input file found{binary}. Point at folders or files of text."
        )
    return Corpus(sources=tuple(search.sources), skipped_binary=search.skipped_binary)


class _Search:
    """One walk over all given paths; remembers where it has been."""

    def __init__(self, out: str, exclude: tuple[str, ...]) -> None:
        self.sources: list[Source] = []
        self.skipped_binary = 0
        self._out = out
        self._exclude = exclude
        self._seen: set[str] = set()

    def add(self, path: str) -> None:
        real = os.path.realpath(path)
        if os.path.commonpath([real, self._out]) == self._out:
            raise ConfigError(f"{path}: is or lies in the output folder. Choose another output.")
        if os.path.isdir(path):
            for found in self._walk(path, path):
                self._add_file(found, explicit=False)
        elif os.path.isfile(path):
            self._add_file(path, explicit=True)
        elif os.path.lexists(path):
            raise CorpusError(f"{path}: is neither a folder nor a regular file.")
        else:
            raise CorpusError(f"{path}: not found. Point at folders or files of text.")

    def _walk(self, folder: str, root: str) -> Iterator[str]:
        real = os.path.realpath(folder)
        if real == self._out or real in self._seen:
            return
        self._seen.add(real)
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise CorpusError(f"{folder}: cannot be listed: {error.strerror}.") from error
        if _is_data_set(names):
            logger.info("%s: left out, it is a data set of pretokenize", folder)
            return
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(".") or name == "__pycache__" or self._excluded(path, root):
                continue
            if os.path.isdir(path):
                yield from self._walk(path, root)
            elif os.path.isfile(path):
                yield path

    def _excluded(self, path: str, root: str) -> bool:
        forms = os.path.basename(path), os.path.relpath(path, root)
        return any(
            fnmatch.fnmatchcase(form, pattern.rstrip("/"))
            for pattern in self._exclude
            for form in forms
        )

    def _add_file(self, path: str, *, explicit: bool) -> None:
        real = os.path.realpath(path)
        if real in self._seen:
            return
        self._seen.add(real)
        source = _source(len(self.sources), path)
        if not explicit and source.kind != "parquet" and _is_binary(source):
            self.skipped_binary += 1
        else:
            self.sources.append(source)


def _is_data_set(names: list[str]) -> bool:
    """Whether a folder of these names is an output of ours: its files are no text to learn."""
    return JOURNAL_FILE in names or {MANIFEST_FILE, TOKENIZER_FILE} <= set(names)


def _source(index: int, path: str) -> Source:
    try:
        status = os.stat(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}.") from error
    stem, ending = os.path.splitext(path.lower())
    compression = _COMPRESSIONS.get(ending)
    inner = os.path.splitext(stem)[1] if compression else ending
    kind: Literal["text", "jsonl", "parquet"] = "text"
    if inner == ".jsonl":
        kind = "jsonl"
    elif inner == ".parquet" and not compression:
        kind = "parquet"
    return Source(
        index=index,
        path=path,
        bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        kind=kind,
        compression=compression,
    )


def _is_binary(source: Source) -> bool:
    """Whether the (decompressed) start holds a NUL. What cannot be read is rejected later."""
    stop = None if source.compression else min(source.bytes, _SNIFFED_BYTES)
    try:
        start = next(read_blocks(source.path, source.compression, 0, stop), b"")
    except READ_ERRORS:
        return False
    return b"\0" in start[:_SNIFFED_BYTES]
