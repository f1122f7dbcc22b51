"""`shards select OUT NEW`: a data set with some of the rows of another, or without some of them.

Every shard is read once. A shard that loses no row becomes a hard link. The others are written
again without the rows that were not selected. Nothing of these rows stays in the new folder: input
files without rows lose their names in sources.jsonl, and lines of rejects.jsonl go with their
records. The manifest counts what was removed.
"""

import fnmatch
import json
from collections import Counter
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
from tokenfeed.pipeline.format.schema import INPUT_IDS, KINDS, ORIGIN_FILE, ORIGIN_RECORD
from tokenfeed.pipeline.format.shard import ShardReader, ShardWriter
from tokenfeed.pipeline.format.store import Store, open_store
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.data_sets.cat import DataSet
from tokenfeed.tools.data_sets.copy import AT_ONCE, Move
from tokenfeed.tools.data_sets.derived import Derived, Files, new_data_set
from tokenfeed.tools.encoding.fim import FIM_ROWS
from tokenfeed.tools.jobs.crew import Progress
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

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
    where: Annotated[str, text("RULE")] | None = None
    """Keep the rows that a rule selects. The rule 'origin GLOB', in quotes, selects the rows of
    input files whose path matches GLOB. `*` also matches `/`."""
    rows: Annotated[Path, msgspec.Meta(title="FILE", description="a path")] | None = None
    """Keep the rows that a JSON Lines file lists. Each line is an object with `file` and `record`,
    as `shards cat --json` prints it. An object with `file` alone selects all rows of that file."""
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
    """Select all records of the files that match; None: those in `listed`."""
    listed: dict[str, set[int] | None]
    """Records by file; None for all of a file."""
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
        return cls(None, listed, drop)

    def is_whole(self, file: str) -> bool:
        """Return whether all records of an input file are selected."""
        if self.glob is not None:
            return fnmatch.fnmatchcase(file, self.glob)
        return self.listed.get(file, ()) is None


class _Listed(msgspec.Struct):
    file: str
    record: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None


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
    store = open_store(path)
    manifest = Manifest.read(store)
    chosen = _Chosen(store, manifest, selection)
    files = Files.of_tokenizer(store, manifest)
    names = (SOURCES_FILE, REJECTS_FILE, *files, *manifest.splits)
    with new_data_set(to, "shards select", manifest.fingerprint, names) as new:
        left = _left_of(store, manifest, chosen, new.work)
        made = _described(store, manifest, chosen, left, files)
        infos = {info for split in manifest.splits.values() for info in split.shards}
        moves = [
            Move(store, info, info)
            for split in made.splits.values()
            for info in split.shards
            if info in infos
        ]
        derived = new.finish(made, files, moves)
    removed = (made.ledger.removed or 0) - (manifest.ledger.removed or 0)
    return Selected(**asdict(derived), removed=removed, not_found=chosen.not_found)


class _Chosen:
    """A selection among the rows of a data set. Nothing loops over input files per row or batch: a
    file may be one row."""

    def __init__(self, store: Store, manifest: Manifest, selection: Selection) -> None:
        content = read_checked(store, manifest.sources)
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
        self.names: list[str] = [line["path"] for line in self.lines]
        self.drop = selection.drop
        self.number_of = {name: n for n, name in reversed([*enumerate(self.names)])}
        """The first line of each name. Lines of a merged data set may have the same name."""
        self._numbers = np.array([self.number_of[name] for name in self.names], np.int64)
        whole = {name: selection.is_whole(name) for name in self.number_of}
        self._is_whole = np.array([whole[name] for name in self.names], bool)
        listed = {name: records for name, records in selection.listed.items() if records}
        keys = [
            complex(self.number_of[name], record)
            for name, records in listed.items()
            if name in self.number_of
            for record in records
        ]
        self._keys = np.append(np.sort(np.array(keys, np.complex128)), np.inf)
        """Listed records, sorted: file + record * 1j. The record of a row is below 2**53, so it is
        exact. With infinity at the end, every search finds an entry."""
        self._found = np.zeros(len(self._keys), bool)
        self._num_listed = sum(map(len, listed.values()))
        if not keys and not self._is_whole.any():
            raise ConfigError(
                f"{store.name}: no input file is selected. `shards cat --json` prints the "
                "names of input files."
            )

    @property
    def not_found(self) -> int:
        """Number of listed records that `kept` has not met."""
        return self._num_listed - int(self._found.sum())

    def kept(self, files: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Return which records stay, bool, by the numbers of their input files."""
        keys = self._numbers[files] + 1j * records
        places = np.searchsorted(self._keys, keys)
        is_listed = self._keys[places] == keys
        self._found[places[is_listed]] = True
        kept: np.ndarray = (self._is_whole[files] | is_listed) != self.drop
        return kept

    def gone(self, rows_left: np.ndarray) -> np.ndarray:
        """Return the input files of which no row stays, and none may stay; bool."""
        numbers, size = self._numbers, len(self.names)
        written = np.bincount(numbers, [line["written"] for line in self.lines], size)
        left = np.bincount(numbers, rows_left, size)
        is_selected = self._is_whole | np.isin(numbers, np.real(self._keys[:-1]))
        may_not_stay = self._is_whole if self.drop else ~is_selected
        gone: np.ndarray = may_not_stay | ((written > 0) & (left == 0))[numbers]
        return gone


class _Left(NamedTuple):
    """What is left of a shard."""

    info: ShardInfo | None
    """The shard with the kept rows: the same if all are kept, None if none is."""
    kept: np.ndarray
    """Kept rows of each input file."""
    removed_lengths: np.ndarray
    """Histogram of the lengths of removed rows."""
    removed_kinds: np.ndarray
    """Tokens of removed rows by kind, int64."""


def _left_of(
    store: Store, manifest: Manifest, chosen: _Chosen, work: Path
) -> dict[str, list[_Left]]:
    """Return what is left of the shards of each split. Shards that lose rows are written into
    `work`."""
    shards = [(name, info) for name, split in manifest.splits.items() for info in split.shards]
    with Bar([info.bytes for _, info in shards]) as bar:

        def do(shard: tuple[str, ShardInfo]) -> _Left:
            left = _left(store, manifest, chosen, shard[1], work)
            bar.advance(Progress(shard[1].bytes, shard[1].tokens))
            bar.count_unit()
            return left

        done: dict[str, list[_Left]] = {name: [] for name in manifest.splits}
        for (name, _), left in zip(shards, results_of(do, shards, AT_ONCE), strict=True):
            done[name].append(left)
    return done


def _left(store: Store, manifest: Manifest, chosen: _Chosen, info: ShardInfo, work: Path) -> _Left:
    """Read a shard, and write it again if it loses rows."""
    only = (INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD)
    reader = ShardReader.open(store, manifest, info, only=only)
    masks: list[np.ndarray] = []
    counts = np.zeros(len(chosen.names), np.int64)
    for batch in range(info.batches):
        origins = reader.read(batch)[0].per_row
        masks.append(chosen.kept(origins[ORIGIN_FILE], origins[ORIGIN_RECORD]))
        counts += np.bincount(origins[ORIGIN_FILE][masks[-1]], minlength=len(counts))
    lengths, kinds = length_histogram(np.empty(0)), np.zeros(len(Kind), np.int64)
    if all(mask.all() for mask in masks):
        return _Left(info, counts, lengths, kinds)
    reader = ShardReader.open(store, manifest, info)
    with ExitStack() as stack:
        writer = None
        if counts.any():
            size = manifest.tokenizer.vocabulary_size
            writer = ShardWriter(work, info.file, size, manifest.columns)
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
    return _Left(writer.info if writer else None, counts, lengths, kinds)


def _described(
    store: Store,
    manifest: Manifest,
    chosen: _Chosen,
    left: dict[str, list[_Left]],
    files: Files,
) -> Manifest:
    """Return the manifest, and add sources.jsonl and rejects.jsonl to `files`.

    Raises:
        ConfigError: No row is left.
    """
    splits: dict[str, SplitInfo] = {}
    for name, split in manifest.splits.items():
        shards = tuple(shard.info for shard in left[name] if shard.info)
        removed_lengths = sum(shard.removed_lengths for shard in left[name])
        histogram = np.array(split.length_histogram) - removed_lengths
        if shards or name == "train":
            splits[name] = SplitInfo(shards=shards, length_histogram=tuple(histogram.tolist()))
    if not any(split.shards for split in splits.values()):
        raise ConfigError(f"{store.name}: no row would be left. Select others.")
    every = [shard for shards in left.values() for shard in shards]
    rows_left = sum((shard.kept for shard in every), np.zeros(len(chosen.names), np.int64))
    is_gone = chosen.gone(rows_left)
    rejects, lost = _rejects(read_checked(store, manifest.rejects), chosen, is_gone)
    lines = _sources(chosen, rows_left, is_gone, lost)
    encoded = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return replace(
        manifest,
        splits=splits,
        ledger=RecordCounts.of(lines),
        sources=files.add(SOURCES_FILE, encoded),
        rejects=files.add(REJECTS_FILE, rejects),
        counts=_counts(manifest.counts, np.sum([shard.removed_kinds for shard in every], axis=0)),
        versions=None,
    )


def _rejects(content: bytes, chosen: _Chosen, is_gone: np.ndarray) -> tuple[bytes, Counter[str]]:
    """Return the lines of rejects.jsonl that stay, and how many go, by input file."""
    lines = content.splitlines(keepends=True)
    rejects = [json.loads(line) for line in lines]
    files = np.array([chosen.number_of[reject["file"]] for reject in rejects], np.int64)
    records = np.array([reject["record"] for reject in rejects], np.uint64)
    stays = (chosen.kept(files, records) & ~is_gone[files]).tolist()
    lost = Counter(reject["file"] for reject, kept in zip(rejects, stays, strict=True) if not kept)
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
            new = {"path": "", "bytes": 0} | {key: new[key] for key in _KEPT_COUNTS}
        lines.append(new | ({"removed": removed} if removed else {}))
    return lines


def _counts(counts: dict[str, int] | None, removed: np.ndarray) -> dict[str, int] | None:
    """Return the counts of conversations that are known. Shards have the kinds of tokens, but
    not what else `pretokenize` counted."""
    if counts is None:
        return None
    if not removed.any():
        return {name: count for name, count in counts.items() if name != FIM_ROWS} or None
    less = {f"{kind.label}_tokens": int(removed[kind]) for kind in Kind}
    return {name: count - less[name] for name, count in counts.items() if name in less}
