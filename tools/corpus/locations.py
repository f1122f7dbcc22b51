"""The place of an input file: a path on this machine, or an object in a store.

Each request for an object names the version that the run found, and each answer is compared with
this version. So a changed object is an error, and never a mixture of two versions. An error of a
store is not a damage of the file.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from tokenfeed.pipeline.errors import ConfigError, CorpusError, RemoteError, RemoteMissingError
from tokenfeed.pipeline.remote.object_file import (
    ObjectInfo,
    VersionedBytes,
    open_ranged_bytes,
)

if TYPE_CHECKING:
    from tokenfeed.pipeline.remote.object_store import ObjectStore


PUT_BACK = "Put it back, or start again with an empty output folder."
FOREIGN_INDEX = "index.json"
"""In the folders of litData and mosaicml-streaming."""
_PIECE_BYTES = 8 << 20
_SMALL_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object in the version that the run found."""

    store: "ObjectStore"
    info: ObjectInfo
    pinned: str = ""
    """For a file of the Hub: the address with its commit, at which the content never changes."""
    content: bytes | None = field(default=None, repr=False)
    """The whole content, if it was fetched."""
    beside: tuple[ObjectInfo, ...] = ()
    """The objects of `names_beside` that exist."""

    def __str__(self) -> str:
        return self.pinned or self.store.path(self.info.name)

    @property
    def state(self) -> str:
        """A value that changes with the object, and with those beside it."""
        infos = (self.info, *self.beside)
        states = (info.etag or f"{info.modified_s} {info.size}" for info in infos)
        return self.pinned or " ".join(states)

    def asked_for(self) -> Self:
        """Return the object with its version, if the list had none, and the objects beside it.

        Raises:
            CorpusError: The object is missing, or the store fails.
        """
        if self.pinned:
            return self
        try:
            info = self.info if self.info.etag else self.store.head(self.info.name)
            found = (self.look_for(name) for name in names_beside(info.name))
            return replace(self, info=info, beside=tuple(filter(None, found)))
        except (RemoteError, ConfigError) as error:
            raise self._told(error) from error

    def look_for(self, name: str) -> ObjectInfo | None:
        """Return an object, or None if it is missing. A store may refuse access to it then."""
        try:
            return self.store.head(name)
        except RemoteError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES):
                raise
            return None

    @property
    def is_small(self) -> bool:
        """Whether the object is so small that one early request fetches it."""
        return self.content is None and self.info.size <= _SMALL_BYTES

    def fetched(self) -> Self:
        """Return the object with its content. Raises the errors of `read_range`."""
        return replace(self, content=self.read_range(self.info.name, 0, self.info.size).data)

    def read_range(self, name: str, start: int, length: int) -> VersionedBytes:
        """Return a range of bytes.

        Raises:
            CorpusError: The object is missing or changed, or the store fails.
        """
        if self.content is not None:
            return VersionedBytes(self.content[start : start + length], self.info.version)
        try:
            part = self.store.read_range(name, start, length, self.info.etag)
        except (RemoteError, ConfigError) as error:
            raise self._told(error) from error
        is_same = self.pinned or _bare(part.version) == _bare(self.info.version)
        if part.data and not is_same:
            raise self._changed()
        return part

    def _told(self, error: RemoteError | ConfigError) -> CorpusError:
        if isinstance(error, RemoteMissingError):
            return CorpusError(f"{self}: vanished while the corpus was read. {PUT_BACK}")
        if isinstance(error, RemoteError) and error.errno == errno.ESTALE:
            return self._changed()
        return CorpusError(str(error))

    def _changed(self) -> CorpusError:
        return CorpusError(f"{self}: changed while the corpus was read. {PUT_BACK}")


def _bare(version: str) -> str:
    """Return a version without quotes. Some lists have quotes and some do not."""
    return version.strip('"')


Location = str | RemoteFile
"""An absolute path, or an object."""


def size_of(place: Location) -> int:
    """Return the bytes of a file."""
    return os.path.getsize(place) if isinstance(place, str) else place.info.size


def indexes_beside(name: str) -> tuple[str, ...]:
    """Return the names of files, in the same folder, that a file of token ids may need: they
    contain the borders of its rows. Beside a name in upper case, they may be in upper case too."""
    stem, ending = os.path.splitext(name)
    endings = {
        ".ds": (f"{ending}.index", f"{ending}.metadata"),
        ".bin": (".idx",),
        ".npy": (".csv.gz",),
    }.get(ending.lower(), ())
    cases = (str, str.upper) if ending.isupper() else (str,)
    return tuple(stem + case(each) for case in cases for each in endings)


def names_beside(name: str) -> tuple[str, ...]:
    """Return the names of all files, in the same folder, that say what a file of token ids is."""
    foreign = os.path.join(os.path.dirname(name), FOREIGN_INDEX)
    return *indexes_beside(name), *([foreign] if name.lower().endswith(".bin") else [])


def beside(place: Location, name: str) -> Location | None:
    """Return a file in the folder of another; None if it is missing.

    Args:
        place: The other file.
        name: One of `names_beside`, without the folder.
    """
    if isinstance(place, str):
        path = os.path.join(os.path.dirname(place), name)
        return path if os.path.lexists(path) else None
    key = os.path.join(os.path.dirname(place.info.name), name)
    found = next((info for info in place.beside if info.name == key), None)
    if place.pinned:
        found = place.look_for(key)
    return replace(place, info=found, content=None) if found else None


def open_location(place: Location) -> BinaryIO:
    """Open an input file for reading in order. Requests for an object become larger."""
    if isinstance(place, str):
        return open(place, "rb", buffering=0)
    return open_ranged_bytes(place, place.info.name, place.info.size)


def read_array(place: Location, dtype: "np.dtype | str", start: int, count: int) -> np.ndarray:
    """Return an array that begins at a byte of a file.

    Raises:
        ValueError: The file is shorter.
    """
    if isinstance(place, str):
        values: np.ndarray = np.fromfile(place, dtype, count, offset=start)
    else:
        width, data = np.dtype(dtype).itemsize, bytearray()
        with open_location(place) as file:
            file.seek(start)
            while piece := file.read(min(width * count - len(data), _PIECE_BYTES)):
                data += piece
        values = np.frombuffer(data, dtype, len(data) // width)
    if len(values) < count:
        raise ValueError(f"{place} is cut short")
    return values


@contextlib.contextmanager
def local_copy(place: Location) -> Iterator[str]:
    """Yield a local path of an input file. The copy of an object exists until the block ends.

    Raises:
        CorpusError: The disk is full, or the store fails.
    """
    if isinstance(place, str):
        yield place
        return
    with tempfile.NamedTemporaryFile(prefix="tokenfeed-") as copy:
        try:
            with open_location(place) as file:
                shutil.copyfileobj(file, copy, _PIECE_BYTES)
            copy.flush()
        except OSError as error:
            raise CorpusError(
                f"{place}: cannot be copied to {os.path.dirname(copy.name)}: {error.strerror}. Set "
                "TMPDIR to a folder with more room."
            ) from error
        yield copy.name
