"""`shards merge FROM... OUT`: one data set with the rows of several, without tokenizing again.

No shard is written again. A shard keeps its bytes under another name, as a hard link if the file
system allows it, so no token is read. The manifest has the name that the checksums
in the shard include (`named`), and the number of the shard's first input file (`first_source`).
The manifest is written last, so the same command continues a merge that was killed.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import xxhash

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.facts import count_of
from tokenfeed.pipeline.format.data_set import refuse_difference
from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
    PARTS_FOLDER,
    FileInfo,
    Manifest,
    RecordCounts,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    VersionInfo,
    read_checked,
    stored,
)
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, sync_folder
from tokenfeed.pipeline.format.store import LocalStore, Store, open_place, open_store
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.data_sets.copy import AT_ONCE, DataFile, fetch, remove_leftovers
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.jobs.run_records import claimed
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

__all__ = [
    "Derived",
    "Merge",
    "Move",
    "Opened",
    "check_folder",
    "derived_figures",
    "grow",
    "merge",
    "merged",
    "new_data_set",
    "place",
    "side_file",
]

_VERSIONS = "versions"
"""The folder of earlier manifests, each named by its fingerprint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """Make one data set with the rows of several, without tokenizing again. Shards become hard
    links where the file system allows it."""

    paths: tuple[Annotated[str, text("FROM... OUT")], ...]
    """Folders or addresses of finished data sets, with the same tokenizer, task and labels; then a
    new or empty folder."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Merge the data sets."""
        if len(self.paths) < 3:
            raise ConfigError("expected FROM... OUT, like `shards merge first/ second/ all/`.")
        made = merge(self.paths[:-1], self.paths[-1])
        print_json(asdict(made)) if self.json else print(made)
        return 0


@dataclass(frozen=True, slots=True)
class Derived:
    """A data set that was made of others."""

    to: str
    fingerprint: str
    rows: int
    tokens: int
    shards: int
    linked: int
    """Shards that share their bytes with the data set that they come from."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.to}: {count_of(self.rows, 'row')}, {self.tokens:,} tokens, "
            f"{count_of(self.shards, 'shard')}, {self.linked:,} of them hard links"
        )


def derived_figures(
    folder: LocalStore, manifest: Manifest, linked: int, started: float
) -> dict[str, Any]:
    """Return the fields of `Derived` for a finished data set."""
    splits = manifest.splits.values()
    return {
        "to": folder.name,
        "fingerprint": manifest.fingerprint,
        "rows": sum(split.rows for split in splits),
        "tokens": sum(split.tokens for split in splits),
        "shards": sum(len(split.shards) for split in splits),
        "linked": linked,
        "seconds": round(time.perf_counter() - started, 3),
    }


class Opened(NamedTuple):
    """A data set to take shards from."""

    store: Store
    manifest: Manifest

    @classmethod
    def read(cls, path: str) -> "Opened":
        """Read the manifest."""
        store = open_store(path)
        return cls(store, Manifest.read(store))


class Move(NamedTuple):
    """A shard, where it is and where it goes."""

    store: Store
    before: ShardInfo
    after: ShardInfo

    @property
    def weight_bytes(self) -> int:
        """Its size, for the progress bar."""
        return self.after.bytes


def merge(paths: Sequence[str], to: str) -> Derived:
    """Make one data set of several.

    Args:
        paths: The data sets. Their rows follow each other in this order, in every split.
        to: A new or empty folder.

    Raises:
        ConfigError: The data sets do not match, or the folder holds something else.
        TokenfeedError: A file is missing or damaged.
    """
    started = time.perf_counter()
    parts = [Opened.read(path) for path in paths]
    seen: dict[str, str] = {}
    for store, manifest in parts:
        if first := seen.get(manifest.fingerprint):
            raise ConfigError(
                f"{first} and {store.name} are the same data set, whose rows would be there twice. "
                "Give each data set once."
            )
        seen[manifest.fingerprint] = store.name
    manifest, files, moves = merged(parts)
    with new_data_set(to, manifest, files, "shards merge") as folder:
        linked = place(moves, folder)
    return Derived(**derived_figures(folder, manifest, linked, started))


def merged(
    parts: Sequence[Opened], *, mark: str = ""
) -> tuple[Manifest, dict[str, bytes], list[Move]]:
    """Describe the data set with the rows of all parts. Nothing is written.

    The shards of the first part keep their names and their entries in the manifest.

    Args:
        parts: Data sets.
        mark: What the names of sources.jsonl and rejects.jsonl contain, like `-2`.

    Returns:
        The manifest, the content of the files beside the shards, and the shards.

    Raises:
        ConfigError: The data sets do not match.
    """
    (store, first), *others = parts
    for other in others:
        refuse_difference(
            (store.name, first), (other.store.name, other.manifest), purpose="a merge"
        )
    all_of = [part.manifest for part in parts]
    names = sorted({name for manifest in all_of for name in manifest.splits})
    moves: dict[str, list[Move]] = {name: [] for name in names}
    num_sources = 0
    for part in parts:
        for name, split in part.manifest.splits.items():
            taken = {move.after.file for move in moves[name]}
            for shard in split.shards:
                after = shard
                if part is not parts[0]:
                    after = _renamed(shard, name, len(moves[name]), num_sources, taken)
                taken.add(after.file)
                moves[name].append(Move(part.store, shard, after))
        num_sources += part.manifest.ledger.files
    sources = _lines(parts, lambda manifest: manifest.sources)
    rejects = _lines(parts, lambda manifest: manifest.rejects)
    files = {first.tokenizer.file: read_checked(store, first.tokenizer)}
    if first.chat_template:
        files[first.chat_template.file] = read_checked(store, first.chat_template)
    manifest = replace(
        first,
        tokenizer=_tokenizer(all_of),
        splits={
            name: SplitInfo(
                shards=tuple(move.after for move in moves[name]),
                length_histogram=_sums(
                    m.splits[name].length_histogram for m in all_of if name in m.splits
                ),
            )
            for name in names
        },
        ledger=RecordCounts.of([json.loads(line) for line in sources.splitlines()]),
        sources=side_file(files, f"sources{mark}.jsonl", sources),
        rejects=side_file(files, f"rejects{mark}.jsonl", rejects),
        counts=_counts(all_of),
        versions=None,
    )
    return manifest, files, [move for name in names for move in moves[name]]


def side_file(files: dict[str, bytes], name: str, content: bytes) -> FileInfo:
    """Add a file to those that are written beside the shards, and return its entry."""
    files[name] = content
    return FileInfo(file=name, bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))


def grow(folder: LocalStore, part: Opened) -> Manifest:
    """Add the rows of a data set behind those of another, in its folder.

    No file that the present manifest names is changed. New files come first, and then one write
    replaces the manifest. So a kill leaves the earlier or the new version, and a second call
    finishes. The present manifest is kept, and named by the new one.

    Args:
        folder: The data set that grows.
        part: The data set with the new rows.

    Returns:
        The new manifest.

    Raises:
        ConfigError: The data sets do not match.
    """
    remove_leftovers(folder.folder)
    raw = stored(folder, MANIFEST_FILE)
    before = Manifest.decoded(raw, folder.path(MANIFEST_FILE))
    earlier = before.versions or ()
    manifest, files, moves = merged([Opened(folder, before), part], mark=f"-{len(earlier) + 2}")
    kept = side_file(files, f"{_VERSIONS}/{before.fingerprint}.json", raw)
    version = VersionInfo(
        **asdict(kept),
        fingerprint=before.fingerprint,
        sources=before.sources,
        rejects=before.rejects,
    )
    manifest = replace(manifest, versions=(*earlier, version))
    place([move for move in moves if move.store is part.store], folder)
    for name in files.keys() - {info.file for info in before.side_files}:
        folder.write(name, files[name])
    folder.write(MANIFEST_FILE, manifest.encoded())
    for split, info in manifest.splits.items():
        named = {shard.file for shard in info.shards}
        found = {f"{split}/{name}" for name in folder.names(split) if name.endswith(".arrow")}
        folder.delete(*found - named)  # of a command that was killed
    return manifest


def _renamed(
    shard: ShardInfo, split: str, number: int, num_sources: int, taken: set[str]
) -> ShardInfo:
    """Return the entry of a shard behind others. It always has a name that it did not have before:
    a reader that does not know `first_source` must reject the shard."""
    file = f"{split}/{number:05d}.arrow"
    while file in taken or file == shard.stored_name:
        number += 1
        file = f"{split}/{number:05d}.arrow"
    first_source = (shard.first_source or 0) + num_sources
    return replace(shard, file=file, named=shard.stored_name, first_source=first_source or None)


def _lines(parts: Sequence[Opened], file: Callable[[Manifest], FileInfo]) -> bytes:
    """Return the lines of a file beside the shards, of all parts."""
    contents = (read_checked(part.store, file(part.manifest)) for part in parts)
    return b"".join(line + b"\n" for content in contents for line in content.splitlines())


def _sums(columns: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*columns, strict=True)))


def _counts(manifests: Sequence[Manifest]) -> dict[str, int] | None:
    counts = [manifest.counts or {} for manifest in manifests]
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name, 0) for each in counts) for name in names} or None


def _tokenizer(manifests: Sequence[Manifest]) -> TokenizerInfo:
    """Return the tokenizer with all engines that made ids, and the sums of their comparisons."""
    infos = [manifest.tokenizer for manifest in manifests]
    routed = [info.routed for info in infos if info.routed is not None]
    return replace(
        infos[0],
        engine=" and ".join(dict.fromkeys(info.engine for info in infos)),
        engine_version=" and ".join(dict.fromkeys(info.engine_version for info in infos)),
        audited=sum(info.audited for info in infos),
        differences=sum(info.differences for info in infos),
        routed=sum(routed) if routed else None,
        verified=True if all(info.verified for info in infos) else None,
    )


def check_folder(to: str, names: Iterable[str]) -> LocalStore:
    """Return a folder that may be new, empty, or hold files of a data set with these names.

    Raises:
        ConfigError: The folder holds something else, or is in a store.
    """
    folder = open_place(to)
    if not isinstance(folder, LocalStore):
        raise ConfigError(
            f"{to}: is not a folder of this machine. Give a folder, then run `shards copy`."
        )
    expected = {MANIFEST_FILE, PARTS_FOLDER, *(name.partition("/")[0] for name in names)}
    found = {name for name in folder.names() if not name.endswith(TEMPORARY_SUFFIX)}
    if others := sorted(found - expected):
        what = "another data set" if MANIFEST_FILE in found else f"other data ({others[0]})"
        raise ConfigError(f"{to}: already holds {what}. Give a new or empty folder.")
    return folder


@contextmanager
def new_data_set(
    to: str, manifest: Manifest, files: dict[str, bytes], command: str
) -> Iterator[LocalStore]:
    """Yield the folder of a new data set, locked, to put its shards there. The other files are
    written when the block ends, the manifest last.

    Args:
        to: A new or empty folder, or what a killed command left there.
        manifest: Describes the data set.
        files: The files beside the shards.
        command: The name of the command.

    Raises:
        ConfigError: The folder holds something else, or is in a store.
    """
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    folder = check_folder(to, (*files, *shards))
    if folder.exists(MANIFEST_FILE) and Manifest.read(folder).fingerprint != manifest.fingerprint:
        raise ConfigError(f"{to}: already holds another data set. Give a new or empty folder.")
    with claimed(folder, {command: [manifest.fingerprint]}):
        remove_leftovers(folder.folder)
        yield folder
        for name, content in files.items():
            folder.write(name, content)
        folder.write(MANIFEST_FILE, manifest.encoded())


def place(moves: Sequence[Move], folder: LocalStore) -> int:
    """Put shards into a folder, and return how many share their bytes with where they were.

    Raises:
        ShardFormatError: A shard is missing or damaged.
    """
    with Bar(moves) as bar:

        def put(move: Move) -> bool:
            target = folder.folder / move.after.file
            if _link(move, target):
                bar.count_unit()
                return True
            if not folder.has(move.after):
                fetch(DataFile(move.before, move.before.tokens), move.store, target, bar)
            bar.count_unit()
            return False

        for name in {Path(move.after.file).parent for move in moves}:
            (folder.folder / name).mkdir(parents=True, exist_ok=True)
        linked = sum(results_of(put, moves, AT_ONCE))
    for name in sorted({Path(move.after.file).parent for move in moves}):
        sync_folder(folder.folder / name)
    return linked


def _link(move: Move, target: Path) -> bool:
    """Make a hard link to a shard, and return whether that was possible."""
    if not isinstance(move.store, LocalStore):
        return False
    path = (Path(move.store.root) / move.before.file).resolve()
    try:
        if path.stat().st_size != move.before.bytes:
            return False
        if target.exists():
            if target.samefile(path):
                return True
            target.unlink()
        os.link(path, target)
    except OSError:  # an adopted shard, another disk, or a file system without links
        return False
    return True
