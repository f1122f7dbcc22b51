"""The record batches of sources in stores: each in one request, by way of the node's cache.

A record batch of a replaced shard can pass all its checksums. So every answer of the store is used
only if the footer of the same object version was compared with the manifest. For a new version, the
footer is read and compared first. Replicas of the same object may have different versions. If a
store reports a new version on almost every request, versions cannot detect a replacement, and they
are no longer compared. Example: the footer was read at version A. Bytes of version A are accepted.
Bytes of version B arrive: the footer is read again, of version B, and equals the manifest, so A and
B are both accepted from then on. If it differs, the shard was replaced: ShardFormatError.
"""

import logging
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Self

import msgspec
import numpy as np
import xxhash

from tokenfeed.pipeline.caching.node import Node, SharedPieces
from tokenfeed.pipeline.caching.node_cache import FIRST_END, CacheSet
from tokenfeed.pipeline.errors import ShardFormatError, TokenfeedError
from tokenfeed.pipeline.format.arrow_file import missing_bytes
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.schema import Rows
from tokenfeed.pipeline.format.shard import ExpectedShard, end_bytes
from tokenfeed.pipeline.format.shard_ranges import RangedShard
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
from tokenfeed.pipeline.remote.object_file import VersionedBytes

DAMAGED = "%s: %s was damaged in the cache or on the network. It was fetched again and is correct."
_OPEN_SHARDS = 2048
"""Footers in memory, about 16 KB each. The other footers are in the cache."""
_MOST_COMPARISONS, _MOST_READS = 32, 4
"""Largest number of footers read for new versions of one shard, and of attempts to read bytes of a
known version. Both exceed the usual number of replicas."""
_UNSTEADY = (
    "%s: its version changes on every request, so a replacement during reading cannot be detected."
)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RemoteShard:
    """A shard whose footer was compared with the manifest."""

    number: int
    ranged: RangedShard
    versions: tuple[str, ...]
    """Versions of the object that have this footer."""
    comparisons: int = 0
    comparing: threading.Lock = field(default_factory=threading.Lock)
    error: Exception | None = None
    """Why the comparison failed. Threads that waited for it raise this error; a later `get` opens
    the shard again."""


class RemoteShards:
    """The shards of one source, with their footers. Safe to use in many threads."""

    def __init__(
        self,
        source: OpenedSplit,
        store: RangedStore,
        only: Collection[str] | None,
        node: Node,
        files: CacheSet | None,
    ) -> None:
        """Send no request yet.

        Args:
            source: The split.
            store: The store of the split.
            only: Columns to decode; None for all.
            node: Threads and counts of this process.
            files: Cached files of the split; None without a cache.
        """
        self._source, self._store, self._only = source, store, only
        self._ends = SharedPieces(node, files, files.end if files else str, FIRST_END)
        self._opened: OrderedDict[int, RemoteShard] = OrderedDict()
        self._opening = threading.Lock()
        self._are_steady = True

    def get(self, numbers: Iterable[int]) -> dict[int, RemoteShard]:
        """Return shards by number, with their footers.

        Raises:
            ShardFormatError: A shard is missing, damaged, or not the one of the manifest.
        """
        wanted = dict.fromkeys(numbers)
        with self._opening:
            opened = ((number, self._opened.get(number)) for number in wanted)
            found = {number: shard for number, shard in opened if shard and not shard.error}
        missing = [number for number in wanted if number not in found]
        for number, kept in self._ends.get(missing, self._fetch).items():
            end, ranged = self._sound(number, kept)
            found[number] = RemoteShard(number, ranged, end.versions)
        with self._opening:
            self._opened.update(found)
            while len(self._opened) > _OPEN_SHARDS:
                self._opened.popitem(last=False)
        return found

    def read(self, shard: RemoteShard, first: int, count: int) -> bytes:
        """Read the bytes of neighbouring record batches in one request.

        Raises:
            ShardFormatError: The shard is missing or was replaced.
        """
        for _ in range(_MOST_READS):
            part = self._part(shard, *shard.ranged.span(first, count))
            if self._is_its_own(shard, part.version):
                return part.data
        self._are_steady = False
        _log.info(_UNSTEADY, shard.ranged.expected.path)
        return part.data

    def _part(self, shard: RemoteShard, start: int, length: int) -> VersionedBytes:
        try:
            return self._store.read_range(self._file(shard.number), start, length)
        except FileNotFoundError as error:
            raise self._not_found(shard.number) from error

    def _is_its_own(self, shard: RemoteShard, version: str) -> bool:
        """Return whether this version of the object has the footer of the shard.

        Also return True if the store has no versions, or too many to compare.

        Raises:
            ShardFormatError: The version has another footer.
        """
        if version in ("", *shard.versions) or not self._are_steady:
            return True
        with shard.comparing:
            if shard.error:
                raise shard.error
            try:
                while version not in shard.versions and shard.comparisons < _MOST_COMPARISONS:
                    self._compare(shard)
            except TokenfeedError as error:
                shard.error = error
                raise
        return version in shard.versions

    def _compare(self, shard: RemoteShard) -> None:
        """Read the footer of the current version, and compare it.

        Raises:
            ShardFormatError: The footer differs.
        """
        shard.comparisons += 1
        fetched = self._fetch(shard.number)
        end, found = self._sound(shard.number, fetched)
        versions = tuple(dict.fromkeys((*shard.versions, *end.versions)))[-_MOST_COMPARISONS:]
        self._ends.replace(shard.number, _End(versions, end.data).to_bytes())
        is_same = np.array_equal(found.edges, shard.ranged.edges)
        if not is_same or end.versions != _End.from_bytes(fetched).versions:
            raise ShardFormatError(
                f"{shard.ranged.expected.path}: was replaced while it was read. Restore the shard "
                "that the manifest names, and start again."
            )
        shard.versions = versions

    def _sound(self, number: int, kept: bytes) -> tuple["_End", RangedShard]:
        """Decode a footer from the cache or the store; if it is damaged, fetch it again once."""
        info, manifest = self._source.split.shards[number], self._source.manifest
        expected = ExpectedShard.of(
            self._store.path(info.file),
            info,
            manifest.tokenizer.vocabulary_size,
            manifest.columns,
            self._only,
        )
        end = _End.from_bytes(kept)
        try:
            return end, RangedShard.from_end(expected, end.data)
        except ShardFormatError:
            end = _End.from_bytes(self._ends.again(number, self._fetch))
            ranged = RangedShard.from_end(expected, end.data)  # raises if the store has it so
            _log.warning(DAMAGED, expected.path, "the footer")
            return end, ranged

    def _fetch(self, number: int) -> bytes:
        """Fetch the end of a shard with its whole footer, in the form that the cache stores."""
        info = self._source.split.shards[number]
        try:
            part = self._store.read_tail(info.file, end_bytes(info))
            if more := missing_bytes(part.data):
                part = self._store.read_tail(info.file, min(more, info.bytes))
        except FileNotFoundError as error:
            raise self._not_found(number) from error
        return _End((part.version,) if part.version else (), part.data).to_bytes()

    def _file(self, number: int) -> str:
        return self._source.split.shards[number].file

    def _not_found(self, number: int) -> ShardFormatError:
        return ShardFormatError(
            f"{self._store.path(self._file(number))}: not found, but the manifest names it. "
            "Copy it again."
        )


class _End(msgspec.Struct, array_like=True):
    """The last bytes of a shard, and the object versions that have them."""

    versions: tuple[str, ...]
    """Versions of the object; empty if the store has none."""
    data: bytes

    def to_bytes(self) -> bytes:
        """Return the form for the cache."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, kept: bytes) -> Self:
        """Decode what `to_bytes` returned. Damaged bytes have no versions and no valid footer."""
        try:
            return msgspec.msgpack.decode(kept, type=cls)
        except msgspec.MsgspecError:
            return cls((), b"")


_AT_ONCE = 128
"""Record batches in memory before decoding: enough to keep the threads busy."""
_RUN_BYTES = 8 << 20
"""Bytes of a request for neighbouring record batches, if the whole split will be cached."""

Shards = dict[int, RemoteShard]


class RemoteBatches:
    """Record batches of one source in a store. One thread may read while another one prefetches."""

    def __init__(self, source: OpenedSplit, only: Collection[str] | None, node: Node) -> None:
        """Send no request yet.

        Args:
            source: The split. Its store supports ranged reads.
            only: Columns to decode; None for all. All columns are fetched.
            node: Threads, counts and cache of this process.
        """
        assert isinstance(source.store, RangedStore)
        self._source, self._store = source, source.store
        self._only = only
        self._node = node
        node.stores.append(self._store)
        self._infos = source.split.shards
        self._batch_ends = array("q", accumulate(info.batches for info in self._infos))
        self._row_ends = array("q", accumulate(info.rows for info in self._infos))
        name = f"{self._source.manifest.fingerprint} {self._infos[0].file}"
        files = None
        if not isinstance(self._store, FetchingStore):
            own = xxhash.xxh3_64_hexdigest(name.encode())
            files = self._node.open_set(own)
        self._files = files
        self._batches = SharedPieces(self._node, files, files.batch if files else str)
        self._shards = RemoteShards(self._source, self._store, self._only, self._node, files)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled copy, as a worker gets it, has no footers and no locks."""
        return {"args": (self._source, self._only, self._node)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["args"])  # type: ignore[misc]

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[Rows, int]]:
        """Decode record batches. Fetch missing ones concurrently."""
        if self._files:
            self._files.touch()
        for start in range(0, len(numbers), _AT_ONCE):
            part = list(numbers[start : start + _AT_ONCE])
            with self._node.waiting():
                shards = self._shards_of(part)
                messages = self._batches.get(part, partial(self._fetch, shards))
            for number in part:
                yield self._decoded(shards, number, messages[number])

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Put record batches into the cache, with their neighbours if the cache holds the whole
        split.

        A `FetchingStore` keeps whole files itself: fetch the files that contain the record batches.
        """
        if isinstance(self._store, FetchingStore):
            names = dict.fromkeys(self._infos[self._shard_of(number)].file for number in numbers)
            for _ in self._node.threads_ahead.map(self._store.fetch, names):
                pass
        files = self._files
        if files is None or files.cache.is_paused:
            return
        missing = [number for number in numbers if not files.has(files.batch(number))]
        if missing:
            shards = self._shards_of(missing)
            runs = dict.fromkeys(map(self._run, missing))
            for _ in self._node.threads_ahead.map(partial(self._fetch_run, shards), runs):
                pass

    def _decoded(self, shards: Shards, number: int, message: bytes) -> tuple[Rows, int]:
        shard = self._shard_of(number)
        info, reader = self._infos[shard], shards[shard].ranged
        index = self._index(number)
        try:
            rows, first_row = reader.rows(index, message)
        except ShardFormatError:
            message = self._batches.again(number, partial(self._fetch, shards))
            rows, first_row = reader.rows(index, message)  # raises if the store has it so
            _log.warning(DAMAGED, reader.expected.path, f"record batch {index}")
        return rows, first_row + self._row_ends[shard] - info.rows

    def _shards_of(self, numbers: Iterable[int]) -> Shards:
        """Return the shards of record batches, with their footers."""
        return self._shards.get(map(self._shard_of, numbers))

    def _fetch(self, shards: Shards, number: int) -> bytes:
        return self._shards.read(shards[self._shard_of(number)], self._index(number), 1)

    def _fetch_run(self, shards: Shards, run: tuple[int, int]) -> None:
        """Put neighbouring record batches into the cache, unless another process is fetching
        them."""
        files, (first, count) = self._files, run
        assert files
        with files.lock(first, count) as is_mine:
            numbers = range(first, first + count)
            wanted = [n for n in numbers if is_mine and not files.has(files.batch(n))]
            if not wanted:
                return
            shard = self._shard_of(first)
            part = self._index(wanted[0]), wanted[-1] + 1 - wanted[0]
            data = self._shards.read(shards[shard], *part)
            messages = shards[shard].ranged.cut(*part, data)
            for number in wanted:
                files.cache.write(files.batch(number), messages[number - wanted[0]])

    def _run(self, number: int) -> tuple[int, int]:
        """Return the first record batch of the request that includes `number`, and their count."""
        settings = self._node.settings
        if settings is None or not settings.is_whole:
            return number, 1
        shard, index = self._shard_of(number), self._index(number)
        info = self._infos[shard]
        length = max(1, _RUN_BYTES * info.batches // info.bytes)
        first = index // length * length
        return number - index + first, min(length, info.batches - first)

    def _shard_of(self, number: int) -> int:
        return bisect_right(self._batch_ends, number)

    def _index(self, number: int) -> int:
        """Return the index of a record batch in its shard."""
        shard = self._shard_of(number)
        return number - self._batch_ends[shard] + self._infos[shard].batches
