"""`shards select OUT NEW`: a data set with some of the rows of another, or without some of them.
`shards split OUT PARTS`: a data set of each folder of its input files.

Every shard is read once for all new data sets. A shard that loses no row becomes a hard link. The
others are written again without the rows that were not selected. Nothing of these rows stays in the
new folder: input files without rows lose their names in sources.jsonl, and lines of rejects.jsonl
go with their records. The manifest counts what was removed.
"""

import fnmatch
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tokenfeed.pipeline.errors import ConfigError
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
from tokenfeed.pipeline.format.schema import INPUT_IDS, KINDS, ORIGIN_FILE, ORIGIN_RECORD, Rows
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.format.shard_writer import ShardWriter
from tokenfeed.pipeline.format.store import Store, open_store
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.pipeline.text import count_of
from tokenfeed.tools.data_sets.cat import DataSet
from tokenfeed.tools.data_sets.copy import AT_ONCE, Move
from tokenfeed.tools.data_sets.derived import Derived, Files, NewDataSet, new_data_set
from tokenfeed.tools.encoding.fim import FIM_ROWS
from tokenfeed.tools.jobs.crew import Progress
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

_ORIGIN, _TOP = "origin ", "_top"
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
    as `shards cat --json` prints it. An object with `file` alone selects all rows of that file.
    `source` selects one of several input files with the same name."""
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
        [made] = select(self.out, {self.folder: selection})
        print_json(asdict(made)) if self.json else print(made)
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Make a data set of each folder of the input files, so that each folder can have a weight in
    training. Shards with the rows of one folder become hard links."""

    out: DataSet
    """Output folder of `pretokenize`, or its address in a store."""
    folder: Annotated[str, text("PARTS")]
    """The folder of the new data sets. Each is named after a folder of input files, at the
    first level where their paths differ: corpus/web and corpus/books become web and books. Rows of
    files above this level are in `_top`."""
    json: bool = False
    """Print the results as JSON."""

    def run(self) -> int:
        """Split the data set."""
        store = open_store(self.out)
        lines = [line for line in _lines(store, Manifest.read(store)) if line["path"]]
        folders = _folders_of([line["path"] for line in lines])
        pairs = list(zip(lines, folders, strict=True))
        parts = {
            f"{self.folder}/{folder}": Selection(None, {}, drop=False)
            for folder in sorted({folder for line, folder in pairs if line["written"]})
        }
        if len(parts) < 2:
            raise ConfigError(f"{store.name}: all its rows come from one folder. Use it whole.")
        for line, folder in pairs:
            if part := parts.get(f"{self.folder}/{folder}"):
                part.listed[line["path"], None] = None
        made = select(self.out, parts)
        print_json([asdict(each) for each in made]) if self.json else print(*made, sep="\n")
        return 0


def _folders_of(files: Sequence[str]) -> list[str]:
    """Return the folder of each input file: the first one in which their paths differ."""
    paths = [file.split("/")[:-1] for file in files]
    common = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))))
    names = ["".join(path[common : common + 1]) for path in paths]
    return [_TOP if name in ("", ".", "..") else name for name in names]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records of which input files to keep."""

    glob: str | None
    """Select all records of the files that match; None: those in `listed`."""
    listed: dict[tuple[str, int | None], set[int] | None]
    """Records by the name of the file and its line in sources.jsonl. A line of None selects all
    files of this name; records of None, all of a file."""
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


def select(path: str, selections: Mapping[str, Selection]) -> list[Selected]:
    """Make data sets with selected rows of another.

    Args:
        path: The data set.
        selections: The rows of each new data set, by its folder, which is new or empty.

    Raises:
        ConfigError: Nothing was found of what is listed, no row is left, or a folder holds
            something else.
        ShardFormatError: A shard is damaged. No folder is made then.
    """
    store = open_store(path)
    manifest = Manifest.read(store)
    lines = _lines(store, manifest)
    tokenizer = Files.of_tokenizer(store, manifest)
    names = (SOURCES_FILE, REJECTS_FILE, *tokenizer, *manifest.splits)
    parts: list[_Part] = []
    made: list[Selected] = []
    with ExitStack() as stack:
        for to, selection in selections.items():
            chosen = _Chosen(store, lines, selection)
            new = stack.enter_context(
                new_data_set(to, "shards select", manifest.fingerprint, names)
            )
            parts.append(_Part(chosen, new))
        infos = {info for split in manifest.splits.values() for info in split.shards}
        for part, left in zip(parts, _left_of(store, manifest, parts), strict=True):
            files = Files(tokenizer)
            described = _described(store, manifest, part.chosen, left, files)
            moves = [
                Move(store, info, info)
                for split in described.splits.values()
                for info in split.shards
                if info in infos
            ]
            derived = part.new.finish(described, files, moves)
            removed = (described.ledger.removed or 0) - (manifest.ledger.removed or 0)
            not_found = part.chosen.not_found
            made.append(Selected(**asdict(derived), removed=removed, not_found=not_found))
    return made


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
        """The lines of each name. Appended and merged files may have the same name."""
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
        self._entries, self._num_listed = keys["entry"], len(listed)
        self._found = np.zeros(len(self._keys), bool)
        if not len(keys) and not self._is_whole.any():
            raise ConfigError(
                f"{store.name}: no input file is selected. `shards cat --json` prints the "
                "names of input files."
            )

    @property
    def not_found(self) -> int:
        """Number of listed records that `kept` has not met."""
        return self._num_listed - len(np.unique(self._entries[self._found[:-1]]))

    def kept(self, files: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Return which records stay, bool, by the lines of their input files."""
        keys = files + 1j * records
        places = np.searchsorted(self._keys, keys)
        is_listed = self._keys[places] == keys
        self._found[places[is_listed]] = True
        kept: np.ndarray = (self._is_whole[files] | is_listed) != self.drop
        return kept

    def gone(self, rows_left: np.ndarray) -> np.ndarray:
        """Return the input files of which no row stays, and none may stay; bool."""
        written = np.array([line["written"] for line in self.lines])
        lines = np.arange(len(self.names))
        is_selected = self._is_whole | np.isin(lines, np.real(self._keys[:-1]))
        may_not_stay = self._is_whole if self.drop else ~is_selected
        gone: np.ndarray = may_not_stay | ((written > 0) & (rows_left == 0))
        return gone


class _Part(NamedTuple):
    """A new data set, and its rows."""

    chosen: _Chosen
    new: NewDataSet


class _Left(NamedTuple):
    """What is left of a shard in a new data set."""

    info: ShardInfo | None
    """The shard with the kept rows: the same if all are kept, None if none is."""
    files: np.ndarray
    """Input files of the kept rows, ascending."""
    rows: np.ndarray
    """Kept rows of each of `files`."""
    removed_lengths: np.ndarray
    """Histogram of the lengths of removed rows."""
    removed_kinds: np.ndarray
    """Tokens of removed rows by kind, int64."""


def _left_of(
    store: Store, manifest: Manifest, parts: Sequence[_Part]
) -> list[dict[str, list[_Left]]]:
    """Return what is left of the shards of each split in each part. Shards that lose rows are
    written into the work folder of the part."""
    shards = [(name, info) for name, split in manifest.splits.items() for info in split.shards]
    with Bar([info.bytes for _, info in shards]) as bar:

        def do(shard: tuple[str, ShardInfo]) -> list[_Left]:
            left = _left(store, manifest, parts, shard[1])
            bar.advance(Progress(shard[1].bytes, shard[1].tokens))
            bar.count_unit()
            return left

        done: list[dict[str, list[_Left]]] = [{n: [] for n in manifest.splits} for _ in parts]
        for (name, _), left in zip(shards, results_of(do, shards, AT_ONCE), strict=True):
            for of_part, each in zip(done, left, strict=True):
                of_part[name].append(each)
    return done


def _left(store: Store, manifest: Manifest, parts: Sequence[_Part], info: ShardInfo) -> list[_Left]:
    """Read a shard, and write it again for each part that has some of its rows."""
    only = (INPUT_IDS, KINDS, ORIGIN_FILE, ORIGIN_RECORD)
    reader = ShardReader.open(store, manifest, info, only=only)
    masks: list[list[np.ndarray]] = [[] for _ in parts]
    files: list[list[np.ndarray]] = [[] for _ in parts]
    lengths = [length_histogram(np.empty(0)) for _ in parts]
    kinds = [np.zeros(len(Kind), np.int64) for _ in parts]
    for batch in range(info.batches):
        rows, _ = reader.read(batch)
        origins = rows.per_row[ORIGIN_FILE]
        all_lengths, all_kinds = _counted(rows)
        for n, (chosen, _) in enumerate(parts):
            mask = chosen.kept(origins, rows.per_row[ORIGIN_RECORD])
            masks[n].append(mask)
            files[n].append(origins[mask])
            if not mask.all():
                kept_lengths, kept_kinds = _counted(rows.where(mask))
                lengths[n] = lengths[n] + all_lengths - kept_lengths
                kinds[n] += all_kinds - kept_kinds
    found = [np.unique(np.concatenate(each), return_counts=True) for each in files]
    is_whole = [all(mask.all() for mask in each) for each in masks]
    size = manifest.tokenizer.vocabulary_size
    with ExitStack() as stack:
        writers = {
            n: stack.enter_context(ShardWriter(new.work, info.file, size, manifest.columns))
            for n, (_, new) in enumerate(parts)
            if len(found[n][0]) and not is_whole[n]
        }
        if writers:
            reader = ShardReader.open(store, manifest, info)
        for batch in range(info.batches if writers else 0):
            rows, _ = reader.read(batch)
            for n, writer in writers.items():
                writer.append(rows.where(masks[n][batch]))
    made = {n: writer.info for n, writer in writers.items()}
    return [
        _Left(info if is_whole[n] else made.get(n), *found[n], lengths[n], kinds[n])
        for n in range(len(parts))
    ]


def _counted(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the histogram of the lengths of rows, and their tokens by kind."""
    kinds = kinds_of(rows.per_token.get(KINDS, np.empty(0, np.uint8)))
    return length_histogram(rows.lengths), np.bincount(kinds, minlength=len(Kind))


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
    rows_left = np.zeros(len(chosen.names), np.int64)
    for shard in every:
        rows_left[shard.files] += shard.rows
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


def _counts(counts: dict[str, int] | None, removed: np.ndarray) -> dict[str, int] | None:
    """Return the counts of conversations that are known. Shards have the kinds of tokens, but
    not what else `pretokenize` counted."""
    if counts is None:
        return None
    if not removed.any():
        return {name: count for name, count in counts.items() if name != FIM_ROWS} or None
    less = {f"{kind.label}_tokens": int(removed[kind]) for kind in Kind}
    return {name: count - less[name] for name, count in counts.items() if name in less}
