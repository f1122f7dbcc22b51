"""Find the input files of a corpus, in an order that depends on their names alone.

A file given by name is always read. In a folder, hidden entries, `__pycache__`, what `--exclude`
names, the output folder and binary files are left out; symbolic links are followed, but a file that
two ways lead to is read once. To tell binary from text, and JSON Lines from other JSON, the start
of a file is read here. What `Dataset.save_to_disk` wrote is read as its Arrow files.
"""

import fnmatch
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.format.manifest import JOURNAL_FILE, MANIFEST_FILE, TOKENIZER_FILE
from tokenfeed.tools.corpus.blocks import Compression
from tokenfeed.tools.corpus.hub import HUB_PREFIX, hub_files
from tokenfeed.tools.corpus.sniff import holds_objects, is_binary, json_format
from tokenfeed.tools.corpus.stdin import STANDARD_INPUT, spool_stdin

__all__ = ["Corpus", "Format", "Source", "find_corpus"]

logger = logging.getLogger(__name__)

Format = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_SPLIT = re.compile(r"\w[\w-]*")
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z"}
_SAVED_SET, _SAVED_INFO, _SAVED_SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""What `save_to_disk` leaves in the folder of a data set, and in that of several splits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One input file as it was when the run began."""

    index: int
    """Its line in sources.jsonl, counted from 0."""
    name: str
    """As given on the command line, and below that as found."""
    path: str
    """Where it is read: for standard input not its name."""
    bytes: int
    state: int
    """Changes when the file does: its modification time; for standard input its checksum."""
    format: Format
    """By the name's ending; what has no ending of a known format is text: one document."""
    compression: Compression | None
    split: str | None = None
    """The split that all its records belong to; None draws it for each."""

    def check_unchanged(self) -> None:
        """Compare the file with what it was when the run began.

        Raises:
            CorpusError: It is gone or has changed: half of it may already be in a shard.
        """
        if self.name == STANDARD_INPUT:
            return
        remedy = "Put it back, or start again with an empty output folder."
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            raise CorpusError(
                f"{self.name}: vanished while the corpus was read. {remedy}"
            ) from None
        if (now.st_size, now.st_mtime_ns) != (self.bytes, self.state):
            raise CorpusError(f"{self.name}: changed while the corpus was read. {remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The input files, and how many were left out for being binary."""

    sources: tuple[Source, ...]
    skipped_binary: int


def find_corpus(
    paths: tuple[str, ...],
    *,
    out: Path,
    field: str,
    exclude: tuple[str, ...] = (),
    splits: tuple[tuple[str, str], ...] = (),
) -> Corpus:
    """Find every input file below `paths`, in the order of `paths` and then of names.

    Args:
        paths: Files, folders, or `-` for standard input.
        out: The output folder, never read.
        field: A field that is wanted: a .json file whose records have it is no mere text.
        exclude: Patterns of names or paths to leave out.
        splits: A split, and a pattern of names or paths whose files belong to it; the first counts.

    Raises:
        CorpusError: A path is missing or cannot be listed, or there is no input file at all.
        ConfigError: A path lies in the output folder.
    """
    search = _Search(os.path.realpath(out), field, exclude, splits)
    for path in paths:
        search.add(path)
    search.check_splits()
    if not search.sources:
        binary = (
            f" ({search.skipped_binary:,} binary files skipped)" if search.skipped_binary else ""
        )
        raise CorpusError(
            f"{', '.join(paths)}: no input file found{binary}. Point at folders or files of text."
        )
    return Corpus(sources=tuple(search.sources), skipped_binary=search.skipped_binary)


_Found = tuple[str, str | None]
"""A file, and the split that its place says it is of."""


class _Search:
    """One walk over all given paths; remembers where it has been."""

    def __init__(
        self,
        out: str,
        field: str,
        exclude: tuple[str, ...],
        splits: tuple[tuple[str, str], ...],
    ) -> None:
        self.sources: list[Source] = []
        self.skipped_binary = 0
        self._out = out
        self._field = field
        self._exclude = exclude
        self._splits = splits
        self._seen: set[str] = set()

    def add(self, path: str) -> None:
        if path == STANDARD_INPUT:
            self._add_stdin()
            return
        if path.startswith(HUB_PREFIX):
            for file, split in hub_files(path):
                name = f"{path}/{split}/{os.path.basename(file)}"  # no path of this machine
                self._append(self._source(name, file), name, split)
            return
        real = os.path.realpath(path)
        if os.path.commonpath([real, self._out]) == self._out:
            raise ConfigError(f"{path}: is or lies in the output folder. Choose another output.")
        if os.path.isdir(path):
            for found, of_split in self._walk(path, path):
                self._add_file(found, path, of_split, explicit=False)
        elif os.path.isfile(path):
            if set(Path(path.lower()).suffixes[-2:]) & _ARCHIVES:
                raise CorpusError(f"{path}: is an archive of files. Unpack it and give the folder.")
            self._add_file(path, path, None, explicit=True)
        elif os.path.lexists(path):
            raise CorpusError(f"{path}: is neither a folder nor a regular file.")
        else:
            raise CorpusError(
                f"{path}: not found. Point at folders or files of text, or hub:OWNER/NAME."
            )

    def _walk(self, folder: str, root: str, split: str | None = None) -> Iterator[_Found]:
        """Files below `folder`, each with the split that a saved data set says it is of."""
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
        if {_SAVED_SET, _SAVED_INFO} <= set(names) or _SAVED_SPLITS in names:
            yield from self._walk_saved(folder, root, split, names)
            return
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(".") or name == "__pycache__" or self._excluded(path, root):
                continue
            if os.path.isdir(path):
                yield from self._walk(path, root, split)
            elif os.path.isfile(path):
                yield path, split

    def _walk_saved(
        self, folder: str, root: str, split: str | None, names: list[str]
    ) -> Iterator[_Found]:
        """The Arrow files of a folder that `save_to_disk` wrote, for it names them itself."""
        try:
            if _SAVED_SPLITS in names:
                for name in json.loads(Path(folder, _SAVED_SPLITS).read_bytes())["splits"]:
                    yield from self._walk(os.path.join(folder, name), root, name)
                return
            files = json.loads(Path(folder, _SAVED_SET).read_bytes())["_data_files"]
            for file in files:
                yield os.path.join(folder, file["filename"]), split
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{folder}: looks like a saved data set, but cannot be read as one: {error}."
            ) from error

    def _excluded(self, path: str, root: str) -> bool:
        return any(_matches(path, root, pattern) for pattern in self._exclude)

    def _add_file(self, path: str, root: str, split: str | None, *, explicit: bool) -> None:
        real = os.path.realpath(path)
        if real in self._seen:
            return
        self._seen.add(real)
        source = self._source(path, path)
        is_text = source.format == "text"
        if not explicit and is_text and is_binary(path, source.compression):
            self.skipped_binary += 1
            return
        is_json = ".json" in Path(path).suffixes
        if explicit and is_text and is_json and holds_objects(path, source.compression):
            logger.warning(
                "%s: its records have no field `%s`, so it is read as one text", path, self._field
            )
        self._append(source, root, split)

    def _append(self, source: Source, root: str, split: str | None) -> None:
        """Add a source to the split that an option says it is of, or else to `split`."""
        matching = (name for name, glob in self._splits if _matches(source.name, root, glob))
        split = next(matching, split)
        if split is not None and not _SPLIT.fullmatch(split):
            raise CorpusError(f"{source.name}: {split!r} cannot be the name of a split.")
        self.sources.append(replace(source, split=split))

    def check_splits(self) -> None:
        """Refuse a pattern that no file matches: it is a slip of the pen."""
        for split, glob in self._splits:
            if all(source.split != split for source in self.sources):
                raise ConfigError(f"`--split {split}={glob}`: no input file matches it.")

    def _add_stdin(self) -> None:
        """Standard input, as JSON Lines if it looks like it, else as one text."""
        if any(source.name == STANDARD_INPUT for source in self.sources):
            raise ConfigError("`-`: standard input can be read only once.")
        path, checksum = spool_stdin(Path(self._out))
        source = self._source(STANDARD_INPUT, path)
        is_json_lines = json_format(path, None, self._field) == "jsonl"
        format_: Format = "jsonl" if is_json_lines else "text"
        if not is_json_lines and holds_objects(path, None):
            logger.warning("-: its records have no field `%s`: read as one text", self._field)
        source = replace(source, format=format_, state=checksum)
        self._append(source, STANDARD_INPUT, None)

    def _source(self, name: str, path: str) -> Source:
        try:
            status = os.stat(path)
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror}.") from error
        stem, ending = os.path.splitext(name.lower())
        compression = _COMPRESSIONS.get(ending)
        format_ = _FORMATS.get(os.path.splitext(stem)[1] if compression else ending, "text")
        if format_ in ("parquet", "arrow") and compression:
            format_ = "text"
        source = Source(
            index=len(self.sources),
            name=name,
            path=path,
            bytes=status.st_size,
            state=status.st_mtime_ns,
            format=format_,
            compression=compression,
        )
        if format_ == "json":
            return replace(source, format=json_format(path, compression, self._field))
        return source


def _matches(path: str, root: str, glob: str) -> bool:
    forms = os.path.basename(path), os.path.relpath(path, root)
    return any(fnmatch.fnmatchcase(form, glob.rstrip("/")) for form in forms)


def _is_data_set(names: list[str]) -> bool:
    """Whether a folder of these names is an output of ours: its files are no text to learn."""
    return JOURNAL_FILE in names or {MANIFEST_FILE, TOKENIZER_FILE} <= set(names)
