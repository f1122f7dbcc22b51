"""Make a data set in a folder out of another one: hard links to shards, and shards written anew.

The folder is locked. Shards come first, then the small files, and the manifest last, so a kill
leaves an unfinished folder, and the same command continues.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import (
    MANIFEST_FILE,
    PARTS_FOLDER,
    SOURCES_FILE,
    Manifest,
    ShardInfo,
)
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, sync_folder
from tokenfeed.pipeline.format.store import LocalStore, Store, open_place
from tokenfeed.tools.data_sets.copy import bring, remove_leftovers
from tokenfeed.tools.jobs.run_records import claimed

_WORK_FOLDER = ".work"
"""Holds shards that are written again, until they get their place."""


def shards_of(manifest: Manifest) -> list[ShardInfo]:
    """Return the shards of all splits."""
    return [info for split in manifest.splits.values() for info in split.shards]


@dataclass(frozen=True, slots=True)
class NewDataSet:
    """An unfinished data set in a locked folder."""

    folder: LocalStore
    source: Store
    """The data set that it is made of."""
    manifest: Manifest
    """The manifest of `source`."""

    @property
    def work(self) -> Path:
        """A folder for new shards, which `finish` moves to their place. It does not exist yet."""
        return self.folder.folder / _WORK_FOLDER

    def finish(self, manifest: Manifest, files: dict[str, bytes]) -> int:
        """Put the shards into the folder, then the other files, and the manifest last. Remove the
        shards that it does not name, which a killed command left.

        Args:
            manifest: Describes the data set. Its shards are in `source`, unchanged, or in `work`.
            files: The files beside the shards, by name.

        Returns:
            How many shards share their bytes with `source`.

        Raises:
            ConfigError: The folder has another finished data set.
            ShardFormatError: A shard is missing or damaged.
        """
        folder, work = self.folder, self.work
        if folder.exists(MANIFEST_FILE) and (
            Manifest.read(folder).fingerprint != manifest.fingerprint
        ):
            raise ConfigError(f"{folder}: holds another data set. Give a new or empty folder.")
        for path in [path for path in work.rglob("*") if path.is_file()]:
            place = folder.folder / path.relative_to(work)
            place.parent.mkdir(exist_ok=True)
            os.replace(path, place)
            sync_folder(place.parent)
        before = {*shards_of(self.manifest)}
        kept = [info for info in shards_of(manifest) if info in before]
        ways = bring(kept, self.source, folder, links=True)
        for name, content in files.items():
            folder.write(name, content)
        folder.write(MANIFEST_FILE, manifest.encoded())
        named = {info.file for info in shards_of(manifest)}
        for split in manifest.splits:
            found = {f"{split}/{name}" for name in folder.names(split) if ".arrow" in name}
            folder.delete(*(found - named))
        return ways.count("linked")


@contextmanager
def new_data_set(to: str, source: Store, manifest: Manifest) -> Iterator[NewDataSet]:
    """Lock the folder of a new data set until the block ends.

    Args:
        to: A new or empty folder, or what a killed command left there.
        source: The data set that it is made of. A killed command with another one is not continued.
        manifest: The manifest of `source`.

    Raises:
        ConfigError: The folder holds something else, is in a store or in a data set, or another
            command is using the folder.
    """
    folder = open_place(to)
    if not isinstance(folder, LocalStore):
        raise ConfigError(
            f"{to}: is not a folder of this machine. Give a folder, then run `shards copy`."
        )
    files = {info.file for info in manifest.side_files}
    expected = {MANIFEST_FILE, PARTS_FOLDER, _WORK_FOLDER, *files, *manifest.splits}
    found = {name for name in folder.names() if not name.endswith(TEMPORARY_SUFFIX)}
    if others := sorted(found - expected):
        raise ConfigError(
            f"{to}: already holds other data ({others[0]}). Give a new or empty folder."
        )
    for parent in folder.folder.resolve().parents:
        if all((parent / name).exists() for name in (MANIFEST_FILE, SOURCES_FILE)):
            raise ConfigError(f"{to}: lies in the data set {parent}. Give a folder outside of it.")
    new = NewDataSet(folder, source, manifest)
    try:
        with claimed(folder, {"shards select": manifest.fingerprint}):
            remove_leftovers(folder.folder)
            shutil.rmtree(new.work, ignore_errors=True)  # of a command that was killed
            try:
                yield new
            finally:
                shutil.rmtree(new.work, ignore_errors=True)
                folder.prune(*folder.names())
    finally:
        folder.prune("")
