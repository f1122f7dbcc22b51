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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from tokenfeed.pipeline.errors import ConfigError, CorpusError
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.pipeline.text import count_of, public
from tokenfeed.tools.corpus.blocks import compression_of
from tokenfeed.tools.corpus.formats.delimited import TSV, has_quoted_values
from tokenfeed.tools.corpus.formats.json_records import JSON_LINES
from tokenfeed.tools.corpus.formats.registry import (
    BESIDE_IDS,
    BINARY,
    BROKEN_LINK,
    FALLBACK,
    FORMATS,
    NO_FILE,
    Unread,
    beginning_of,
    format_in_folder,
    format_of_given,
    is_pointer,
    needs_look,
    refuse_unread,
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
    LEFT_OUT,
    NOT_A_CORPUS,
    REPOSITORY_PREFIX,
    hub_files,
    is_data_set,
    is_hidden,
    is_saved,
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
    """None for a file that no format reads."""
    kind: str = ""
    """What it is in place of a regular file."""


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
        max_record_bytes=max_record_bytes,
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
    sources = tuple(replace(source, index=index) for index, source in enumerate(found))
    return Corpus(sources=sources, binary=unread)


def kind_left_out(file: Known) -> Unread:
    """Return the kind of a file that was left out."""
    kinds = {kind.one: kind for kind in (NO_FILE, BROKEN_LINK)}
    return kinds.get(file.kind) or unread_kind(file.name) or BINARY


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


class _Found(NamedTuple):
    """A file or folder, before its format is known."""

    name: str
    """Path from the command line, or below it."""
    real: str
    """The path without symbolic links, or the address."""
    place: Location
    split: str | None = None
    """The split of the entry in a saved data set."""
    is_folder: bool = False
    is_listed: bool = False
    """Whether a file of the folder lists the entry."""

    @classmethod
    def of_object(cls, file: RemoteFile) -> "_Found":
        return cls(str(file), str(file), file)

    def size_and_state(self) -> tuple[int, int | str]:
        """See `InputFile.state`."""
        if isinstance(self.place, RemoteFile):
            return self.place.info.size, self.place.state
        try:
            return size_and_state(self.place)
        except OSError as error:
            raise _unreadable(self.place, error) from error


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
    max_record_bytes: int
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
        """Add what a path of the command line names."""
        if path == STANDARD_INPUT:
            self._add_stdin()
        elif "://" in path:
            self._add_remote(path)
        elif path.startswith(HUB_PREFIX):
            for file, split, commit in hub_files(path):
                name = f"{path}/{split}/{os.path.basename(file)}"  # no path of this machine
                if not self._excluded(path, f"{path}/{split}", name):
                    source = self._source(_Found(name, file, file), FORMATS["arrow"])
                    self._append(replace(source, state=commit or source.state), path, split)
        else:
            self._add_local(path)

    def _add_local(self, path: str) -> None:
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
        given = _Found(path, real, path)
        if stat.S_ISDIR(mode):
            self._add_found(map(self._looked_at, self._files_below(given)), path)
        elif stat.S_ISREG(mode):
            self._add_given(given)
        else:
            raise CorpusError(f"{path}: is neither a folder nor a regular file.")

    def _files_below(self, given: _Found) -> Iterator[_Found]:
        """Yield the files below a given folder in the order of their names."""
        levels = [self._entries(given, given.name)]
        while levels:
            entry = next(levels[-1], None)
            if entry is None:
                levels.pop()
            elif entry.is_folder:
                levels.append(self._entries(entry, given.name))
            else:
                yield entry

    def _entries(self, folder: _Found, root: str) -> Iterator[_Found]:
        """Yield the entries of a folder that are read. Without links, this is one system call."""
        if folder.real == self.out or not self._is_new(folder.real):
            return
        try:
            with os.scandir(folder.name) as listed:
                found = {entry.name: entry for entry in listed}
        except OSError as error:
            raise _unreadable(folder.name, error) from error
        names = sorted(found)
        if is_data_set(names):
            if folder.name == root:
                raise CorpusError(f"{root}: {NOT_A_CORPUS}")
            logger.info("%s: %s", folder.name, LEFT_OUT)
            return
        entries = [(name, folder.split) for name in names if not is_hidden(name)]
        is_listed = is_saved(names) and is_saved(
            [name for name in names if not self._excluded(root, os.path.join(folder.name, name))]
        )
        if is_listed:
            entries = saved_entries(folder.name, names, folder.split)
        for name, split in entries:
            entry, path = found[name], os.path.join(folder.name, name)
            if self._excluded(root, path):
                continue
            try:
                is_folder = entry.is_dir()
                if not is_folder and not entry.is_file():
                    kind = NO_FILE if os.path.exists(path) else BROKEN_LINK
                    if is_listed:
                        raise CorpusError(
                            f"{path}: is listed in its folder, and is {kind.one}. Copy it again."
                        )
                    self.unread[path] = Known(path, 0, 0, None, kind.one)
                    continue
                real = os.path.join(folder.real, name)
                real = os.path.realpath(path, strict=True) if entry.is_symlink() else real
            except OSError as error:
                raise _unreadable(path, error) from error
            yield _Found(path, real, path, split, is_folder, is_listed)

    def _excluded(self, root: str, *paths: str) -> bool:
        """Return whether a pattern matches one of the paths, of which each is in the next."""
        for path in paths:
            if any(matches := matching(self.exclude, path, root)):
                self.excluding.update(compress(self.exclude, matches))
                return True
        return False

    def _add_remote(self, url: str) -> None:
        """Add an object, or all objects below a URL."""
        if url.startswith(REPOSITORY_PREFIX):
            files = repository_files(url)
            name = files[0].info.name if files else ""
            if len(files) == 1 and url.endswith(f"/{name}"):
                self._add_given(_Found.of_object(files[0]))
                return
            root = files[0].pinned.removesuffix(f"/{name}") if files else url
            objects = [file for file in files if not self._excluded(root, str(file))]
        elif file := object_at(url):
            if file.store.address.query and str(file) in self.seen:
                raise ConfigError(
                    f"{file}: is given twice. The part before `?` must differ between files: give "
                    "each address once."
                )
            self._add_given(_Found.of_object(file))
            return
        else:
            root = public(url).removesuffix("?anonymous")
            below = objects_below(url)
            objects = [
                file for file, folders in below if not self._excluded(root, *folders, str(file))
            ]
            objects = list(results_of(RemoteFile.asked_for, objects, _AT_ONCE))
        found = list(map(_Found.of_object, objects))
        self._add_found(results_of(self._looked_at, found, _AT_ONCE), root)

    def _add_found(self, looked_at: Iterable[tuple[_Found, Format | None]], root: str) -> None:
        """Add the files below a folder, with their formats."""
        first = len(self.sources)
        for found, format_ in looked_at:
            if not self._is_new(found.real):
                continue
            if found.is_listed and format_ in (None, FALLBACK):
                raise CorpusError(
                    f"{found.name}: is listed in its folder, and has no known format. Copy it "
                    "again."
                )
            if isinstance(found.place, RemoteFile):
                self.room -= len(found.place.content or b"")
                if self.room <= 0:  # all contents would take too much memory
                    found = found._replace(place=replace(found.place, content=None))
            if format_ is None:
                self.unread[found.real] = Known(found.name, *found.size_and_state(), None)
            else:
                self._append(self._source(found, format_), root, found.split)
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
        for name, count in sorted(Counter(splits.values()).items()):
            files = count_of(count, "file")
            logger.info("%s: %s in split %s by name; see --split", root, files, name)
        kept = (source for source in found if source not in about)
        self.sources[first:] = [
            replace(source, split=splits.get(source.name, source.split)) for source in kept
        ]

    def _looked_at(self, found: _Found) -> tuple[_Found, Format | None]:
        """Return a file in a folder and its format, or None if no format reads it. A small object
        that had to be opened keeps its content."""
        name, place = found.name, found.place
        if isinstance(place, RemoteFile) and place.is_small and needs_look(name):
            found = found._replace(place=(place := place.fetched()))
        if format_ := self._of_ids(name):
            return found, format_
        if known := self._unchanged(found):
            return found, FORMATS[known.format] if known.format else None
        return found, format_in_folder(name, place, self.field, self.encoding)

    def _add_given(self, found: _Found) -> None:
        """Add a file that the command line names. A glob may name indexes of token ids."""
        name, place = found.name, found.place
        if self.ids and name.lower().endswith(BESIDE_IDS):
            self.unread[found.real] = Known(name, *found.size_and_state(), None)
            return
        refuse_unread(name, place)
        is_skipped = self.unread.pop(found.real, None) is not None
        if self._is_new(found.real) or is_skipped:
            known, format_ = self._unchanged(found), self._of_ids(name)
            if format_ is None and known and known.format:
                format_ = FORMATS[known.format]
            format_ = format_ or format_of_given(name, place, self.field, self.encoding)
            self._append(self._source(found, format_), name, None)

    def _is_new(self, real: str) -> bool:
        """Return whether a path was not found before, and remember the path."""
        is_new = real not in self.seen
        self.seen.add(real)
        return is_new

    def _unchanged(self, found: _Found) -> Known | None:
        """Return the facts about a file from an earlier run, if the file is unchanged."""
        known = self.known.get(found.name)
        is_same = known and (known.bytes, known.state) == found.size_and_state()
        return known if is_same else None

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
        source = self._source(_Found(file.name, file.path, file.path), format_)
        state = f"{file.checksum:016x}"
        source = replace(source, state=state, is_spooled=True, class_names=file.class_names)
        self._append(source, file.name, file.split)

    def _source(self, found: _Found, format_: Format) -> InputFile:
        name, place = found.name, found.place
        size, state = found.size_and_state()
        if is_pointer(place):
            raise CorpusError(
                f"{name}: is a pointer of Git LFS, and the file itself is not here. Run `git lfs "
                "pull` in its repository, or leave it out by --exclude."
            )
        compression = compression_of(name)
        if format_ is TSV and not self.has_quotes:
            beginning = beginning_of(place, compression, _TSV_BYTES, self.encoding)
            self.has_quotes = has_quoted_values(beginning)
            if self.has_quotes:
                logger.warning(
                    "%s: has quoted values. A TSV has no quotes, so they are read with all their "
                    "quotes. Write it as CSV or JSON Lines",
                    name,
                )
        ratio = format_.text_ratio * (_COMPRESSION_RATIO if compression else 1)
        return InputFile(
            index=len(self.sources),
            name=name,
            path=os.path.join(os.getcwd(), place) if isinstance(place, str) else place,
            bytes=size,
            text_bytes=size * ratio,
            state=state,
            format=format_.name,
            compression=compression,
            max_record_bytes=self.max_record_bytes,
            encoding=self.encoding,
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


def _unreadable(path: str, error: OSError) -> CorpusError:
    return CorpusError(
        f"{path}: cannot be read: {error.strerror}. Make it readable, or leave it out by "
        "`--exclude`."
    )
