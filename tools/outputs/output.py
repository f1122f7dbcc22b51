"""Where a data set is made: one small protocol, by which all that writes one puts its files there.

Files have names below the output, with forward slashes. Each comes to be whole and at once.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_write, file_xxh3
from tokenfeed.pipeline.format.store import StorePath

__all__ = ["FolderOutput", "Output", "is_as_written", "open_output"]


class Output(Protocol):
    """A place for one data set; it goes to workers as a pickle, and `str` is its name."""

    @property
    def place(self) -> StorePath:
        """The same place for who reads."""
        ...

    def absolute(self) -> Self:
        """The same from any working directory."""
        ...

    def path(self, name: str) -> str:
        """A file as a message names it."""
        ...

    def prepare(self) -> list[Path]:
        """Make the place itself, if need be. Return the folders above it that had to be made, the
        innermost first."""
        ...

    def names(self, folder: str = "") -> set[str]:
        """What lies in the output, or in a folder of it: files and folders."""
        ...

    def read(self, name: str) -> bytes:
        """A small file."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        ...

    def written_at(self, name: str) -> int | None:
        """When a file was last written, in ns; None if it is missing or `has` need not know."""
        ...

    def has(self, info: FileInfo, written_at: int | None = None) -> bool:
        """Whether a file has the content that `info` describes.

        A file in a folder is read, unless its size and `written_at` are unchanged.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, whatever was there."""
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless it exists. Return whether this call wrote it."""
        ...

    def delete(self, *names: str) -> None:
        """Delete files, as far as they are there."""
        ...

    def prune(self, *folders: str) -> None:
        """Delete folders that are empty; `""` is the output itself."""
        ...

    def room(self) -> AbstractContextManager[Path]:
        """A folder of this machine in which shards are written; when the block ends well they are
        in the output."""
        ...


def open_output(path: str) -> Output:
    """Return the place that a path names: a folder, or the address of a store. Sends no request.

    Raises:
        ConfigError: There is no such store, or no data set is written there; or the path is a slip.
    """
    if "://" not in path:
        _check_meant(path)
        return FolderOutput(Path(path))
    from tokenfeed.tools.outputs.store import StoreOutput

    return StoreOutput.from_url(path)


def _check_meant(folder: str) -> None:
    """Refuse the slip of a shell, and of an address: both would name a folder of this machine."""
    if not folder:
        raise ConfigError("the output has no name. Give a folder, or the address of a bucket.")
    if scheme := re.match("([a-z][a-z0-9+.-]*):/", folder):
        raise ConfigError(
            f"{folder}: looks like an address, which begins with `{scheme[1]}://`. Write it so, or "
            f"`./{folder}` for a folder."
        )


@dataclass(frozen=True, slots=True)
class FolderOutput:
    """A folder of this machine, or one that several share.

    Several processes may write a file at the same time: each has a temporary name of its own.
    """

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def place(self) -> Path:
        """See `Output`."""
        return self.folder

    def absolute(self) -> Self:
        """See `Output`."""
        return dataclasses.replace(self, folder=self.folder.absolute())

    def path(self, name: str) -> str:
        """See `Output`."""
        return str(self.folder / name)

    def prepare(self) -> list[Path]:
        """See `Output`.

        Raises:
            ConfigError: It cannot be made.
        """
        missing = [parent for parent in self.folder.parents if not parent.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self}: cannot be made ({error.strerror}). Give a folder elsewhere."
            ) from error
        return missing

    def names(self, folder: str = "") -> set[str]:
        """See `Output`."""
        try:
            return set(os.listdir(self.folder / folder))
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        """See `Output`."""
        return (self.folder / name).read_bytes()

    def size(self, name: str) -> int | None:
        """See `Output`."""
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def written_at(self, name: str) -> int | None:
        """See `Output`."""
        try:
            return (self.folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def has(self, info: FileInfo, written_at: int | None = None) -> bool:
        """See `Output`."""
        if written_at is not None and written_at == self.written_at(info.file):
            return self.size(info.file) == info.bytes
        return is_as_written(self.folder, info)

    def write(self, name: str, content: bytes) -> None:
        """See `Output`."""
        atomic_write(self.folder / name, content, is_shared=True)

    def create(self, name: str, content: bytes) -> bool:
        """See `Output`."""
        path = self.folder / name
        own = path.with_name(f"{path.name}.{os.urandom(8).hex()}{TEMPORARY_SUFFIX}")
        try:
            atomic_write(own, content)
        except OSError as error:
            error.filename = str(path)
            raise
        is_created = True
        try:
            os.link(own, path)
        except FileExistsError:
            is_created = False
        except OSError:  # a file system without links: the last of those that begin at once wins
            is_created = not path.exists()
            if is_created:
                os.replace(own, path)
        own.unlink(missing_ok=True)
        return is_created

    def delete(self, *names: str) -> None:
        """See `Output`."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def prune(self, *folders: str) -> None:
        """See `Output`."""
        for folder in folders:
            with contextlib.suppress(OSError):
                (self.folder / folder).rmdir()

    @contextlib.contextmanager
    def room(self) -> Iterator[Path]:
        """See `Output`: shards are written where they stay."""
        yield self.folder


def is_as_written(folder: Path, info: FileInfo) -> bool:
    """Whether a file is there, with the content that it was left with; reads it."""
    path = folder / info.file
    try:
        return path.stat().st_size == info.bytes and file_xxh3(path) == info.xxh3
    except FileNotFoundError:
        return False
