"""`shards copy FROM TO`: copy a data set to another place, and check each file on the way.

Four files are copied at a time, and the manifest last, so a copy with a manifest is complete. Files
with the right size and checksum are skipped. So the same command continues a copy, and replaces
missing or damaged files. A file in an object store is identified by the checksum in its metadata.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated

import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError, damaged, gave_up, refused
from tokenfeed.pipeline.format.manifest import (
    MADE_BY_FILE,
    MANIFEST_FILE,
    FileInfo,
    Manifest,
    ShardInfo,
    stored,
)
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_file, sync_folder
from tokenfeed.pipeline.format.store import LocalStore, Place, Store, open_place, open_store
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.jobs.crew import Done
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.jobs.run_records import claimed
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

AT_ONCE = 4
_PIECE_BYTES = 1 << 20
_TRIES = 2
"""Downloads of a file: a bit may flip on the way, but a second difference is in the file."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a copy."""

    to: str
    fingerprint: str
    files: int
    bytes: int
    """Size of all files."""
    copied: int
    """Number of files that were missing."""
    copied_bytes: int
    seconds: float

    def __str__(self) -> str:
        there = self.files - self.copied
        return (
            f"{self.to}: complete, files: {self.files:,}, {self.bytes / 1e6:,.1f} MB; copied: "
            f"{self.copied:,}, already there: {there:,}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copy a finished data set between folders and stores. The same command continues a copy, and
    replaces missing or damaged files."""

    source: Annotated[str, text("FROM")]
    """Folder or address of a finished data set."""
    to: Annotated[str, text("TO")]
    """New folder or address, or a copy to complete."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Copy the data set."""
        copied = copy_data_set(self.source, self.to)
        if self.json:
            print_json(asdict(copied))
        else:
            print(copied)
        return 0


def copy_data_set(source_path: str, to: str) -> Copied:
    """Copy the files of a data set that are missing or damaged in the target.

    Raises:
        TokenfeedError: The target contains something else, a file is damaged, or a store fails.
    """
    started = time.perf_counter()
    source, target = open_store(source_path), open_place(to)
    # Written at the end as it was checked here: the file may be replaced meanwhile.
    raw = stored(source, MANIFEST_FILE)
    manifest = Manifest.decoded(raw, source.path(MANIFEST_FILE))
    if target.name == source.name:
        raise ConfigError(f"{source.name}: FROM and TO are the same place. Give another TO.")
    shards = (shard for split in manifest.splits.values() for shard in split.shards)
    files: list[FileInfo] = [*dict.fromkeys((*manifest.side_files, *shards))]
    made_by = _optional(source, MADE_BY_FILE)
    with claimed(target, {"shards copy": manifest.fingerprint}, made_by):
        _check_place(source, target, manifest)
        if isinstance(target, LocalStore):
            for temporary in target.folder.rglob(f"*{TEMPORARY_SUFFIX}"):  # of killed copies
                temporary.unlink(missing_ok=True)
        try:
            is_new = _bring(files, source, target)
        except KeyboardInterrupt:
            if not isinstance(target, LocalStore):
                _log.warning("uploads under way are finished first; a second Ctrl-C ends at once")
            raise KeyboardInterrupt("copied files are kept; the same command continues") from None
        target.write(MANIFEST_FILE, raw)
        if made_by:
            target.write(MADE_BY_FILE, made_by)  # last, as it replaces the claim of this copy
    sizes = [file.bytes for file in files]
    copied = [size for size, is_copied in zip(sizes, is_new, strict=True) if is_copied]
    return Copied(
        to=target.name,
        fingerprint=manifest.fingerprint,
        files=len(files),
        bytes=sum(sizes),
        copied=len(copied),
        copied_bytes=sum(copied),
        seconds=round(time.perf_counter() - started, 3),
    )


def _bring(files: Sequence[FileInfo], source: Store, target: Place) -> list[bool]:
    """Copy the files of a data set that are not in a place, several at a time, and check each.

    Returns:
        For each file, whether it was copied.

    Raises:
        ShardFormatError: A file is missing or damaged.
    """
    is_local = isinstance(target, LocalStore)
    with Bar([file.bytes for file in files]) as bar:

        def put(file: FileInfo) -> bool:
            is_there = target.has(file)
            if is_there:
                bar.advance(Done(file.bytes, _tokens(file)))
            else:
                with target.room() as folder:
                    fetch(file, source, folder / file.file, bar.advance, synced=is_local)
            bar.count_unit()
            return not is_there

        copied = list(results_of(put, files, AT_ONCE))
    if isinstance(target, LocalStore):
        for folder in sorted({(target.folder / file.file).parent for file in files}):
            sync_folder(folder)
    return copied


def _optional(store: Store, name: str) -> bytes | None:
    """Return a file that the manifest does not name; None if it cannot be read.

    A store may refuse access to a missing object.
    """
    try:
        return store.read(name)
    except OSError as error:
        if gave_up(error):
            raise
        return None


def _check_place(source: Store, to: Place, manifest: Manifest) -> None:
    """Reject a target with another data set."""
    there = _manifest_at(to)
    if there and there.fingerprint != manifest.fingerprint:
        raise ConfigError(
            f"{to.name}: holds another data set, with the fingerprint {there.fingerprint}; "
            f"{source.name} has {manifest.fingerprint}. Give another place."
        )


def _manifest_at(store: Store) -> Manifest | None:
    """Return the manifest at a place; None if it is missing.

    Raises:
        ConfigError: The manifest is damaged, so the data set there is unknown.
    """
    file = store.path(MANIFEST_FILE)
    try:
        return Manifest.decoded(store.read(MANIFEST_FILE), file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ManifestError as error:
        raise ConfigError(f"{error} To complete this copy nevertheless, delete {file}.") from error


def fetch(
    info: FileInfo,
    source: Store,
    path: Path,
    on_progress: Callable[[Done], None] = lambda done: None,
    *,
    synced: bool = True,
) -> None:
    """Copy a file, and check its checksum. If the checksum is wrong, copy it a second time.

    Raises:
        ShardFormatError: The file is missing, unreadable or damaged at the source.
    """
    shown, actual = source.path(info.file), ""
    for _ in range(_TRIES):
        own = atomic_file(path, synced=synced, is_shared=True)
        with contextlib.suppress(_AnotherError), own as copy:
            actual = _stream(info, source, copy, on_progress)
            if actual != info.xxh3:
                raise _AnotherError
            return
    raise damaged(shown, f"the file has checksum {actual}, expected {info.xxh3}")


class _AnotherError(Exception):
    """The checksum of the received bytes is not the one in the manifest."""


def _stream(
    info: FileInfo, source: Store, copy: IO[bytes], on_progress: Callable[[Done], None]
) -> str:
    """Write the content of a file, and return its checksum."""
    digest = xxhash.xxh3_64()
    for block in _blocks(source, info):
        digest.update(block)
        copy.write(block)
        part = len(block) / max(info.bytes, 1)
        on_progress(Done(len(block), round(part * _tokens(info))))
    return digest.hexdigest()


def _tokens(info: FileInfo) -> int:
    return info.tokens if isinstance(info, ShardInfo) else 0


def _blocks(source: Store, info: FileInfo) -> Iterator[bytes]:
    try:
        with source.open(info.file, info.bytes) as opened:
            while block := opened.read(_PIECE_BYTES):
                yield block
    except FileNotFoundError:
        raise damaged(source.path(info.file), "not found, but the manifest names it") from None
    except OSError as error:
        raise refused(source.path(info.file), "cannot be read", error) from error
