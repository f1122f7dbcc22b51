"""The files of a data set, brought from where it is, each proved on the way."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import xxhash

from tokenfeed.pipeline.format.manifest import FileInfo, Manifest, ShardInfo
from tokenfeed.pipeline.format.read_errors import damaged, refused
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_file
from tokenfeed.pipeline.format.store import Store
from tokenfeed.tools.jobs.crew import Progress
from tokenfeed.tools.jobs.progress_bar import Bar

__all__ = ["SCRATCH_PREFIX", "DataFile", "data_files", "fetch", "remove_leftovers"]

SCRATCH_PREFIX = ".repair-"
"""Folders in a data set where a repair makes shards."""
_PIECE_BYTES = 1 << 20
_TRIES = 2
"""A bit may flip on the way; a second time it is the file."""


class DataFile(NamedTuple):
    """A file that a manifest names."""

    info: FileInfo
    tokens: int

    @property
    def weight_bytes(self) -> int:
        """What it counts in the progress."""
        return self.info.bytes


def data_files(manifest: Manifest) -> Iterator[DataFile]:
    """All of them but the manifest."""
    side = (manifest.tokenizer, manifest.sources, manifest.rejects)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    for info in dict.fromkeys((*side, *shards)):
        yield DataFile(info, info.tokens if isinstance(info, ShardInfo) else 0)


def fetch(file: DataFile, source: Store, path: Path, bar: Bar, *, synced: bool = True) -> None:
    """Copy a file into a folder; what is not as the manifest says is fetched a second time.

    Raises:
        ShardFormatError: It is missing, cannot be read, or is damaged at the source.
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
    """Remove what copies and repairs of a data set left there when they were killed."""
    for scratch in folder.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(scratch, ignore_errors=True)
    for temporary in folder.rglob(f"*{TEMPORARY_SUFFIX}"):
        temporary.unlink(missing_ok=True)


class _AnotherError(Exception):
    """The bytes that came are not those of the manifest."""


def _stream(file: DataFile, source: Store, copy: IO[bytes], bar: Bar) -> str:
    """Write the content of a file; its checksum."""
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
