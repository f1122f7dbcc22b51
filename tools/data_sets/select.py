"""`shards select OUT NEW`: a data set with some of the rows of another, or without some of them.

Every shard is read once. A shard that loses no row becomes a hard link. The others are written
again without the rows that were not selected. Nothing of these rows stays in the new folder: input
files without rows lose their names in sources.jsonl, and lines of rejects.jsonl go with their
records. The manifest counts what was removed.
"""

import fnmatch
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.facts import count_of
from tokenfeed.pipeline.format.kinds import Kind, kinds_of
from tokenfeed.pipeline.format.manifest import (
    REJECTS_FILE,
    SOURCES_FILE,
    Manifest,
    RecordCounts,
    ShardInfo,
    SplitInfo,
    length_histogram,
    read_checked,
)
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.schema import INPUT_IDS, KINDS, ORIGIN_FILE, ORIGIN_RECORD
from tokenfeed.pipeline.format.shard import ShardReader, ShardWriter
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX
from tokenfeed.pipeline.format.store import LocalStore, Store, open_store
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.data_sets.cat import DataSet
from tokenfeed.tools.data_sets.copy import AT_ONCE
from tokenfeed.tools.data_sets.merge import (
    Derived,
    Move,
    check_folder,
    derived_figures,
    new_data_set,
    place,
    side_file,
)
from tokenfeed.tools.encoding.fim import FIM_ROWS
from tokenfeed.tools.jobs.crew import Progress
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

__all__ = ["Select", "Selection", "select"]

_ORIGIN = "origin "
_KEPT_COUNTS = ("read", "written", "empty", "rejected")


@dataclass(frozen=True, kw_only=True, slots=True)
class Select:
    """Make a data set with some rows of another, or without some of them. Shards that lose no row
    become hard links."""

    out: DataSet
    """Output folder of `pretokenize`, or its address in a store."""
    folder: Annotated[str, text("NEW")]
    """A new or empty folder."""
    where: Annotated[str, text("'origin GLOB'")] | None = None
    """Keep the rows of input files whose path matches GLOB. `*` also matches `/`."""
    rows: Annotated[Path, msgspec.Meta(title="FILE", description="a path")] | None = None
    """Keep the rows that a file of JSON Lines lists: objects with `file` and `record`, as `shards
    cat --json` prints them, or with `file` alone for all rows of the file."""
    drop: bool = False
    """Remove the selected rows instead, and keep all others."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Select the rows."""
        if (self.where is None) == (self.rows is None):
            raise ConfigError("expected `--where 'origin GLOB'` or `--rows FILE`, one of both.")
        if self.rows:
            selection = Selection.read(self.rows, drop=self.drop)
        else:
            glob = str(self.where).removeprefix(_ORIGIN)
            if not glob or glob == self.where:
                raise ConfigError(f"`--where` {self.where}: expected 'origin GLOB'.")
            selection = Selection(glob, {}, self.drop)
        made = select(self.out, self.folder, selection)
        print_json(asdict(made)) if self.json else print(made)
        return 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records of which input files to keep."""

    glob: str | None
    """Select all records of the files that match; None: those in `records`."""
    records: dict[str, np.ndarray | None]
    """Records by file, sorted, uint64; None for all of a file."""
    drop: bool
    """Whether the selected records are removed, and not the others."""

    @classmethod
    def read(cls, path: Path, *, drop: bool) -> "Selection":
        """Read the records that a file lists.

        Raises:
            ConfigError: The file cannot be read, or a line is not a record.
        """
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(
                f"`--rows` {path}: {error.strerror}. Give an existing file."
            ) from None
        listed: dict[str, set[int] | None] = {}
        for number, line in enumerate(lines, 1):
            try:
                item = msgspec.convert(json.loads(line), _Listed)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"`--rows` {path}, line {number}: {error}. Expected an object like "
                    '{"file": "corpus/a.txt", "record": 0}.'
                ) from None
            known = listed.setdefault(item.file, set())
            if item.record is None:
                listed[item.file] = None
            elif known is not None:
                known.add(item.record)
        return cls(
            None,
            {
                file: None if records is None else np.array(sorted(records), np.uint64)
                for file, records in listed.items()
            },
            drop,
        )

    @property
    def count(self) -> int:
        """Number of listed records."""
        return sum(len(records) for records in self.records.values() if records is not None)

    def of(self, file: str) -> "_OfFile":
        """Return what is selected of an input file."""
        if self.glob is not None:
            records = None if fnmatch.fnmatchcase(file, self.glob) else np.empty(0, np.uint64)
        else:
            records = self.records.get(file, np.empty(0, np.uint64))
        return _OfFile(records, self.drop)


class _Listed(msgspec.Struct):
    file: str
    record: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None


class _OfFile(NamedTuple):
    """The selection in one input file."""

    records: np.ndarray | None
    drop: bool

    @property
    def selects_none(self) -> bool:
        """Whether no record is selected."""
        return self.records is not None and not len(self.records)

    @property
    def is_none(self) -> bool:
        """Whether no record is kept."""
        return self.records is None if self.drop else self.selects_none

    def kept(self, records: np.ndarray) -> np.ndarray:
        """Return which of some records are kept, bool."""
        if self.records is None:
            return np.full(len(records), not self.drop)
        selected: np.ndarray = np.isin(records, self.records) != self.drop
        return selected


@dataclass(frozen=True, slots=True)
class Selected(Derived):
    """A data set that `shards select` made."""

    removed: int
    """Records that are not in it any more, with those that had been rejected."""
    not_found: int
    """Listed records that the data set does not have."""

    def __str__(self) -> str:
        missing = f", {self.not_found:,} listed records not found" if self.not_found else ""
        return f"{Derived.__str__(self)}; {count_of(self.removed, 'record')} removed{missing}"


def select(path: str, to: str, selection: Selection) -> Selected:
    """Make a data set with the selected rows of another.

    Args:
        path: The data set.
        to: A new or empty folder.
        selection: The rows.

    Raises:
        ConfigError: Nothing was found of what is listed, no row is left, or the folder holds
            something else.
        ShardFormatError: A shard is damaged. The folder is not made then.
    """
    started = time.perf_counter()
    store = open_store(path)
    manifest = Manifest.read(store)
    check_folder(to, (SOURCES_FILE, REJECTS_FILE, *_names(manifest)))
    temporary = Path(f"{Path(to).absolute()}{TEMPORARY_SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a command that was killed
    try:
        work = _Work(store, manifest, selection, temporary)
        made, files, moves, not_found = work.done()
        with new_data_set(to, made, files, "shards select") as folder:
            linked = place([move for move in moves if move.store is store], folder)
            place([move for move in moves if move.store is not store], folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    figures = derived_figures(folder, made, linked, started)
    removed = (made.ledger.removed or 0) - (manifest.ledger.removed or 0)
    return Selected(**figures, removed=removed, not_found=not_found)


def _names(manifest: Manifest) -> Iterator[str]:
    """Yield the names that files of a selection can have."""
    yield manifest.tokenizer.file
    if manifest.chat_template:
        yield manifest.chat_template.file
    for split in manifest.splits.values():
        yield from (shard.file for shard in split.shards)


class _Unit(NamedTuple):
    """A shard, as the progress bar counts it."""

    split: str
    info: ShardInfo

    @property
    def weight_bytes(self) -> int:
        return self.info.bytes


class _Shard(NamedTuple):
    """What is left of a shard."""

    move: Move | None
    """The shard with the kept rows; None if none is kept."""
    kept: np.ndarray
    """Kept rows of each input file, int64."""
    removed_lengths: np.ndarray
    """Histogram of the lengths of removed rows."""
    removed_kinds: np.ndarray
    """Tokens of removed rows by kind, int64."""
    found: set[tuple[str, int]]
    """Listed records that the shard has."""


class _Listing(NamedTuple):
    """Listed records of input files, for a search without a loop over files: a file may be one
    row."""

    records: np.ndarray
    """Every listed record number, sorted, uint64, shape (R,)."""
    keys: np.ndarray
    """File number times R, plus the place of the record in `records`, sorted, int64."""

    @classmethod
    def of(cls, lists: list[np.ndarray | None]) -> "_Listing":
        """Make the listing of the records of each file; None lists all records, and none here."""
        parts = [np.empty(0, np.uint64) if each is None else each for each in lists]
        each_file = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        flat = np.concatenate([np.empty(0, np.uint64), *parts])
        records, places = np.unique(flat, return_inverse=True)
        return cls(records, np.sort(each_file * len(records) + places))

    def has(self, files: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Return which rows are listed, bool."""
        if not len(self.records):
            return np.zeros(len(files), bool)
        places = np.minimum(np.searchsorted(self.records, records), len(self.records) - 1)
        keys = files.astype(np.int64) * len(self.records) + places
        nearest = self.keys[np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)]
        listed: np.ndarray = (self.records[places] == records) & (nearest == keys)
        return listed


class _Work:
    """Reads the shards of a data set, and writes those that lose rows into a temporary folder."""

    def __init__(
        self, store: Store, manifest: Manifest, selection: Selection, temporary: Path
    ) -> None:
        self._store, self._manifest, self._temporary = store, manifest, temporary
        content = read_checked(store, manifest.sources)
        self._lines: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
        self._names: list[str] = [line["path"] for line in self._lines]
        self._of = {name: selection.of(name) for name in self._names}
        self._selection = selection
        self._is_whole = np.array([self._of[name].records is None for name in self._names], bool)
        self._listed = _Listing.of([self._of[name].records for name in self._names])

    def done(self) -> tuple[Manifest, dict[str, bytes], list[Move], int]:
        """Return the manifest, the files beside the shards, the shards, and the number of listed
        records that were not found."""
        manifest = self._manifest
        self._check_names()
        shards = self._shards()
        kept = sum((s.kept for each in shards.values() for s in each), self._no_rows()).tolist()
        found = set().union(*(s.found for each in shards.values() for s in each))
        gone = self._gone(kept)
        rejects, lost = self._rejects(gone, found)
        lines = self._sources(kept, gone, lost)
        files = {manifest.tokenizer.file: read_checked(self._store, manifest.tokenizer)}
        if manifest.chat_template:
            files[manifest.chat_template.file] = read_checked(self._store, manifest.chat_template)
        encoded = "".join(json.dumps(line) + "\n" for line in lines).encode()
        made = replace(
            manifest,
            splits=self._splits(shards),
            ledger=RecordCounts.of(lines),
            sources=side_file(files, SOURCES_FILE, encoded),
            rejects=side_file(files, REJECTS_FILE, rejects),
            counts=self._counts([shard for each in shards.values() for shard in each]),
            versions=None,
        )
        moves = [shard.move for each in shards.values() for shard in each if shard.move]
        return made, files, moves, self._selection.count - len(found)

    def _check_names(self) -> None:
        """Check that some input file is selected.

        Raises:
            ConfigError: No input file is.
        """
        if all(chosen.selects_none for chosen in self._of.values()):
            raise ConfigError(
                f"{self._store.name}: no input file is selected. `shards cat --json` prints the "
                "names of input files."
            )

    def _no_rows(self) -> np.ndarray:
        return np.zeros(len(self._names), np.int64)

    def _shards(self) -> dict[str, list[_Shard]]:
        """Return what is left of the shards of each split."""
        splits = self._manifest.splits
        units = [_Unit(name, info) for name, split in splits.items() for info in split.shards]
        with Bar(units) as bar:

            def do(unit: _Unit) -> _Shard:
                shard = self._shard(unit.info)
                bar.advance(Progress(unit.info.bytes, unit.info.tokens))
                bar.count_unit()
                return shard

            done = results_of(do, units, AT_ONCE)
            made: dict[str, list[_Shard]] = {name: [] for name in splits}
            for unit, shard in zip(units, done, strict=True):
                made[unit.split].append(shard)
        return made

    def _shard(self, info: ShardInfo) -> _Shard:
        """Read a shard, and write it again if it loses rows."""
        store, manifest = self._store, self._manifest
        only = (INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD)
        reader = ShardReader.open(store, manifest, info, only=only)
        masks: list[np.ndarray] = []
        counts, found = self._no_rows(), set[tuple[str, int]]()
        for batch in range(info.batches):
            rows, _ = reader.read(batch)
            masks.append(self._kept(rows, found))
            files = rows.per_row[ORIGIN_FILE][masks[-1]]
            counts += np.bincount(files, minlength=len(counts))
        lengths, kinds = length_histogram(np.empty(0)), np.zeros(len(Kind), np.int64)
        if all(mask.all() for mask in masks):
            return _Shard(Move(store, info, info), counts, lengths, kinds, found)
        reader, move = ShardReader.open(store, manifest, info), None
        with ExitStack() as stack:
            writer = None
            if counts.any():
                size = manifest.tokenizer.vocabulary_size
                writer = ShardWriter(self._temporary, info.file, size, manifest.columns)
                stack.enter_context(writer)
            for batch, mask in enumerate(masks):
                rows, _ = reader.read(batch)
                removed = rows.where(~mask)
                lengths = lengths + length_histogram(removed.lengths)
                if KINDS in removed.per_token:
                    own = kinds_of(removed.per_token[KINDS])
                    kinds += np.bincount(own, minlength=len(kinds))
                if writer:
                    writer.append(rows.where(mask))
        if writer and writer.info:
            folder = LocalStore.from_path(self._temporary)
            move = Move(folder, writer.info, writer.info)
        return _Shard(move, counts, lengths, kinds, found)

    def _kept(self, rows: Rows, found: set[tuple[str, int]]) -> np.ndarray:
        """Return which rows are kept, and add the listed records among all rows to `found`."""
        files, records = rows.per_row[ORIGIN_FILE], rows.per_row[ORIGIN_RECORD]
        is_listed = self._listed.has(files, records)
        for row in np.flatnonzero(is_listed).tolist():
            found.add((self._names[files[row]], int(records[row])))
        kept: np.ndarray = (self._is_whole[files] | is_listed) != self._selection.drop
        return kept

    def _splits(self, shards: dict[str, list[_Shard]]) -> dict[str, SplitInfo]:
        """Return the splits that have rows, and `train`.

        Raises:
            ConfigError: No row is left.
        """
        splits: dict[str, SplitInfo] = {}
        for name, split in self._manifest.splits.items():
            infos = tuple(shard.move.after for shard in shards[name] if shard.move)
            lengths = np.array(split.length_histogram)
            for shard in shards[name]:
                lengths = lengths - shard.removed_lengths
            if infos or name == "train":
                splits[name] = SplitInfo(shards=infos, length_histogram=tuple(lengths.tolist()))
        if not any(split.shards for split in splits.values()):
            raise ConfigError(f"{self._store.name}: no row would be left. Select others.")
        return splits

    def _gone(self, kept: list[int]) -> set[str]:
        """Return the input files of which no row stays, and none may stay."""
        written, left = Counter[str](), Counter[str]()
        for name, line, count in zip(self._names, self._lines, kept, strict=True):
            written[name] += line["written"]
            left[name] += count
        without = {name for name in self._of if written[name] and not left[name]}
        return without | {name for name, chosen in self._of.items() if chosen.is_none}

    def _rejects(self, gone: set[str], found: set[tuple[str, int]]) -> tuple[bytes, Counter[str]]:
        """Return the lines of rejects.jsonl that stay, and how many go, by input file. Add the
        listed records among all lines to `found`."""
        lost, lines = Counter[str](), []
        for line in read_checked(self._store, self._manifest.rejects).splitlines():
            reject = json.loads(line)
            name, record = reject["file"], np.array([reject["record"]], np.uint64)
            chosen = self._selection.of(name)
            if chosen.records is not None and np.isin(record, chosen.records)[0]:
                found.add((name, reject["record"]))
            if name in gone or not chosen.kept(record)[0]:
                lost[name] += 1
            else:
                lines.append(line + b"\n")
        return b"".join(lines), lost

    def _sources(self, kept: list[int], gone: set[str], lost: Counter[str]) -> list[dict[str, Any]]:
        """Return the lines of sources.jsonl. Input files of which nothing stays lose their names.
        Their lines stay, because shards refer to line numbers."""
        lines = []
        for name, line, written in zip(self._names, self._lines, kept, strict=True):
            fewer = min(lost[name], line["rejected"])  # two lines may have the same name
            lost[name] -= fewer
            removed = line.get("removed", 0) + line["written"] - written + fewer
            new = {**line, "written": written, "rejected": line["rejected"] - fewer}
            if name in gone:
                new = {"path": "", "bytes": 0} | {key: new[key] for key in _KEPT_COUNTS}
            lines.append(new | ({"removed": removed} if removed else {}))
        return lines

    def _counts(self, shards: list[_Shard]) -> dict[str, int] | None:
        """Return the counts of conversations that are known. Shards have the kinds of tokens, but
        not what else `pretokenize` counted."""
        counts = self._manifest.counts
        removed = sum((shard.removed_kinds for shard in shards), np.zeros(len(Kind), np.int64))
        if counts is None:
            return None
        if not removed.any():
            return {name: count for name, count in counts.items() if name != FIM_ROWS} or None
        less = {f"{kind.label}_tokens": int(removed[kind]) for kind in Kind}
        return {name: count - less[name] for name, count in counts.items() if name in less}
