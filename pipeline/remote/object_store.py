"""A data set in an object store, or on a web server.

An `ObjectStore` has only an address and time limits. It can be pickled, and uses the client of the
process that it is in. All methods block, and may be called in any thread. Failed requests are
retried (`retrying`), or raise an error of one line that names the object.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from xxhash import xxh3_64, xxh3_64_hexdigest

from tokenfeed.pipeline.remote.address import Address, require
from tokenfeed.pipeline.remote.client import (
    Connection,
    cause_of_failure,
    connection,
    read_in_child,
    talks_here,
)
from tokenfeed.pipeline.remote.object_file import (
    FileFacts,
    ObjectInfo,
    VersionedBytes,
    cut_short,
    version_of,
)
from tokenfeed.pipeline.remote.retrying import Timing, Traffic, persist, results_of

if TYPE_CHECKING:
    import pyarrow as pa
    from obstore import GetOptions
    from obstore.store import ObjectStore as Client


T = TypeVar("T")
XXH3_KEY = "tokenfeedxxh3"
"""Key of the checksum in the metadata of an object. Azure allows only letters and digits."""
PIECE_BYTES = 8 << 20
"""Bytes per request when a larger object is read."""
_PAGE = 1000
"""Names per page of a list."""
_AT_ONCE = 16
"""Objects deleted at the same time."""

_ONE_REQUEST_BYTES = 64 << 20
_PART_BYTES, _PARTS_AT_ONCE = 16 << 20, 4
_QUICK_BYTES = 1 << 20
"""Up to this size, a write takes so little time that it needs no longer limits."""


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """The objects below an address, by name."""

    address: Address
    timing: Timing

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store at a URL. Sends no request.

        Raises:
            ConfigError: The URL or the timeout is invalid, or the client is not installed.
        """
        require("obstore", url)
        return cls(Address.from_url(url), Timing.from_environment())

    @property
    def name(self) -> str:
        """The address, as messages show it."""
        return self.address.url

    @property
    def traffic(self) -> Traffic:
        """Counts of this process's requests to this store."""
        return self._connection.meter.read()

    def path(self, name: str) -> str:
        """Return an object as messages show it."""
        return f"{self.name}/{name}"

    def __str__(self) -> str:
        return self.name

    @property
    def is_writable(self) -> bool:
        """Whether it is a bucket. A web server is read-only."""
        return not self.address.traits.is_web

    def size(self, name: str) -> int:
        """Return the bytes of an object."""
        return self.head(name).size

    def exists(self, name: str) -> bool:
        """See `Place`."""
        return self._head(name) is not None

    def has(self, info: FileFacts, written_at: int | None = None) -> bool:
        """See `Place`."""
        there = self._head(info.file)
        known = there and (there.size, there.metadata.get(XXH3_KEY))
        return known == (info.bytes, info.xxh3)

    def written_at(self, name: str) -> int | None:
        """See `Place`: always None."""
        return None

    def absolute(self) -> Self:
        """See `Place`."""
        return self

    def prepare(self) -> None:
        """See `Place`. A store has no folders."""

    def prune(self, *folders: str) -> None:
        """See `Place`: a store has no folders."""

    def names(self, folder: str = "") -> set[str]:
        """See `Place`. Sends one request per thousand objects below the folder."""
        below = f"{folder}/" if folder else ""
        found = (info.name.removeprefix(below) for info in self.list(folder))
        return {name.partition("/")[0] for name in found}

    @contextlib.contextmanager
    def room(self) -> Iterator[Path]:
        """See `Place`. Yields a temporary folder, and uploads its files at the end of the block."""
        with tempfile.TemporaryDirectory(prefix="tokenfeed-") as folder:
            yield Path(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                self.write(path.relative_to(folder).as_posix(), path)

    def head(self, name: str) -> ObjectInfo:
        """Return what the store knows about an object.

        Raises:
            RemoteMissingError: The object is missing.
            RemoteError: The store refuses, or cannot be reached.
        """

        # A signed address is often valid only for GET, which fetches no body until it is read.
        options: GetOptions = {} if self.address.query else {"head": True}

        def attempt() -> ObjectInfo:
            result = self._connection.reads.get(name, options=options)
            metadata = {str(key): value for key, value in result.attributes.items()}
            return self._info(name, result.meta, metadata)

        return self._persist(attempt, name)

    def read(self, name: str) -> bytes:
        """Return the whole of an object; errors are those of `head`.

        A process that is not a program of tokenfeed reads it by a short-lived child, which takes
        0.2 s: see `client`.
        """
        if not talks_here():
            content, traffic = read_in_child(self, name)
            self._connection.meter.add(traffic)
            return content
        size, etag, whole = self._persist(lambda: self._small(name), name)
        if whole is not None:
            return whole
        starts = range(0, size, PIECE_BYTES)
        return b"".join(
            self._part(name, start, min(PIECE_BYTES, size - start), {"if_match": etag}).data
            for start in starts
        )

    def read_range(self, name: str, start: int, length: int, etag: str = "") -> VersionedBytes:
        """Read `length` bytes from `start` on by one request; errors are those of `head`.

        Args:
            name: The object.
            start: The first byte.
            length: Number of bytes.
            etag: ETag from `head` or `list`; empty for the current version.

        Raises:
            RemoteError: The object is too short, or has another ETag.
        """
        if not length:
            return VersionedBytes(b"", "")
        if self._etag_key == "version":
            return self._part(name, start, length, {"version": etag})
        return self._part(name, start, length, {"if_match": etag})

    def read_tail(self, name: str, length: int) -> VersionedBytes:
        """Return the last bytes of an object, or all of a short one; errors are those of `head`."""
        if not self.address.traits.reads_ends:
            size = self.size(name)
            length = min(length, size)
            return self.read_range(name, size - length, length)
        return self._persist(lambda: self._get(name, {"range": {"suffix": length}})[0], name)

    def open(self, name: str, size: int) -> "pa.NativeFile":
        """Open an object of a known size, to read any part of it."""
        from tokenfeed.pipeline.remote.object_file import open_ranged

        return open_ranged(self, name, size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a folder, in the order of their names; 1,000 per request.

        Raises:
            RemoteError: The store has no lists, as plain HTTP.
        """
        last: str | None = None
        while True:
            page = self._persist(lambda: self._page(prefix, last), prefix)  # noqa: B023
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1].name

    def write(self, name: str, data: bytes | Path) -> None:
        """Write an object, whole or not at all, with its checksum as metadata.

        An object above 64 MiB is sent in parts of 16 MiB. Parts that fail are sent again.

        Args:
            name: The object.
            data: The content, or a file with the content.
        """
        metadata = {XXH3_KEY: _xxh3(data)}
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        timing = self.timing if size <= _QUICK_BYTES else self.timing.uploading
        self._persist(lambda: _put(self._connection, name, data, size, metadata), name, timing)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless it exists. Return whether it now has this content.

        After any answer but a success the object is read back and compared. So the result is right
        even if an answer was lost.
        """
        return self._persist(lambda: _create(self._connection, name, data), name)

    def delete(self, *names: str) -> None:
        """Delete objects, up to 16 at a time; missing objects are ignored."""
        if len(names) == 1:
            self._delete(names[0])
            return
        for _ in results_of(self._delete, names, _AT_ONCE):
            pass

    def _delete(self, name: str) -> None:
        def attempt() -> None:
            try:
                self._connection.reads.delete(name)
            except FileNotFoundError:
                return

        self._persist(attempt, name)

    def _head(self, name: str) -> ObjectInfo | None:
        try:
            return self.head(name)
        except FileNotFoundError:
            return None

    @property
    def _etag_key(self) -> str:
        """The client's name for what conditions compare."""
        return "version" if self.address.traits.counts_versions else "e_tag"

    def _info(self, name: str, meta: Mapping[str, Any], metadata: dict[str, str]) -> ObjectInfo:
        modified_s, etag = meta["last_modified"].timestamp(), _strong(meta.get(self._etag_key))
        return ObjectInfo(name, meta["size"], etag, version_of(meta), modified_s, metadata)

    @property
    def _connection(self) -> Connection:
        return connection(self.address, self.timing)

    def _persist(self, attempt: Callable[[], T], name: str, timing: Timing | None = None) -> T:
        place, meter = self.path(name), self._connection.meter

        def cause_of(error: Exception) -> str:
            return cause_of_failure(error, place, has_talked=meter.read().bytes > 0)

        return persist(attempt, cause_of, place, timing or self.timing, meter)

    def _small(self, name: str) -> tuple[int, str, bytes | None]:
        """Return size and ETag, and the content unless the object is large."""
        result = self._connection.reads.get(name)
        size, etag = result.meta["size"], _strong(result.meta["e_tag"])
        if size > PIECE_BYTES:
            return size, etag, None
        return size, etag, self._counted(bytes(result.bytes()))

    def _part(self, name: str, start: int, length: int, condition: "GetOptions") -> VersionedBytes:
        options: GetOptions = {"range": (start, start + length)}
        if any(condition.values()):
            options |= condition
        part, size = self._persist(lambda: self._get(name, options), name)
        if len(part.data) != length:
            raise cut_short(self.path(name), start + length, size)
        return part

    def _get(self, name: str, options: "GetOptions") -> tuple[VersionedBytes, int]:
        """Return some bytes of an object, and the size of the whole object."""
        result = self._connection.reads.get(name, options=options)
        meta = result.meta
        return VersionedBytes(self._counted(bytes(result.bytes())), version_of(meta)), meta["size"]

    def _counted(self, content: bytes) -> bytes:
        self._connection.meter.add(Traffic(bytes=len(content)))
        return content

    def _page(self, prefix: str, last: str | None) -> Sequence[ObjectInfo]:
        stream = self._connection.reads.list(prefix or None, offset=last, chunk_size=_PAGE)
        page = next(iter(stream), [])
        return [self._info(meta["path"], meta, {}) for meta in page]


def _xxh3(data: bytes | Path) -> str:
    if isinstance(data, bytes):
        return xxh3_64_hexdigest(data)
    with data.open("rb") as file:
        return hashlib.file_digest(file, xxh3_64).hexdigest()


def _strong(etag: str | None) -> str:
    """Return an ETag that a condition can use; empty for a weak ETag, which matches nothing."""
    return "" if etag is None or etag.startswith("W/") else etag


def _put(
    connection: Connection, name: str, data: bytes | Path, size: int, metadata: dict[str, str]
) -> None:
    """Write an object, a large one in parts."""
    in_parts = size > _ONE_REQUEST_BYTES
    content = data.read_bytes() if isinstance(data, Path) and not in_parts else data
    client = connection.reads if size <= _QUICK_BYTES else connection.writes
    client.put(
        name,
        content,
        attributes=metadata,
        use_multipart=in_parts,
        chunk_size=_PART_BYTES,
        max_concurrency=_PARTS_AT_ONCE,
    )
    connection.meter.add(Traffic(bytes=size))


def _create(connection: Connection, name: str, data: bytes) -> bool:
    """Write an object unless it exists. Return whether it now has this content."""
    try:
        connection.reads.put(name, data, mode="create", use_multipart=False)
    except Exception as error:
        return _is_created(connection.reads, name, data, error)
    connection.meter.add(Traffic(bytes=len(data)))
    return True


def _is_created(client: "Client", name: str, data: bytes, error: Exception) -> bool:
    """Return whether a write without success has written; raise the error to try again."""
    try:
        found = bytes(client.get(name).bytes())
    except FileNotFoundError:
        raise error from None
    if found == data:
        return True
    if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
        return False
    raise error
