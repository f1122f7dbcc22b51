"""A data set in an object store, or on a web server: what can be done with its objects.

An `ObjectStore` is its address and how long to wait, nothing else: it is pickled to any process,
and finds there the client of that process. Every method waits, and may be called by any thread;
what fails is repeated (`retrying`), or ends in one line that names the object.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tokenfeed.pipeline.remote.address import Address, require
from tokenfeed.pipeline.remote.child import read_in_child
from tokenfeed.pipeline.remote.client import Connection, connection
from tokenfeed.pipeline.remote.failures import cause_of_failure
from tokenfeed.pipeline.remote.objects import ObjectInfo, VersionedBytes, cut_short, version_of
from tokenfeed.pipeline.remote.process import talks_here
from tokenfeed.pipeline.remote.retrying import Timing, Traffic, persist
from tokenfeed.pipeline.remote.writing import is_quick, put, put_if

if TYPE_CHECKING:
    import pyarrow as pa
    from obstore import GetOptions

__all__ = ["XXH3_KEY", "ObjectStore"]

T = TypeVar("T")
XXH3_KEY = "tokenfeedxxh3"
"""In the metadata of an object: the checksum of its content. Azure takes no other signs."""
PIECE_BYTES = 8 << 20
"""Of an object that is larger, this much is read by one request."""
_PAGE = 1000
"""Names that a store lists at once."""


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Objects by their names below an address."""

    address: Address
    timing: Timing

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store at a URL; nothing is asked yet.

        Raises:
            ConfigError: The URL or the timeout cannot be one, or the client is not installed.
        """
        require("obstore", url)
        return cls(Address.from_url(url), Timing.from_environment())

    @property
    def name(self) -> str:
        """The address as messages show it."""
        return self.address.url

    @property
    def traffic(self) -> Traffic:
        """What this process has asked of this store."""
        return self._connection.meter.read()

    def path(self, name: str) -> str:
        """An object as messages name it."""
        return f"{self.name}/{name}"

    def size(self, name: str) -> int:
        """Bytes of an object."""
        return self.head(name).size

    def head(self, name: str) -> ObjectInfo:
        """What the store says of an object.

        Raises:
            RemoteMissingError: It is not there.
            RemoteError: The store refuses, or cannot be reached.
        """

        # A signed address is often valid for GET alone. The body is not fetched until it is read.
        options: GetOptions = {} if self.address.query else {"head": True}

        def attempt() -> ObjectInfo:
            result = self._connection.reads.get(name, options=options)
            metadata = {str(key): value for key, value in result.attributes.items()}
            return self._info(name, result.meta, metadata)

        return self._persist(attempt, name)

    def read(self, name: str) -> bytes:
        """The whole of an object; errors are those of `head`.

        A process that is not ours has it fetched by a short-lived program, for 0.2 s: see
        `process`.
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
        """`length` bytes from `start` on, by one request; errors are those of `head`.

        Args:
            name: The object.
            start: Where they begin.
            length: How many.
            etag: As `head` or `list` has it; none for whatever is there now.

        Raises:
            RemoteError: The object has fewer, or another ETag.
        """
        if not length:
            return VersionedBytes(b"", "")
        if self._etag_key == "version":
            return self._part(name, start, length, {"version": etag})
        return self._part(name, start, length, {"if_match": etag})

    def read_tail(self, name: str, length: int) -> VersionedBytes:
        """The last bytes of an object, or all where it has fewer; errors are those of `head`."""
        if not self.address.traits.reads_ends:
            size = self.size(name)
            length = min(length, size)
            return self.read_range(name, size - length, length)
        return self._persist(lambda: self._get(name, {"range": {"suffix": length}})[0], name)

    def open(self, name: str, size: int) -> "pa.NativeFile":
        """An object of a known size, to read any part of it."""
        from tokenfeed.pipeline.remote.ranged import open_ranged

        return open_ranged(self, name, size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects below a folder, by their names' order; a request for each thousand.

        Raises:
            RemoteError: The store cannot: plain HTTP has no lists.
        """
        last: str | None = None
        while True:
            page = self._persist(lambda: self._page(prefix, last), prefix)  # noqa: B023
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1].name

    def write(self, name: str, data: bytes | Path, metadata: dict[str, str] | None = None) -> str:
        """Put an object, whole or not at all, whatever was there; returns its ETag.

        Above 64 MiB it goes in parts of 16 MiB, each repeated alone. What takes long to send has
        its time: no byte comes back meanwhile.
        """
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        timing = self.timing if is_quick(size) else self.timing.uploading

        def attempt() -> str:
            return self._etag(put(self._connection, name, data, size, metadata))

        return self._persist(attempt, name, timing)

    def create(self, name: str, data: bytes) -> bool:
        """Put an object if there is none; whether it is now there with this content.

        Who asks twice, or loses the answer, is told the truth: after anything but a success the
        object is read back and compared.
        """
        return self._put_if(name, data, "create")

    def replace(self, name: str, data: bytes, etag: str) -> bool:
        """Put an object in place of the one with this ETag; whether it now has this content."""
        return self._put_if(name, data, {self._etag_key: etag})

    def delete(self, name: str) -> None:
        """Remove an object; one that is gone is no error."""

        def attempt() -> None:
            try:
                self._connection.reads.delete(name)
            except FileNotFoundError:
                return

        self._persist(attempt, name)

    @property
    def _etag_key(self) -> str:
        """What a condition goes by, as the client calls it."""
        return "version" if self.address.traits.counts_versions else "e_tag"

    def _info(self, name: str, meta: Mapping[str, Any], metadata: dict[str, str]) -> ObjectInfo:
        modified_s, etag = meta["last_modified"].timestamp(), self._etag(meta)
        return ObjectInfo(name, meta["size"], etag, version_of(meta), modified_s, metadata)

    def _etag(self, said: Mapping[str, Any]) -> str:
        return _strong(said.get(self._etag_key))

    @property
    def _connection(self) -> Connection:
        return connection(self.address, self.timing)

    def _persist(self, attempt: Callable[[], T], name: str, timing: Timing | None = None) -> T:
        place, meter = self.path(name), self._connection.meter

        def cause_of(error: Exception) -> str:
            return cause_of_failure(error, place, has_talked=meter.read().bytes > 0)

        return persist(attempt, cause_of, place, timing or self.timing, meter)

    def _small(self, name: str) -> tuple[int, str, bytes | None]:
        """Size, ETag, and the content if it is not large."""
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
        """Some of an object, and the size of all."""
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

    def _put_if(self, name: str, data: bytes, mode: Any) -> bool:
        return self._persist(lambda: put_if(self._connection, name, data, mode), name)


def _strong(etag: str | None) -> str:
    """An ETag that a request can ask for; a weak one matches nothing, and says less than a time."""
    return "" if etag is None or etag.startswith("W/") else etag
