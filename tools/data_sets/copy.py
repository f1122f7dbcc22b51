"""`shards copy FROM TO`: copy a data set to another place, and check each file on the way.

Four files are copied at a time, and the manifest last, so a copy with a manifest is complete. Files
with the right size and checksum are skipped. So the same command continues a copy, and replaces
missing or damaged files. A file in an object store is identified by the checksum in its metadata.
"""

import contextlib
import errno
import logging
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError, RemoteError
from tokenfeed.pipeline.format.manifest import (
    MADE_BY_FILE,
    MANIFEST_FILE,
    FileInfo,
    Manifest,
    ShardInfo,
    stored,
)
from tokenfeed.pipeline.format.read_errors import damaged, gave_up, refused
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_file
from tokenfeed.pipeline.format.store import LocalStore, Place, Store, open_place, open_store
from tokenfeed.pipeline.remote.retrying import few_threads
from tokenfeed.tools.jobs.crew import Progress
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.jobs.run_records import claimed, is_begun
from tokenfeed.tools.shell.command_line import text
from tokenfeed.tools.shell.console import print_json

__all__ = ["Copied", "Copy", "DataFile", "copy_data_set", "fetch"]

AT_ONCE = 4
_COPY_FILE = ".copying"
"""File in a bucket with the fingerprint of the data set that is being copied there."""
_PIECE_BYTES = 1 << 20
_TRIES = 2
"""Downloads of a file: a bit may flip on the way, but a second difference is in the file."""
_log = logging.getLogger(__name__)


class DataFile(NamedTuple):
    """A file that a manifest names."""

    info: FileInfo
    tokens: int

    @property
    def weight_bytes(self) -> int:
        """Its size, for the progress bar."""
        return self.info.bytes


def data_files(manifest: Manifest) -> Iterator[DataFile]:
    """Yield all files of a data set except the manifest."""
    side = manifest.side_files
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    for info in dict.fromkeys((*side, *shards)):
        yield DataFile(info, info.tokens if isinstance(info, ShardInfo) else 0)


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
    files = list(data_files(manifest))
    with _alone(target, manifest):
        _check_place(source, target, manifest)
        missing = _bring(files, source, target)
        if made_by := _optional(source, MADE_BY_FILE):
            target.write(MADE_BY_FILE, made_by)
        target.write(MANIFEST_FILE, raw)
    return Copied(
        to=target.name,
        fingerprint=manifest.fingerprint,
        files=len(files),
        bytes=sum(file.weight_bytes for file in files),
        copied=len(missing),
        copied_bytes=sum(file.weight_bytes for file in missing),
        seconds=round(time.perf_counter() - started, 3),
    )


def _bring(files: list[DataFile], source: Store, target: Place) -> list[DataFile]:
    """Copy the files that are not there yet, and return them."""
    with few_threads(AT_ONCE) as threads:
        there = list(threads.map(lambda file: target.has(file.info), files))
    missing = [file for file, is_there in zip(files, there, strict=True) if not is_there]
    with Bar(missing) as bar, few_threads(AT_ONCE) as threads:
        jobs = [threads.submit(_put, file, source, target, bar) for file in missing]
        try:
            for job in as_completed(jobs):
                job.result()
                bar.count_unit()
        except KeyboardInterrupt:
            if not isinstance(target, LocalStore):
                _log.warning("uploads under way are finished first; a second Ctrl-C ends at once")
            raise KeyboardInterrupt("copied files are kept; the same command continues") from None
    return missing


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


def _put(file: DataFile, source: Store, target: Place, bar: Bar) -> None:
    """Copy a file through this machine, and check it before it is written to the target."""
    with target.room() as folder:
        is_local = isinstance(target, LocalStore)
        fetch(file, source, folder / file.info.file, bar, synced=is_local)


@contextlib.contextmanager
def _alone(target: Place, manifest: Manifest) -> Iterator[None]:
    """Keep other copies and runs out of the target until the block ends.

    A folder is locked as by `pretokenize`. A bucket gets a file with the fingerprint: two copies of
    one data set may run at once, because they write the same bytes.

    Raises:
        ConfigError: Another copy or run is using the target.
    """
    if isinstance(target, LocalStore):
        with claimed(target, {"shards copy": manifest.fingerprint}):
            remove_leftovers(target.folder)
            yield
        return
    if not _is_first(target, manifest.fingerprint):
        raise ConfigError(
            f"{target}: a copy of another data set is being made there. Give another "
            f"place; if that copy was killed, delete {target.path(_COPY_FILE)}."
        )
    try:
        if is_begun(target):
            raise ConfigError(f"{target}: holds an unfinished run. Give another place.")
        yield
    finally:
        target.delete(_COPY_FILE)


def _is_first(target: Place, fingerprint: str) -> bool:
    try:
        return target.create(_COPY_FILE, fingerprint.encode())
    except RemoteError as error:
        if error.errno != errno.EOPNOTSUPP:  # a store without conditional writes
            raise
        return True


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


def fetch(file: DataFile, source: Store, path: Path, bar: Bar, *, synced: bool = True) -> None:
    """Copy a file, and check its checksum. If the checksum is wrong, copy it a second time.

    Raises:
        ShardFormatError: The file is missing, unreadable or damaged at the source.
    """
    shown, actual = source.path(file.info.file), ""
    for _ in range(_TRIES):
        own = atomic_file(path, synced=synced, is_shared=True)
        with contextlib.suppress(_AnotherError), own as copy:
            actual = _stream(file, source, copy, bar)
            if actual != file.info.xxh3:
                raise _AnotherError
            return
    raise damaged(shown, f"the file has checksum {actual}, expected {file.info.xxh3}")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed copies."""
    for temporary in folder.rglob(f"*{TEMPORARY_SUFFIX}"):
        temporary.unlink(missing_ok=True)


class _AnotherError(Exception):
    """The checksum of the received bytes is not the one in the manifest."""


def _stream(file: DataFile, source: Store, copy: IO[bytes], bar: Bar) -> str:
    """Write the content of a file, and return its checksum."""
    digest, info = xxhash.xxh3_64(), file.info
    for block in _blocks(source, info):
        digest.update(block)
        copy.write(block)
        part = len(block) / max(info.bytes, 1)
        bar.advance(Progress(len(block), round(part * file.tokens)))
    return digest.hexdigest()


def _blocks(source: Store, info: FileInfo) -> Iterator[bytes]:
    try:
        with source.open(info.file, info.bytes) as opened:
            while block := opened.read(_PIECE_BYTES):
                yield block
    except FileNotFoundError:
        raise damaged(source.path(info.file), "not found, but the manifest names it") from None
    except OSError as error:
        raise refused(source.path(info.file), "cannot be read", error) from error
