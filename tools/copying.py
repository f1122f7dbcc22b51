"""`shards copy FROM TO`: a data set brought to another place, each file proved on the way.

Files go first, four at a time, the manifest last, as it is: a copy that has one is complete. Which
files are there already is told by size and checksum, so the same command continues, and completes
a copy that has lost some. A file of an object store is known by the checksum it was written with.
"""

import contextlib
import errno
import logging
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Protocol

import tyro
import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError, RemoteError
from tokenfeed.pipeline.format.manifest import (
    MADE_BY_FILE,
    MANIFEST_FILE,
    Manifest,
    stored,
)
from tokenfeed.pipeline.format.read_errors import gave_up
from tokenfeed.pipeline.format.storage import atomic_write, file_xxh3
from tokenfeed.pipeline.format.store import LocalStore, Store, open_store
from tokenfeed.pipeline.remote.object_store import XXH3_KEY, ObjectStore
from tokenfeed.tools.at_once import few_threads
from tokenfeed.tools.console import print_json
from tokenfeed.tools.fetching import DataFile, data_files, fetch, remove_leftovers
from tokenfeed.tools.outputs.output import FolderOutput, open_output
from tokenfeed.tools.outputs.store import StoreOutput
from tokenfeed.tools.run.progress import Bar
from tokenfeed.tools.run.records import claimed, is_begun

__all__ = ["Copied", "Copy", "copy_data_set"]

_AT_ONCE = 4
_COPY_FILE = ".copying"
"""In a bucket: the fingerprint of the data set that is being copied there."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy came to."""

    to: str
    fingerprint: str
    files: int
    bytes: int
    """Of all files."""
    copied: int
    """Files that were not there yet."""
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
    """Copy a finished data set, from and to folders and stores; the same command continues."""

    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FROM")]]
    """A finished data set: a folder or an address."""
    to: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TO")]]
    """A new folder or address, or that of a copy to be completed."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Copy it."""
        copied = copy_data_set(self.source, self.to)
        if self.json:
            print_json(asdict(copied))
        else:
            print(copied)
        return 0


def copy_data_set(source_path: str, to: str) -> Copied:
    """Copy a data set, as far as it is not there yet.

    Raises:
        TokenfeedError: A place holds something else, a file is damaged, or a store fails.
    """
    started = time.perf_counter()
    source, target = open_store(source_path), _target(to)
    # What is proved here is what is written at the end: it may be replaced meanwhile.
    raw = stored(source, MANIFEST_FILE)
    manifest = Manifest.decoded(raw, source.path(MANIFEST_FILE))
    if target.store.name == source.name:
        raise ConfigError(f"{source.name}: is the place to copy from. Give another one.")
    files = list(data_files(manifest))
    with target.alone(manifest):
        _check_place(source, target, manifest)
        missing = _bring(files, source, target)
        if made_by := _optional(source, MADE_BY_FILE):
            target.write(MADE_BY_FILE, made_by)
        target.write(MANIFEST_FILE, raw)
    return Copied(
        to=target.store.name,
        fingerprint=manifest.fingerprint,
        files=len(files),
        bytes=sum(file.weight_bytes for file in files),
        copied=len(missing),
        copied_bytes=sum(file.weight_bytes for file in missing),
        seconds=round(time.perf_counter() - started, 3),
    )


def _bring(files: list[DataFile], source: Store, target: "_Target") -> list[DataFile]:
    """Copy the files that are not there yet, and return them."""
    with few_threads(_AT_ONCE) as threads:
        there = list(threads.map(target.has, files))
    missing = [file for file, is_there in zip(files, there, strict=True) if not is_there]
    with Bar(missing) as bar, few_threads(_AT_ONCE) as threads:
        jobs = [threads.submit(target.put, file, source, bar) for file in missing]
        try:
            for job in as_completed(jobs):
                job.result()
                bar.count_unit()
        except KeyboardInterrupt:
            if isinstance(target.store, ObjectStore):
                _log.warning("what is being sent is sent to its end; a second Ctrl-C ends at once")
            raise KeyboardInterrupt("what is copied is kept; the same command continues") from None
    return missing


def _optional(store: Store, name: str) -> bytes | None:
    """Return a file that the manifest does not name; None where it cannot be had.

    A store may refuse access to what is not there.
    """
    try:
        return store.read(name)
    except OSError as error:
        if gave_up(error):
            raise
        return None


class _Target(Protocol):
    """A place that files are brought to."""

    @property
    def store(self) -> Store:
        """The place."""
        ...

    def has(self, file: DataFile) -> bool:
        """Whether it is there, as the manifest says."""
        ...

    def put(self, file: DataFile, source: Store, bar: Bar) -> None:
        """Bring it there."""
        ...

    def alone(self, manifest: Manifest) -> AbstractContextManager[None]:
        """Keep other copies and runs out of the place until the block ends.

        Raises:
            ConfigError: Another one is at work there.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, whatever was there."""
        ...


def _target(to: str) -> _Target:
    output = open_output(to)
    if isinstance(output, StoreOutput):
        return _Bucket(output.store)
    return _Folder(LocalStore.from_path(to))


@dataclass(frozen=True, slots=True)
class _Folder:
    store: LocalStore

    def has(self, file: DataFile) -> bool:
        path = self._path(file)
        return (
            path.is_file()
            and path.stat().st_size == file.info.bytes
            and file_xxh3(path) == file.info.xxh3
        )

    def put(self, file: DataFile, source: Store, bar: Bar) -> None:
        fetch(file, source, self._path(file), bar)

    @contextlib.contextmanager
    def alone(self, manifest: Manifest) -> Iterator[None]:
        """Claim the folder, as `pretokenize` does."""
        folder = Path(self.store.root)
        with claimed(FolderOutput(folder), {"shards copy": manifest.fingerprint}):
            remove_leftovers(folder)
            yield

    def write(self, name: str, content: bytes) -> None:
        atomic_write(Path(self.store.root, name), content, is_shared=True)

    def _path(self, file: DataFile) -> Path:
        return Path(self.store.root, file.info.file)


@dataclass(frozen=True, slots=True)
class _Bucket:
    store: ObjectStore

    def has(self, file: DataFile) -> bool:
        try:
            info = self.store.head(file.info.file)
        except FileNotFoundError:
            return False
        known = info.size, info.metadata.get(XXH3_KEY)
        return known == (file.info.bytes, file.info.xxh3)

    def put(self, file: DataFile, source: Store, bar: Bar) -> None:
        """By way of a temporary file: what is sent has been proved."""
        with tempfile.TemporaryDirectory(prefix="tokenfeed-") as folder:
            path = Path(folder, "file")
            fetch(file, source, path, bar, synced=False)
            self.store.write(file.info.file, path, {XXH3_KEY: file.info.xxh3})

    @contextlib.contextmanager
    def alone(self, manifest: Manifest) -> Iterator[None]:
        """Leave the fingerprint there: two copies of one data set write the same bytes."""
        if not self._is_first(manifest.fingerprint):
            raise ConfigError(
                f"{self.store.name}: a copy of another data set is being made there. Give another "
                f"place; if that copy was killed, delete {self.store.path(_COPY_FILE)}."
            )
        try:
            if is_begun(StoreOutput(self.store)):
                raise ConfigError(
                    f"{self.store.name}: holds an unfinished run. Give another place."
                )
            yield
        finally:
            self.store.delete(_COPY_FILE)

    def _is_first(self, fingerprint: str) -> bool:
        try:
            return self.store.create(_COPY_FILE, fingerprint.encode())
        except RemoteError as error:
            if error.errno != errno.EOPNOTSUPP:  # a store without conditional writes
                raise
            return True

    def write(self, name: str, content: bytes) -> None:
        self.store.write(name, content, {XXH3_KEY: xxhash.xxh3_64_hexdigest(content)})


def _check_place(source: Store, target: _Target, manifest: Manifest) -> None:
    """Refuse a target that holds something else than a copy of the source."""
    to = target.store
    there = _manifest_at(to)
    if there and there.fingerprint != manifest.fingerprint:
        raise ConfigError(
            f"{to.name}: holds another data set, with the fingerprint {there.fingerprint}; "
            f"{source.name} has {manifest.fingerprint}. Give another place."
        )


def _manifest_at(store: Store) -> Manifest | None:
    """The manifest at a place; None where there is none.

    Raises:
        ConfigError: It says nothing here, so nobody knows of what data set it is.
    """
    file = store.path(MANIFEST_FILE)
    try:
        return Manifest.decoded(store.read(MANIFEST_FILE), file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ManifestError as error:
        raise ConfigError(
            f"{error} To have this place completed by a copy all the same, delete {file}."
        ) from error
