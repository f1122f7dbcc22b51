"""Make a data set in a folder from files that exist already: shards of others, or token files.

The folder is locked. Shards come first, then the small files, and the manifest last, so a kill
leaves an unfinished folder, and the same command continues.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
    PARTS_FOLDER,
    SOURCES_FILE,
    FileInfo,
    Manifest,
    ShardInfo,
    file_info,
    read_checked,
)
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, sync_folder
from tokenfeed.pipeline.format.store import LocalStore, Store, open_place
from tokenfeed.pipeline.text import count_of
from tokenfeed.tools.data_sets.copy import Move, Way, bring, remove_leftovers
from tokenfeed.tools.jobs.run_records import claimed

Moves = Sequence[Move[ShardInfo]]
_WORK_FOLDER = ".work"
"""Holds shards that are written again, until they get their place."""


class Files(dict[str, bytes]):
    """The content of the files beside the shards, by name."""

    @classmethod
    def of_tokenizer(cls, store: Store, manifest: Manifest) -> "Files":
        """Return the tokenizer and the chat template of a data set."""
        infos = [manifest.tokenizer, manifest.chat_template]
        return cls({info.file: read_checked(store, info) for info in infos if info})

    def add(self, name: str, content: bytes) -> FileInfo:
        """Add a file, and return its entry in the manifest."""
        self[name] = content
        return file_info(name, content)


@dataclass(frozen=True, slots=True)
class Derived:
    """A data set that was made from other data sets."""

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


class NewDataSet:
    """An unfinished data set in a locked folder."""

    def __init__(self, folder: LocalStore) -> None:
        self.folder = folder
        self.work = folder.folder / _WORK_FOLDER
        """A folder for new shards, which `finish` moves to their place. It does not exist yet."""
        self._started = time.perf_counter()

    def finish(self, manifest: Manifest, files: Files, moves: Moves = ()) -> Derived:
        """Put the shards into the folder, then the other files, and the manifest last.

        Args:
            manifest: Describes the data set.
            files: The files beside the shards.
            moves: The shards of other data sets. New shards are in `work`.

        Raises:
            ConfigError: The folder has another finished data set.
            ShardFormatError: A shard is missing or damaged.
        """
        folder = self.folder
        if folder.exists(MANIFEST_FILE) and (
            Manifest.read(folder).fingerprint != manifest.fingerprint
        ):
            raise ConfigError(f"{folder}: holds another data set. Give a new or empty folder.")
        for path in [path for path in self.work.rglob("*") if path.is_file()]:
            place = folder.folder / path.relative_to(self.work)
            place.parent.mkdir(exist_ok=True)
            os.replace(path, place)
            sync_folder(place.parent)
        ways = commit(folder, manifest, files, moves)
        splits = manifest.splits.values()
        return Derived(
            to=folder.name,
            fingerprint=manifest.fingerprint,
            rows=sum(split.rows for split in splits),
            tokens=sum(split.tokens for split in splits),
            shards=sum(len(split.shards) for split in splits),
            linked=ways.count("linked"),
            seconds=round(time.perf_counter() - self._started, 3),
        )


@contextmanager
def new_data_set(to: str, command: str, made_of: str, names: Iterable[str]) -> Iterator[NewDataSet]:
    """Lock the folder of a new data set until the block ends.

    Args:
        to: A new or empty folder, or what a killed command left there.
        command: The name of the command.
        made_of: What the data set is made of. A killed command with another value is not continued.
        names: The files and folders that the data set can have.

    Raises:
        ConfigError: The folder holds something else, is in a store or in a data set, or another
            command is using the folder.
    """
    folder = open_place(to)
    if not isinstance(folder, LocalStore):
        raise ConfigError(
            f"{to}: is not a folder of this machine. Give a folder, then run `shards copy`."
        )
    expected = {MANIFEST_FILE, PARTS_FOLDER, _WORK_FOLDER, *names}
    found = {name for name in folder.names() if not name.endswith(TEMPORARY_SUFFIX)}
    if others := sorted(found - expected):
        raise ConfigError(
            f"{to}: already holds other data ({others[0]}). Give a new or empty folder."
        )
    for parent in folder.folder.resolve().parents:
        if all((parent / name).exists() for name in (MANIFEST_FILE, SOURCES_FILE)):
            raise ConfigError(f"{to}: lies in the data set {parent}. Give a folder outside of it.")
    try:
        with claimed(folder, {command: made_of}):
            new = NewDataSet(folder)
            remove_leftovers(folder.folder)
            shutil.rmtree(new.work, ignore_errors=True)  # of a command that was killed
            try:
                yield new
            finally:
                shutil.rmtree(new.work, ignore_errors=True)
                folder.prune(*folder.names())
    finally:
        folder.prune("")


def commit(
    folder: LocalStore,
    manifest: Manifest,
    files: dict[str, bytes],
    moves: Moves,
) -> list[Way]:
    """Put shards into a folder, then files beside them, and the manifest last. Remove the shards
    that it does not name, which a killed command left.

    Returns:
        How each shard got there.

    Raises:
        ShardFormatError: A shard is missing or damaged.
    """
    ways = bring(moves, folder, links=True)
    for name, content in files.items():
        folder.write(name, content)
    folder.write(MANIFEST_FILE, manifest.encoded())
    for split, info in manifest.splits.items():
        named = {shard.file for shard in info.shards}
        found = {f"{split}/{name}" for name in folder.names(split) if ".arrow" in name}
        folder.delete(*(name for name in found if name not in named))
    return ways
