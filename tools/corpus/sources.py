"""Find the input files of a corpus, in an order that depends only on their names.

A file that the command line names is always read. In a folder, the search leaves out hidden
entries, `__pycache__`, files that match `--exclude`, the output folder, broken links and binary
files. The search follows symbolic links, and reads a file once even if two paths lead to it. It
reads the start of files, to distinguish binary files from text, and JSON Lines from other JSON. A
folder of `Dataset.save_to_disk` is read as the files that it lists. Files of token ids are read for
the task `ids` only. `--exclude` and `--split` have the same patterns.
"""

import atexit
import dataclasses
import fnmatch
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.pipeline.text import count_of, public
from tokenfeed.tools.corpus.formats.delimited import TSV, has_quoted_values
from tokenfeed.tools.corpus.formats.json_records import JSON_LINES
from tokenfeed.tools.corpus.formats.registry import (
    BESIDE_IDS,
    BINARY,
    FALLBACK,
    FORMATS,
    Unread,
    beginning_of,
    compression_of,
    format_in_folder,
    format_of_given,
    has_known_ending,
    is_binary,
    is_pointer,
    needs_look,
    unread_given,
    unread_kind,
)
from tokenfeed.tools.corpus.formats.tokens import ENDINGS, TOKENS, refuse_foreign
from tokenfeed.tools.corpus.input_files import (
    MAX_RECORD_BYTES,
    STANDARD_INPUT,
    Format,
    IdFacts,
    InputFile,
    size_and_state,
)
from tokenfeed.tools.corpus.locations import FOREIGN_INDEX, Location, RemoteFile, indexes_beside
from tokenfeed.tools.corpus.remote_sources import (
    HUB_PREFIX,
    NOT_A_CORPUS,
    REPOSITORY_PREFIX,
    hub_files,
    is_data_set,
    is_hidden,
    object_at,
    objects_below,
    repository_files,
    saved_entries,
)
from tokenfeed.tools.corpus.spool import Spooled, spool, stdin_blocks

_SPLIT = re.compile(r"\w[\w.-]*")
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in names of files and folders that decide about splits, as in `datasets`."""
_SPLIT_WORD = re.compile(rf"(?<![^-._ 0-9/])({'|'.join(_SPLIT_WORDS)})(?![^-._ 0-9/])")
_INFOS = ("dataset_infos.json", "dataset_info.json")
"""Files of `datasets` that describe a data set."""


def is_split_name(name: str) -> bool:
    """Return whether a split may have this name. The name becomes a folder of the output."""
    return _SPLIT.fullmatch(name) is not None


def matching(patterns: Sequence[str], path: str, root: str) -> list[bool]:
    """Return the patterns that match a file or folder.

    A pattern is compared with the name and with the path below `root`, a path of the command line.
    A pattern that begins with `./` is compared only with the path below `root`. A pattern that
    begins with `/`, or is an address, is compared with the whole path. The current folder does not
    matter. A `*` also matches `/`.
    """
    if not patterns:
        return []
    below = path.removeprefix(root).lstrip("/")
    return [_matches(pattern, path, below) for pattern in patterns]


def _matches(pattern: str, path: str, below: str) -> bool:
    if "://" in pattern:
        return fnmatch.fnmatchcase(path, pattern)
    normal = os.path.normpath(pattern)
    if pattern.startswith("/"):
        return fnmatch.fnmatchcase(os.path.abspath(path), normal)
    if fnmatch.fnmatchcase(below, normal):
        return True
    return not pattern.startswith("./") and fnmatch.fnmatchcase(os.path.basename(path), normal)


logger = logging.getLogger(__name__)

_AT_ONCE = 32
"""Number of objects whose beginnings are read at the same time."""
_PATTERNS_MATCH = (
    "A pattern is compared with names and with paths below the given folders. Begin it with / to "
    "compare whole paths."
)
_SHOWN = 5
"""Files of a kind that were left out and are shown."""
_KEPT_BYTES = 1 << 26
"""Bytes of small objects that stay in memory until they are encoded."""
_TSV_BYTES = 1 << 16
"""Bytes of a TSV that are searched for quoted values."""
_COMPRESSION_RATIO = 4
"""Estimated bytes of text per byte of a .gz or .zst file, for the division of work."""


class Known(NamedTuple):
    """A file whose beginning was read."""

    name: str
    bytes: int
    state: int | str
    format: str | None
    """None for a binary file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The input files of a run, and the files of folders that were left out."""

    sources: tuple[InputFile, ...]
    binary: tuple[Known, ...]
    """Files in folders that no format reads."""

    @property
    def known(self) -> list[Known]:
        """The files that were opened, for `find_corpus`."""
        opened = (Known(file.name, file.bytes, file.state, file.format) for file in self.sources)
        return [*opened, *self.binary]


def find_corpus(
    paths: tuple[str, ...],
    *,
    out: Path | None,
    field: str,
    exclude: tuple[str, ...] = (),
    splits: tuple[tuple[str, str], ...] = (),
    max_record_bytes: int = MAX_RECORD_BYTES,
    encoding: str | None = None,
    known: Iterable[Known] = (),
    spooled: Iterable[Spooled] = (),
    ids: IdFacts | None = None,
) -> Corpus:
    """Find every input file below `paths`, in the order of `paths` and then of names.

    Args:
        paths: Files, folders, or `-` for standard input.
        out: The output folder, which is never read. None if the output is not a folder.
        field: A field of records. A .json file without this field is read as a text.
        exclude: Patterns of names or paths to leave out.
        splits: Splits, each with a pattern for its files. The first match counts.
        max_record_bytes: Longer records are rejected.
        encoding: The encoding of text that is not UTF-8.
        known: Files that an earlier run of the command opened. Unchanged files are not opened.
        spooled: Files of JSON Lines that this process made from Python objects.
        ids: For the task `ids`, which reads files of token ids; None for other tasks.

    Raises:
        CorpusError: A path is missing or cannot be listed, or there is no input file.
        ConfigError: A path is in the output folder.
    """
    search = _InputSearch(
        out=None if out is None else os.path.realpath(out),
        field=field,
        exclude=exclude,
        splits=splits,
        known={file.name: file for file in known},
        ids=ids,
        encoding=encoding,
    )
    for path in paths:
        search.add(path)
    for file in spooled:
        search.add_spooled(file, JSON_LINES)
    search.check_patterns()
    if not splits:
        given = (source for source in search.sources if source.name in paths)
        _warn_of_split_names([replace(each, name=os.path.basename(each.name)) for each in given])
    of_ids = (source.name for source in search.sources if source.format == TOKENS.name)
    indexes = {name for each in of_ids for name in indexes_beside(each)}
    found = [source for source in search.sources if source.name not in indexes]
    unread = tuple(file for file in search.unread.values() if file.name not in indexes)
    if not found:
        binary = f" (left out: {'; '.join(left_out(unread))})" if unread else ""
        tokens = " For files of token ids, use `--task ids`." if unread and not ids else ""
        raise CorpusError(
            f"{', '.join(map(public, paths))}: no input file found{binary}. Point at folders or "
            f"files of text.{tokens}"
        )
    sources = (
        replace(source, index=index, max_record_bytes=max_record_bytes, encoding=encoding)
        for index, source in enumerate(found)
    )
    return Corpus(sources=tuple(sources), binary=unread)


def kind_left_out(file: Known) -> Unread:
    """Return the kind of a file that was left out."""
    return unread_kind(file.name) or BINARY


def left_out(files: Sequence[Known]) -> list[str]:
    """Describe the files that were left out, by kind: how many, the first, and what to do."""
    by_kind: dict[Unread, list[str]] = {}
    for file in files:
        by_kind.setdefault(kind_left_out(file), []).append(file.name)
    return [
        f"{count_of(len(names), kind.one.split(' ', 1)[1], kind.many)} "
        f"({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}): {kind.remedy}"
        for kind, names in by_kind.items()
    ]


class _Entry(NamedTuple):
    """A file or folder in a folder."""

    path: str
    real: str
    """The path without symbolic links."""
    is_folder: bool
    split: str | None
    """The split of the entry in a saved data set."""
    is_listed: bool = False
    """Whether a file of the folder lists the entry."""
    object: RemoteFile | None = None
    """An object of a store; None on this machine."""

    @property
    def place(self) -> Location:
        """The place to read the entry."""
        return self.object or self.path


@dataclass(kw_only=True)
class _InputSearch:
    """A search through all given paths, with the arguments of `find_corpus`. It remembers the files
    that it found."""

    out: str | None
    field: str
    exclude: tuple[str, ...]
    splits: tuple[tuple[str, str], ...]
    known: dict[str, Known]
    ids: IdFacts | None
    encoding: str | None
    sources: list[InputFile] = dataclasses.field(default_factory=list)
    unread: dict[str, Known] = dataclasses.field(default_factory=dict)
    """Files in folders that no format reads, by URL or by path without symbolic links."""
    seen: set[str] = dataclasses.field(default_factory=set)
    room: int = _KEPT_BYTES
    """Bytes of memory left for the contents of remote files."""
    used: set[str] = dataclasses.field(default_factory=set)
    """Patterns of `splits` that have matched."""
    excluding: set[str] = dataclasses.field(default_factory=set)
    """Patterns of `exclude` that have matched."""
    has_quotes: bool = False
    """Whether some TSV has quoted values."""

    def add(self, path: str) -> None:
        if path == STANDARD_INPUT:
            self._add_stdin()
            return
        if "://" in path:
            self._add_remote(path)
            return
        if path.startswith(HUB_PREFIX):
            for file, split, commit in hub_files(path):
                name = f"{path}/{split}/{os.path.basename(file)}"  # no path of this machine
                if not self._excluded(f"{path}/{split}", path) and not self._excluded(name, path):
                    format_ = format_in_folder(name, file, self.field)
                    source = self._source(name, file, format_)
                    self._append(replace(source, state=commit or source.state), path, split)
            return
        real = os.path.realpath(path)
        if self.out and os.path.commonpath([real, self.out]) == self.out:
            raise ConfigError(f"{path}: is or lies in the output folder. Choose another output.")
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            raise CorpusError(
                f"{path}: not found. Point at folders or files of text, or hub:OWNER/NAME."
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from error
        if stat.S_ISDIR(mode):
            self._add_found(map(self._looked_at, self._files_below(path, real)), path)
        elif stat.S_ISREG(mode):
            self._add_given(path, path, real)
        else:
            raise CorpusError(f"{path}: is neither a folder nor a regular file.")

    def _files_below(self, root: str, real: str) -> Iterator[_Entry]:
        """Yield the files below a given folder in the order of their names."""
        levels = [self._entries(_Entry(root, real, True, None), root)]
        while levels:
            entry = next(levels[-1], None)
            if entry is None:
                levels.pop()
            elif entry.is_folder:
                levels.append(self._entries(entry, root))
            else:
                yield entry

    def _entries(self, folder: _Entry, root: str) -> Iterator[_Entry]:
        """Yield the entries of a folder that are read. Without links, this is one system call."""
        if folder.real == self.out or not self._is_new(folder.real):
            return
        try:
            with os.scandir(folder.path) as listed:
                found = {entry.name: entry for entry in listed}
        except OSError as error:
            raise CorpusError(f"{folder.path}: cannot be listed: {error.strerror}.") from error
        names = sorted(found)
        if is_data_set(names):
            if folder.path == root:
                raise CorpusError(f"{root}: {NOT_A_CORPUS}")
            logger.info("%s: left out, it is a data set of pretokenize", folder.path)
            return
        entries = saved_entries(folder.path, names, folder.split)
        is_listed = entries is not None
        if entries is None:
            entries = [(name, folder.split) for name in names if not is_hidden(name)]
        for name, split in entries:
            entry, path = found[name], os.path.join(folder.path, name)
            if self._excluded(path, root):
                continue
            try:
                is_folder = entry.is_dir()
                if not is_folder and not entry.is_file():
                    continue
                real = os.path.join(folder.real, name)
                real = os.path.realpath(path, strict=True) if entry.is_symlink() else real
            except OSError as error:
                raise _unreadable(path, error) from error
            yield _Entry(path, real, is_folder, split, is_listed)

    def _excluded(self, path: str, root: str) -> bool:
        matches = matching(self.exclude, path, root)
        self.excluding.update(compress(self.exclude, matches))
        return any(matches)

    def _add_remote(self, url: str) -> None:
        """Add an object, or all objects below a URL."""
        if url.startswith(REPOSITORY_PREFIX):
            self._add_repository(url)
            return
        if file := object_at(url):
            if file.store.address.query and str(file) in self.seen:
                raise ConfigError(
                    f"{file}: is given twice. The part before `?` must differ between files: give "
                    "each address once."
                )
            self._add_given(str(file), file, str(file))
            return
        root = public(url).removesuffix("?anonymous")
        found = [
            file
            for file, folders in objects_below(url)
            if not any(self._excluded(path, root) for path in (*folders, str(file)))
        ]
        self._add_objects(list(results_of(RemoteFile.asked_for, found, _AT_ONCE)), root)

    def _add_repository(self, url: str) -> None:
        """Add a file of the Hub, or all files below a folder of a repository."""
        files = repository_files(url)
        if len(files) == 1 and url.endswith(f"/{files[0].info.name}"):
            self._add_given(str(files[0]), files[0], str(files[0]))
            return
        root = files[0].pinned.removesuffix(f"/{files[0].info.name}") if files else url
        self._add_objects([file for file in files if not self._excluded(str(file), root)], root)

    def _add_objects(self, files: list[RemoteFile], root: str) -> None:
        entries = [_Entry(str(file), str(file), False, None, object=file) for file in files]
        self._add_found(results_of(self._looked_at, entries, _AT_ONCE), root)

    def _add_found(self, found: Iterable[tuple[_Entry, Format | None]], root: str) -> None:
        """Add the files below a folder, with their formats."""
        first = len(self.sources)
        for entry, format_ in found:
            if not self._is_new(entry.real):
                continue
            if entry.is_listed and format_ in (None, FALLBACK):
                raise CorpusError(
                    f"{entry.path}: is listed in its folder, and has no known format. Copy it "
                    "again."
                )
            if entry.object:  # without its content, if all contents take too much memory
                self.room -= len(entry.object.content or b"")
                kept = entry.object if self.room > 0 else replace(entry.object, content=None)
                entry = entry._replace(object=kept)
            if format_ is None:
                self.unread[entry.real] = Known(entry.path, *_size_and_state(entry.place), None)
            else:
                self._append(self._source(entry.path, entry.place, format_), root, entry.split)
        self._settle(first, root)

    def _settle(self, first: int, root: str) -> None:
        """Decide about the files of a folder by those beside them.

        Among files of records, names decide about splits if some name says train. The card and the
        infos of a data set of the Hub are no documents.

        Args:
            first: Number of the first source of the folder.
            root: The folder.

        Raises:
            CorpusError: The folder has a data set of litData or mosaicml-streaming.
        """
        found = self.sources[first:]
        for source in found:
            if os.path.basename(source.name) == FOREIGN_INDEX:
                refuse_foreign(source.path, os.path.dirname(source.name))
        tables = [source for source in found if source.format != FALLBACK.name]
        about = [source for source in found if tables and _describes(source, root)]
        if about:
            names = ", ".join(os.path.basename(source.name) for source in about)
            logger.info("%s: %s left out, because it describes the data set", root, names)
        texts = [each for each in found if each.format == FALLBACK.name and each not in about]
        if tables and texts:
            shown = ", ".join(os.path.basename(each.name) for each in texts[:_SHOWN])
            logger.info(
                "%s: reads %s as text, beside files of records (%s%s). --exclude leaves out files",
                *(root, count_of(len(texts), "file"), shown, ", ..." * (len(texts) > _SHOWN)),
            )
        splits = {} if self.splits else _named_splits(tables, root)
        if not (self.splits or splits):
            _warn_of_split_names(tables, root)
        for name in sorted({*splits.values()}):
            count = count_of([*splits.values()].count(name), "file")
            logger.info("%s: %s in split %s by name; see --split", root, count, name)
        kept = (source for source in found if source not in about)
        self.sources[first:] = [
            replace(source, split=splits.get(source.name, source.split)) for source in kept
        ]

    def _looked_at(self, entry: _Entry) -> tuple[_Entry, Format | None]:
        """Return a file and its format, with the content of a small object that had to be
        opened."""
        if entry.object and entry.object.is_small and needs_look(entry.path):
            entry = entry._replace(object=entry.object.fetched())
        return entry, self._format_of_found(entry.path, entry.place)

    def _add_given(self, name: str, path: Location, real: str) -> None:
        """Add a file that the command line names. A glob may name indexes of token ids."""
        if self.ids and name.lower().endswith(BESIDE_IDS):
            self.unread[real] = Known(name, *_size_and_state(path), None)
            return
        if kind := unread_given(name, path):
            raise CorpusError(f"{name}: {kind.reason}.")
        is_skipped = self.unread.pop(real, None) is not None
        if self._is_new(real) or is_skipped:
            known = self._unchanged(name, path)
            given = known.format if known else None
            format_ = self._of_ids(name) or (FORMATS[given] if given else None)
            format_ = format_ or format_of_given(name, path, self.field, self.encoding)
            self._append(self._source(name, path, format_), name, None)

    def _is_new(self, real: str) -> bool:
        """Return whether a path was not found before, and remember the path."""
        is_new = real not in self.seen
        self.seen.add(real)
        return is_new

    def _unchanged(self, name: str, path: Location) -> Known | None:
        """Return the facts about a file from an earlier run, if the file is unchanged."""
        known = self.known.get(name)
        is_same = known and (known.bytes, known.state) == _size_and_state(path)
        return known if is_same else None

    def _format_of_found(self, name: str, path: Location) -> Format | None:
        """Return the format of a file in a folder; None if no format reads it."""
        if format_ := self._of_ids(name):
            return format_
        if known := self._unchanged(name, path):
            return FORMATS[known.format] if known.format else None
        if unread_kind(name):
            return None
        format_ = format_in_folder(name, path, self.field, self.encoding)
        if format_ is FALLBACK and is_binary(path, compression_of(name), self.encoding):
            return None
        if not has_known_ending(name) and is_pointer(path, _size_and_state(path)[0]):
            return None  # most likely of a picture or a model
        return format_

    def _of_ids(self, name: str) -> Format | None:
        """Return the format of a file of token ids, for the task that reads them."""
        return TOKENS if self.ids and name.lower().endswith(ENDINGS) else None

    def _append(self, source: InputFile, root: str, split: str | None) -> None:
        """Add a source to the split that an option names, or else to `split`."""
        matches = matching([glob for _, glob in self.splits], source.name, root)
        fitting = [*compress(self.splits, matches)]
        self.used.update(glob for _, glob in fitting)
        split = fitting[0][0] if fitting else split
        if split is not None and not is_split_name(split):
            raise CorpusError(f"{source.name}: {split!r} cannot be the name of a split.")
        self.sources.append(replace(source, split=split))

    def check_patterns(self) -> None:
        """Reject a split that matches no file, and name patterns that exclude nothing."""
        for glob in dict.fromkeys(self.exclude):
            if glob not in self.excluding:
                logger.info("--exclude %s: leaves out nothing. %s", public(glob), _PATTERNS_MATCH)
        found = {source.split for source in self.sources}
        for split, glob in self.splits:
            given = f"`--split {split}={public(glob)}`"
            if glob not in self.used:
                raise ConfigError(f"{given}: no input file matches it. {_PATTERNS_MATCH}")
            if split not in found:
                raise ConfigError(f"{given}: patterns before it take all that it matches.")

    def _add_stdin(self) -> None:
        """Add standard input, as records if it begins with records, or else as one text."""
        if any(source.name == STANDARD_INPUT for source in self.sources):
            raise ConfigError("`-`: standard input can be read only once.")
        file = spool(STANDARD_INPUT, stdin_blocks(), Path(self.out) if self.out else None)
        atexit.register(file.file.close)
        format_ = format_of_given(STANDARD_INPUT, file.path, self.field, self.encoding)
        self.add_spooled(file, format_)

    def add_spooled(self, file: Spooled, format_: Format) -> None:
        """Add a file that this process made from input that it cannot read twice."""
        source = self._source(file.name, file.path, format_)
        source = replace(source, state=f"{file.checksum:016x}", is_spooled=True)
        source = replace(source, class_names=file.class_names)
        self._append(source, file.name, file.split)

    def _source(self, name: str, path: Location, format_: Format) -> InputFile:
        size, state = _size_and_state(path)
        if is_pointer(path, size):
            raise CorpusError(
                f"{name}: is a pointer of Git LFS, and the file itself is not here. Run `git lfs "
                "pull` in its repository, or leave it out by --exclude."
            )
        compression = compression_of(name)
        if format_ is TSV and not self.has_quotes:
            beginning = beginning_of(path, compression, _TSV_BYTES, self.encoding)
            if has_quoted_values(beginning):
                self.has_quotes = True
                logger.warning(
                    "%s: has quoted values. A TSV has no quotes, so they are read with all their "
                    "quotes. Write it as CSV or JSON Lines",
                    name,
                )
        ratio = format_.text_ratio * (_COMPRESSION_RATIO if compression else 1)
        return InputFile(
            index=len(self.sources),
            name=name,
            path=os.path.join(os.getcwd(), path) if isinstance(path, str) else path,
            bytes=size,
            text_bytes=size * ratio,
            state=state,
            format=format_.name,
            compression=compression,
            ids=self.ids,
        )


def _describes(source: InputFile, root: str) -> bool:
    """Return whether a file is the card or the infos of a data set of the Hub."""
    name = source.name.removeprefix(root).lstrip("/")
    if name == "README.md":
        return beginning_of(source.path, None, 4).startswith(b"---")
    return name in _INFOS


def _named_splits(
    tables: Sequence[InputFile], root: str, *, needs_train: bool = True
) -> dict[str, str]:
    """Return the splits that the names of files say, or else their folders, by the name of the
    file. Files without such a word, and those of the split train, are left out. Without a file of
    the split train, names decide nothing, unless `needs_train` is false."""
    below = {t.name: t.name.removeprefix(root).lstrip("/") for t in tables if t.split is None}
    for part in (os.path.basename, os.path.dirname):
        words = {name: _SPLIT_WORD.search(part(path).lower()) for name, path in below.items()}
        splits = {name: _SPLIT_WORDS[word[0]] for name, word in words.items() if word}
        if "train" in splits.values() or (splits and not needs_train):
            return {name: split for name, split in splits.items() if split != "train"}
    return {}


def _warn_of_split_names(found: Sequence[InputFile], root: str = "") -> None:
    """Warn of files that are trained on with others, although their names say test."""
    tables = [each for each in found if each.format != FALLBACK.name and each.split is None]
    named = _named_splits(tables, root, needs_train=False)
    if len(named) == len({each.name for each in tables}):
        return
    for name, split in [*named.items()][:1]:
        more = f" and {count_of(len(named) - 1, 'more file')}" if len(named) > 1 else ""
        logger.warning(
            "%s%s: read into the same split as the other files, although the name says %s. Name "
            "the split by --split %s='%s'",
            *(name, more, split, split, name.removeprefix(root).lstrip("/")),
        )


def _size_and_state(path: Location) -> tuple[int, int | str]:
    if isinstance(path, RemoteFile):
        return path.info.size, path.state
    try:
        return size_and_state(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> CorpusError:
    return CorpusError(
        f"{path}: cannot be read: {error.strerror}. Make it readable, or leave it out by "
        "`--exclude`."
    )
