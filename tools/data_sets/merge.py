"""`shards merge FROM... OUT`: one data set with the rows of several, without tokenizing again.

No shard is written again. A shard keeps its bytes under another name, as a hard link if the file
system allows it, so no token is read. The manifest has the name that the checksums
in the shard include (`named`), and the number of the shard's first input file (`first_source`).
The manifest is written last, so the same command continues a merge that was killed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, NamedTuple

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import refuse_difference
from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
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
from tokenfeed.pipeline.format.store import LocalStore, Store, open_store
from tokenfeed.tools.data_sets.copy import Move, remove_leftovers
from tokenfeed.tools.data_sets.derived import Derived, Files, Moves, commit, new_data_set
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

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


class Opened(NamedTuple):
    """A data set to take shards from."""

    store: Store
    manifest: Manifest

    @classmethod
    def read(cls, path: str) -> "Opened":
        """Read the manifest."""
        store = open_store(path)
        return cls(store, Manifest.read(store))


def merge(paths: Sequence[str], to: str) -> Derived:
    """Make one data set of several.

    Args:
        paths: The data sets. Their rows follow each other in this order, in every split.
        to: A new or empty folder.

    Raises:
        ConfigError: The data sets do not match, or the folder holds something else.
        TokenfeedError: A file is missing or damaged.
    """
    parts = [Opened.read(path) for path in paths]
    seen: dict[str, str] = {}
    for store, manifest in parts:
        if first := seen.get(manifest.fingerprint):
            raise ConfigError(
                f"{first} and {store.name} are the same data set, whose rows would be there twice. "
                "Give each data set once."
            )
        seen[manifest.fingerprint] = store.name
    for store, manifest in parts:
        for version in manifest.versions or ():
            if earlier := seen.get(version.fingerprint):
                raise ConfigError(
                    f"{earlier} is an earlier version of {store.name}, so its rows would be there "
                    "twice. Give the later version alone."
                )
    manifest, files, moves = _merged(parts)
    names = {name.partition("/")[0] for name in (*files, *(move.after.file for move in moves))}
    with new_data_set(to, "shards merge", manifest.fingerprint, names) as new:
        return new.finish(manifest, files, moves)


def _merged(parts: Sequence[Opened], *, mark: str = "") -> tuple[Manifest, Files, Moves]:
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
    moves: dict[str, list[Move[ShardInfo]]] = {name: [] for name in names}
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
    files = Files.of_tokenizer(store, first)
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
        sources=files.add(f"sources{mark}.jsonl", sources),
        rejects=files.add(f"rejects{mark}.jsonl", rejects),
        counts=_counts(all_of),
        versions=None,
    )
    return manifest, files, [move for name in names for move in moves[name]]


def grow(folder: LocalStore, part: Opened) -> Manifest:
    """Append the rows of a data set to another data set, in the folder of the latter.

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
    manifest, files, moves = _merged([Opened(folder, before), part], mark=f"-{len(earlier) + 2}")
    kept = files.add(f"{_VERSIONS}/{before.fingerprint}.json", raw)
    version = VersionInfo(
        **asdict(kept),
        fingerprint=before.fingerprint,
        sources=before.sources,
        rejects=before.rejects,
    )
    manifest = replace(manifest, versions=(*earlier, version))
    there = {info.file for info in before.side_files}
    new = {name: content for name, content in files.items() if name not in there}
    commit(folder, manifest, new, [move for move in moves if move.store is part.store])
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
