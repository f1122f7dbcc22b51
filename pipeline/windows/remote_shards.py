"""The shards of a split in a store: their footers, and that the objects are still those.

A record batch of a shard that took the place of another passes every check of its own where it is
as long as the one that is meant. So bytes count only where the footer of the same version of the
object was compared with the manifest; of a version that is new the footer is read first. Equal
objects may differ in their versions, as those of replicas do. Where no end of new versions is seen,
they say nothing, and are no longer compared.
"""

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from tokenfeed.pipeline.caching.eviction import FIRST_END
from tokenfeed.pipeline.caching.node import Node, SharedPieces
from tokenfeed.pipeline.caching.node_cache import CacheSet
from tokenfeed.pipeline.errors import ShardFormatError, TokenfeedError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.ranged import RangedShard, end_bytes, missing_bytes
from tokenfeed.pipeline.format.store import RangedStore
from tokenfeed.pipeline.format.verification import ExpectedShard
from tokenfeed.pipeline.remote.objects import VersionedBytes

__all__ = ["DAMAGED", "RemoteShard", "RemoteShards"]

DAMAGED = "%s: %s was damaged in the cache or on its way: it was fetched again, and is whole."
_OPEN_SHARDS = 2048
"""Footers in memory, of some 16 KB each; the others are in the cache."""
_MOST_COMPARISONS, _MOST_READS = 32, 4
"""Footers of one shard that are read for new versions, and how often bytes are that have another
one still: more than it takes to meet all replicas."""
_VERSIONS = re.compile(rb"tokenfeed (\[[^\n]*\])\n")
_UNSTEADY = "%s: has ever new versions: that it is replaced while it is read would not be noticed."
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RemoteShard:
    """One shard, whose footer was compared with the manifest."""

    number: int
    ranged: RangedShard
    versions: tuple[str, ...]
    """Those of the object in which it has this footer."""
    comparisons: int = 0
    comparing: threading.Lock = field(default_factory=threading.Lock)
    error: Exception | None = None
    """Why it cannot be compared: who waits for that need not try, who comes later opens it anew."""


class RemoteShards:
    """Safe to use in many threads."""

    def __init__(
        self,
        source: OpenedSplit,
        store: RangedStore,
        only: Collection[str] | None,
        node: Node,
        files: CacheSet | None,
    ) -> None:
        """Ask for nothing yet.

        Args:
            source: The split.
            store: Its own, which reads ranges.
            only: Columns to read; None for all.
            node: Threads and counts of this process.
            files: The cache of the split; None where nothing is kept.
        """
        self._source, self._store, self._only = source, store, only
        self._ends = SharedPieces(node, files, files.end if files else str, FIRST_END)
        self._opened: OrderedDict[int, RemoteShard] = OrderedDict()
        self._opening = threading.Lock()
        self._are_steady = True

    def get(self, numbers: Iterable[int]) -> dict[int, RemoteShard]:
        """Some shards, with their footers.

        Raises:
            ShardFormatError: One is missing, damaged, or another one.
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
        """The bytes of neighbouring record batches, in one request.

        Raises:
            ShardFormatError: The shard is missing, or another one has taken its place.
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
        """Whether it has the right footer in this version, as far as versions are steady.

        Raises:
            ShardFormatError: It has that of another shard.
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
        """Read the footer again, of the version that answers now.

        Raises:
            ShardFormatError: It is another one.
        """
        shard.comparisons += 1
        fetched = self._fetch(shard.number)
        end, found = self._sound(shard.number, fetched)
        versions = tuple(dict.fromkeys((*shard.versions, *end.versions)))[-_MOST_COMPARISONS:]
        self._ends.replace(shard.number, _End(versions, end.data).to_bytes())
        is_same = np.array_equal(found.edges, shard.ranged.edges)
        if not is_same or end.versions != _End.from_bytes(fetched).versions:
            raise ShardFormatError(
                f"{shard.ranged.expected.path}: was replaced while it was read. Put back the one "
                "that the manifest names, and start again."
            )
        shard.versions = versions

    def _sound(self, number: int, kept: bytes) -> tuple["_End", RangedShard]:
        """The footer in what the cache or the store has, or in what is fetched once more."""
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
            ranged = RangedShard.from_end(expected, end.data)  # raises where the store has it so
            _log.warning(DAMAGED, expected.path, "the footer")
            return end, ranged

    def _fetch(self, number: int) -> bytes:
        """The end of a shard, with all of its footer, as the cache keeps it."""
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


class _End(NamedTuple):
    """The end of a shard."""

    versions: tuple[str, ...]
    """Of the object; none where the store tells none, or an older cache has kept it."""
    data: bytes

    def to_bytes(self) -> bytes:
        """For the cache: the versions stand first, where who knows footers alone does not look."""
        if not self.versions:
            return self.data
        return b"tokenfeed %s\n%s" % (json.dumps(self.versions).encode(), self.data)

    @classmethod
    def from_bytes(cls, kept: bytes) -> Self:
        """What `to_bytes` gave; what is damaged there has no version, or no footer."""
        found = _VERSIONS.match(kept)
        if found is None:
            return cls((), kept)
        try:
            versions = tuple(map(str, json.loads(found[1])))
        except ValueError:
            versions = ()
        return cls(versions, kept[found.end() :])
