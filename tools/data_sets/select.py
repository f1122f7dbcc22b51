"""`shards select OUT NEW`: a data set with some of the rows of another, or without some of them.

Every shard is read once. A shard that loses no row becomes a hard link. The others are written
again without the rows that were not selected. Nothing of these rows stays in the
new folder: input files without rows lose their names in sources.jsonl, and lines of rejects.jsonl
go with their records. The manifest counts what was removed. All files are written into a temporary
folder, which gets its name when they are complete.
"""

import fnmatch
import json
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
    REJECTS_FILE,
    SOURCES_FILE,
    Manifest,
    RecordCounts,
    ShardInfo,
    SplitInfo,
    file_info,
    length_histogram,
    read_checked,
)
from tokenfeed.pipeline.format.schema import INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.shard_writer import ShardWriter
from tokenfeed.pipeline.format.storage import atomic_folder
from tokenfeed.pipeline.format.store import LocalStore, Store, open_place, open_store
from tokenfeed.pipeline.planning.permutation import GOLDEN, mix64
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.pipeline.text import count_of
from tokenfeed.tools.data_sets.cat import DataSet
from tokenfeed.tools.data_sets.copy import AT_ONCE, fetch
from tokenfeed.tools.jobs.crew import Done
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

_KEPT_COUNTS = ("read", "written", "empty", "rejected")


@dataclass(frozen=True, kw_only=True, slots=True)
class Select:
    """Make a data set with some rows of another, or without some of them. Shards that lose no row
    become hard links."""

    out: DataSet
    """Output folder of `pretokenize`, or its address in a store."""
    folder: Annotated[str, text("NEW")]
    """A new or empty folder."""
    where: Annotated[str, text("RULE")] | None = None
    """Keep the rows that a rule selects, in quotes: 'origin GLOB', the rows of input files whose
    path matches GLOB (`*` also matches `/`), or 'share 0.1', about a tenth of all rows, the same
    in every call."""
    rows: Annotated[Path, msgspec.Meta(title="FILE", description="a path")] | None = None
    """Keep the rows that a JSON Lines file lists. Each line is an object with `file` and `record`,
    as `shards cat --json` prints it. An object with `file` alone selects all rows of that file.
    `source` selects one of several input files with the same name."""
    drop: bool = False
    """Remove the selected rows instead, and keep all others."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Select the rows."""
        if (self.where is None) == (self.rows is None):
            raise ConfigError("expected `--where RULE` or `--rows FILE`, one of both.")
        if self.rows:
            selection = Selection.read(self.rows, drop=self.drop)
        else:
            selection = Selection.by_rule(str(self.where), drop=self.drop)
        made = select(self.out, self.folder, selection)
        print_json(asdict(made)) if self.json else print(made)
        return 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records of which input files to keep."""

    glob: str | None
    """Select all records of the files that match; None: those in `listed` and of the share."""
    listed: dict[tuple[str, int | None], set[int] | None]
    """Records by the name of the file and its line in sources.jsonl. A line of None selects all
    files of this name; records of None, all of a file."""
    drop: bool
    """Whether the selected records are removed, and not the others."""
    share: float = 0.0
    """Select about this share of all records, by a hash of their places."""

    @classmethod
    def by_rule(cls, rule: str, *, drop: bool) -> "Selection":
        """Return the selection of `--where`.

        Raises:
            ConfigError: There is no such rule.
        """
        kind, _, value = rule.partition(" ")
        if kind == "origin" and value:
            return cls(value, {}, drop)
        with suppress(ValueError):
            if kind == "share" and 0 < (share := float(value)) < 1:
                return cls(None, {}, drop, share)
        raise ConfigError(f"`--where` {rule}: expected 'origin GLOB' or 'share 0.1'.")

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
        listed: dict[tuple[str, int | None], set[int] | None] = {}
        for number, line in enumerate(lines, 1):
            try:
                item = msgspec.convert(json.loads(line), _Listed)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"`--rows` {path}, line {number}: {error}. Expected an object like "
                    '{"file": "corpus/a.txt", "record": 0}.'
                ) from None
            key = item.file, item.source
            known = listed.setdefault(key, set())
            if item.record is None:
                listed[key] = None
            elif known is not None:
                known.add(item.record)
        return cls(None, listed, drop)

    def is_whole(self, file: str, line: int) -> bool:
        """Return whether all records of an input file are selected."""
        if self.glob is not None:
            return fnmatch.fnmatchcase(file, self.glob)
        return any(self.listed.get((file, source), ()) is None for source in (None, line))


_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Listed(msgspec.Struct):
    file: str
    record: _Number | None = None
    source: _Number | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """A data set that `shards select` made."""

    to: str
    fingerprint: str
    rows: int
    tokens: int
    shards: int
    linked: int
    """Shards that share their bytes with the data set that they come from."""
    seconds: float
    removed: int
    """Records that are not in it any more, with those that had been rejected."""
    not_found: int
    """Listed records, and whole files, that the data set does not have."""

    def __str__(self) -> str:
        missing = (
            f", {self.not_found:,} listed records or files not found" if self.not_found else ""
        )
        return (
            f"{self.to}: {count_of(self.rows, 'row')}, {self.tokens:,} tokens, "
            f"{count_of(self.shards, 'shard')}, {self.linked:,} of them hard links; "
            f"{count_of(self.removed, 'record')} removed{missing}"
        )


def select(path: str, to: str, selection: Selection) -> Selected:
    """Make a data set with selected rows of another.

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
    chosen = _Chosen(store, _lines(store, manifest), selection)
    folder = _new_folder(to)
    with atomic_folder(folder) as work:
        left = _left_of(chosen, store, manifest, work)
        made, files = _described(store, manifest, chosen, left)
        for name, content in files.items():
            (work / name).write_bytes(content)
    return Selected(
        to=str(folder),
        fingerprint=made.fingerprint,
        rows=sum(split.rows for split in made.splits.values()),
        tokens=sum(split.tokens for split in made.splits.values()),
        shards=sum(len(split.shards) for split in made.splits.values()),
        linked=sum(shard.is_linked for shards in left.values() for shard in shards),
        seconds=round(time.perf_counter() - started, 3),
        removed=(made.ledger.removed or 0) - (manifest.ledger.removed or 0),
        not_found=chosen.not_found,
    )


def _new_folder(to: str) -> Path:
    """Return the folder of a new data set.

    Raises:
        ConfigError: The folder holds something, or is in a store or in a data set.
    """
    place = open_place(to)
    if not isinstance(place, LocalStore):
        raise ConfigError(
            f"{to}: is not a folder of this machine. Give a folder, then run `shards copy`."
        )
    if others := sorted(place.names()):
        raise ConfigError(
            f"{to}: already holds other data ({others[0]}). Give a new or empty folder."
        )
    for parent in place.folder.resolve().parents:
        if all((parent / name).exists() for name in (MANIFEST_FILE, SOURCES_FILE)):
            raise ConfigError(f"{to}: lies in the data set {parent}. Give a folder outside of it.")
    return place.folder


def _lines(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    """Return the lines of sources.jsonl."""
    content = read_checked(store, manifest.sources)
    return [json.loads(line) for line in content.splitlines()]


class _Chosen:
    """A selection among the rows of a data set. Nothing loops over input files per row or batch: a
    file may be one row."""

    def __init__(self, store: Store, lines: list[dict[str, Any]], selection: Selection) -> None:
        self.lines = lines
        self.names: list[str] = [line["path"] for line in lines]
        self.drop = selection.drop
        self.lines_of: dict[str, list[int]] = {}
        """The lines of each name. Several files may have the same name."""
        for number, name in enumerate(self.names):
            self.lines_of.setdefault(name, []).append(number)
        whole = [selection.is_whole(name, number) for number, name in enumerate(self.names)]
        self._is_whole = np.array(whole, bool)
        listed = [
            (file, line, record)
            for (file, line), records in selection.listed.items()
            for record in records or ()
        ]
        keys = np.array(
            [
                (complex(number, record), entry)
                for entry, (file, line, record) in enumerate(listed)
                for number in self.lines_of.get(file, ())
                if line in (None, number)
            ],
            [("key", np.complex128), ("entry", np.int64)],
        )
        keys = keys[np.argsort(keys["key"])]
        self._keys = np.append(keys["key"], np.inf)
        """Listed records, sorted: line + record * 1j. The record of a row is below 2**53, so it is
        exact. With infinity at the end, every search finds an entry."""
        missing = [
            file
            for (file, line), records in selection.listed.items()
            if records is None
            and not any(line in (None, number) for number in self.lines_of.get(file, ()))
        ]
        self._entries, self._num_listed = keys["entry"], len(listed) + len(missing)
        self._found = np.zeros(len(self._keys), bool)
        self._threshold = np.uint64(int(selection.share * 2**64))
        if not len(keys) and not self._is_whole.any() and not selection.share:
            raise ConfigError(
                f"{store.name}: no input file is selected. `shards cat --json` prints the "
                "names of input files."
            )

    @property
    def not_found(self) -> int:
        """Number of listed records that `kept` has not met, and of files without a line."""
        return self._num_listed - len(np.unique(self._entries[self._found[:-1]]))

    def kept(self, files: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Return which records stay, bool, by the lines of their input files."""
        keys = files + 1j * records
        places = np.searchsorted(self._keys, keys)
        is_listed = self._keys[places] == keys
        self._found[places[is_listed]] = True
        selected = self._is_whole[files] | is_listed
        if self._threshold:
            of_files = mix64(files.astype(np.uint64) + np.uint64(GOLDEN))
            selected |= mix64(of_files ^ records.astype(np.uint64)) < self._threshold
        kept: np.ndarray = selected != self.drop
        return kept

    def gone(self, rows_left: np.ndarray) -> np.ndarray:
        """Return the input files of which no row stays, and none may stay; bool."""
        written = np.array([line["written"] for line in self.lines])
        lines = np.arange(len(self.names))
        is_selected = self._is_whole | np.isin(lines, np.real(self._keys[:-1]))
        is_selected |= self._threshold > 0
        may_not_stay = self._is_whole if self.drop else ~is_selected
        gone: np.ndarray = may_not_stay | ((written > 0) & (rows_left == 0))
        return gone


class _Left(NamedTuple):
    """What is left of a shard in a new data set."""

    info: ShardInfo | None
    """The shard with the kept rows: the same if all are kept, None if none is."""
    is_linked: bool
    """Whether it shares its bytes with the shard that it was made of."""
    files: np.ndarray
    """Input files of the kept rows, ascending."""
    rows: np.ndarray
    """Kept rows of each of `files`."""
    histogram: np.ndarray
    """Kept rows by length."""


def _left_of(
    chosen: _Chosen, store: Store, manifest: Manifest, work: Path
) -> dict[str, list[_Left]]:
    """Put what is left of the shards of each split into a folder, and return it."""
    splits = manifest.splits
    shards = [(name, info) for name, split in splits.items() for info in split.shards]
    left: dict[str, list[_Left]] = {name: [] for name in splits}
    with Bar([info.bytes for _, info in shards]) as bar:

        def do(shard: tuple[str, ShardInfo]) -> _Left:
            of_shard = _left(chosen, store, manifest, work, shard[1])
            bar.advance(Done(shard[1].bytes, shard[1].tokens))
            bar.count_unit()
            return of_shard

        for (name, _), of_shard in zip(shards, results_of(do, shards, AT_ONCE), strict=True):
            left[name].append(of_shard)
    return left


def _left(chosen: _Chosen, store: Store, manifest: Manifest, work: Path, info: ShardInfo) -> _Left:
    """Read a shard. Link it if it keeps all of its rows, and write it again if it keeps some."""
    only = (INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD)
    reader = ShardReader.open(store, manifest, info, only=only)
    masks: list[np.ndarray] = []
    files: list[np.ndarray] = []
    histogram = length_histogram(np.empty(0))
    for batch in range(info.batches):
        rows, _ = reader.read(batch)
        origins = rows.per_row[ORIGIN_FILE]
        mask = chosen.kept(origins, rows.per_row[ORIGIN_RECORD])
        masks.append(mask)
        files.append(origins[mask])
        histogram += length_histogram(rows.lengths[mask])
    kept_files, kept_rows = np.unique(np.concatenate(files), return_counts=True)
    made: ShardInfo | None = None
    is_linked = False
    if all(mask.all() for mask in masks):
        made, is_linked = info, _link(info, store, work / info.file)
    elif len(kept_files):
        size = manifest.tokenizer.vocabulary_size
        reader = ShardReader.open(store, manifest, info)
        with ShardWriter(work, info.file, size, manifest.columns) as writer:
            for batch, mask in enumerate(masks):
                rows, _ = reader.read(batch)
                writer.append(rows.where(mask))
        made = writer.info
    return _Left(made, is_linked, kept_files, kept_rows, histogram)


def _link(info: ShardInfo, store: Store, path: Path) -> bool:
    """Make a hard link to a shard, or a copy if that is impossible. Return whether it is a link."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(store, LocalStore):
        with suppress(OSError):  # another disk, or a file system without links
            os.link((store.folder / info.file).resolve(), path)
            return True
    fetch(info, store, path)
    return False


def _described(
    store: Store, manifest: Manifest, chosen: _Chosen, left: dict[str, list[_Left]]
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest, and the files beside the shards by name.

    Raises:
        ConfigError: No row is left.
    """
    splits: dict[str, SplitInfo] = {}
    for name in manifest.splits:
        shards = tuple(shard.info for shard in left[name] if shard.info)
        histogram = sum((s.histogram for s in left[name]), length_histogram(np.empty(0)))
        if shards or name == "train":
            splits[name] = SplitInfo(shards=shards, length_histogram=tuple(histogram.tolist()))
    if not any(split.shards for split in splits.values()):
        raise ConfigError(f"{store.name}: no row would be left. Select others.")
    every = [shard for shards in left.values() for shard in shards]
    rows_left = np.zeros(len(chosen.names), np.int64)
    for shard in every:
        rows_left[shard.files] += shard.rows
    is_gone = chosen.gone(rows_left)
    rejects, lost = _rejects(read_checked(store, manifest.rejects), chosen, is_gone)
    lines = _sources(chosen, rows_left, is_gone, lost)
    sources = "".join(json.dumps(line) + "\n" for line in lines).encode()
    same = [info for info in (manifest.tokenizer, manifest.chat_template) if info]
    files = {info.file: read_checked(store, info) for info in same}
    made = replace(
        manifest,
        splits=splits,
        ledger=RecordCounts.of(lines),
        sources=file_info(SOURCES_FILE, sources),
        rejects=file_info(REJECTS_FILE, rejects),
        counts=manifest.counts if lines == chosen.lines else None,  # not known of some rows
    )
    files |= {SOURCES_FILE: sources, REJECTS_FILE: rejects, MANIFEST_FILE: made.encoded()}
    return made, files


def _rejects(content: bytes, chosen: _Chosen, is_gone: np.ndarray) -> tuple[bytes, Counter[str]]:
    """Return the lines of rejects.jsonl that stay, and how many go, by input file."""
    lines = content.splitlines(keepends=True)
    rejects = [json.loads(line) for line in lines]
    stays: list[bool] = []
    for reject in rejects:
        if "record" not in reject:  # a file that was left out
            stays.append(False)
            continue
        files = np.array(chosen.lines_of[reject["file"]])  # of several files, all must stay
        kept = chosen.kept(files, np.full(len(files), reject["record"]))
        stays.append(bool((kept & ~is_gone[files]).all()))
    pairs = zip(rejects, stays, strict=True)
    lost = Counter(reject["file"] for reject, kept in pairs if not kept and "record" in reject)
    return b"".join(line for line, kept in zip(lines, stays, strict=True) if kept), lost


def _sources(
    chosen: _Chosen, rows_left: np.ndarray, is_gone: np.ndarray, lost: Counter[str]
) -> list[dict[str, Any]]:
    """Return the lines of sources.jsonl. Input files of which nothing stays lose their names.
    Their lines stay, because shards refer to line numbers."""
    lines = []
    for line, written, gone in zip(chosen.lines, rows_left.tolist(), is_gone.tolist(), strict=True):
        fewer = min(lost[line["path"]], line["rejected"])  # two lines may have the same name
        lost[line["path"]] -= fewer
        removed = line.get("removed", 0) + line["written"] - written + fewer
        new = {**line, "written": written, "rejected": line["rejected"] - fewer}
        if gone:
            kept = (key for key in (*_KEPT_COUNTS, "left_out") if key in new)
            new = {"path": "", "bytes": 0} | {key: new[key] for key in kept}
        lines.append(new | ({"removed": removed} if removed else {}))
    return lines
