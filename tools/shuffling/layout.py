"""Where every row goes: a pure function of the data set, the seed and the sizes wanted.

The order of a split is a keyed permutation of its rows, so a row's new place is computed and never
remembered, and every shard gets as many rows as any other. A shuffle is two passes of units: the
first scatters the rows of some record batches over all buckets of their split, the second gathers
the buckets of some shards. Buckets are runs of the new order: how many there are decides how fast
it goes and in how much memory, never what is written.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, isqrt

import numpy as np
import xxhash

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import Manifest, SplitInfo
from tokenfeed.pipeline.format.schema import shard_schema
from tokenfeed.pipeline.planning.order import derive_key
from tokenfeed.tools.shuffling.partition import TABLE_BYTES
from tokenfeed.tools.shuffling.permutation import Permutation

__all__ = ["Gather", "Layout", "Scatter", "SplitLayout", "bytes_a_token_and_row"]

_SECTION_BYTES = 1 << 18
"""What one pass hands the other in one piece, where memory allows so much."""
_SMALLEST_BUCKET = 4_000_000
_SECTIONS_AT_LEAST = 1 << 21
"""A small data set may have so many, for half a minute."""
_WORKERS_AT_LEAST = 2
"""So many find room in the memory that is allowed."""
_COPIES = 2
"""Of a bucket, in the memory that a worker takes for one: the rows, where they belong, the slice
that is written, and what allocators keep."""
_ROW_BYTES = 40
"""What it takes to find and order a row, beside the row itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """A unit of the first pass: consecutive record batches of a split, to one partition."""

    number: int
    split: str
    start: int
    """First record batch, counted over all shards of the split."""
    stop: int
    weight_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """A unit of the second pass: consecutive shards of a split, from all its partitions."""

    number: int
    split: str
    group: int
    weight_bytes: float


@dataclass(frozen=True, kw_only=True)
class SplitLayout:
    """The new order of one split, cut into shards, groups of shards and buckets."""

    rows: int
    tokens: int
    num_bytes: int
    """All its rows in memory."""
    num_batches: int
    num_shards: int
    key: int
    bucket_bytes: int

    @cached_property
    def permutation(self) -> Permutation:
        """What sends the number of a row within the split to its new place."""
        return Permutation(size=self.rows, key=self.key)

    @property
    def num_scatters(self) -> int:
        """Units of the first pass: none is larger than a bucket, unless a record batch is."""
        return min(ceil(self.num_bytes / self.bucket_bytes), self.num_batches)

    @property
    def num_groups(self) -> int:
        """Units of the second pass: a shard each, or as many small ones as fill a bucket."""
        return min(self.num_shards, ceil(self.num_bytes / self.bucket_bytes))

    @cached_property
    def shard_edges(self) -> np.ndarray:
        """The place where each shard begins, and the end, shape (shards + 1,)."""
        return np.arange(self.num_shards + 1) * self.rows // max(self.num_shards, 1)

    @cached_property
    def group_edges(self) -> np.ndarray:
        """The shard at which each group begins, and the end, shape (groups + 1,)."""
        return np.arange(self.num_groups + 1) * self.num_shards // max(self.num_groups, 1)

    @property
    def buckets_a_group(self) -> int:
        """Buckets of every group."""
        return ceil(self.num_bytes / max(self.num_groups, 1) / self.bucket_bytes)

    @property
    def num_buckets(self) -> int:
        """Buckets of all groups."""
        return self.num_groups * self.buckets_a_group

    @cached_property
    def bucket_edges(self) -> np.ndarray:
        """The place where each bucket begins, and the end, shape (buckets + 1,)."""
        edges = self.shard_edges[self.group_edges]
        within = np.arange(self.buckets_a_group) / self.buckets_a_group
        starts = edges[:-1, None] + (np.diff(edges)[:, None] * within).astype(np.int64)
        return np.append(starts.reshape(-1), self.rows)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The new order of every split, and the units that bring it about."""

    splits: dict[str, SplitLayout]
    bucket_bytes: int

    @classmethod
    def from_manifest(
        cls, manifest: Manifest, *, seed: int, shard_bytes: int | None, memory_bytes: int
    ) -> "Layout":
        """Lay out a data set that is to be shuffled.

        Args:
            manifest: What is to be shuffled.
            seed: Another one gives another order.
            shard_bytes: Text in a shard; None for as many shards as there were.
            memory_bytes: What the rows in memory may take.

        Raises:
            ConfigError: There are too many rows for so little memory.
        """
        num_bytes = {name: _bytes_in_memory(manifest, split) for name, split in _full(manifest)}
        bucket_bytes = _bucket_bytes(sum(num_bytes.values()), memory_bytes)
        splits = {
            name: SplitLayout(
                rows=split.rows,
                tokens=split.tokens,
                num_bytes=num_bytes[name],
                num_batches=split.batches,
                num_shards=_num_shards(manifest, split, shard_bytes),
                key=derive_key(seed, xxhash.xxh3_64_intdigest(f"shuffle {name}".encode())),
                bucket_bytes=bucket_bytes,
            )
            for name, split in _full(manifest)
        }
        layout = cls(splits=splits, bucket_bytes=bucket_bytes)
        layout._check_memory(memory_bytes)
        return layout

    @property
    def num_bytes(self) -> int:
        """All rows in memory."""
        return sum(split.num_bytes for split in self.splits.values())

    def _check_memory(self, memory_bytes: int) -> None:
        """Refuse memory in which the tables of the partitions would outgrow the rows."""
        num_bytes = self.num_bytes
        most = max(num_bytes // TABLE_BYTES, _SECTIONS_AT_LEAST)
        sections = sum(split.num_scatters * split.num_buckets for split in self.splits.values())
        if sections > most:
            least = 2 * num_bytes / most**0.5 * _COPIES * _WORKERS_AT_LEAST
            raise ConfigError(
                f"`--memory` {memory_bytes:,} bytes: is too little for {num_bytes / 1e6:,.0f} MB "
                f"of rows. Give at least {ceil(least / 1e6)}MB."
            )

    def workers(self, wanted: int, memory_bytes: int) -> int:
        """As many of the processes wanted as find room."""
        return max(1, min(wanted, int(memory_bytes / (_COPIES * self.bucket_bytes))))

    @cached_property
    def scatters(self) -> tuple[Scatter, ...]:
        """The first pass, in the order of the rows."""
        units: list[Scatter] = []
        for name, split in self.splits.items():
            count = split.num_scatters
            edges = [split.num_batches * number // count for number in range(count + 1)]
            units += [
                Scatter(
                    number=len(units) + place,
                    split=name,
                    start=start,
                    stop=stop,
                    weight_bytes=split.num_bytes * (stop - start) / split.num_batches,
                )
                for place, (start, stop) in enumerate(pairwise(edges))
            ]
        return tuple(units)

    @cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """The second pass, in the order of the shards."""
        first = len(self.scatters)
        units = [
            (name, group, split.num_bytes / split.num_groups)
            for name, split in self.splits.items()
            for group in range(split.num_groups)
        ]
        return tuple(
            Gather(number=number, split=name, group=group, weight_bytes=weight_bytes)
            for number, (name, group, weight_bytes) in enumerate(units, first)
        )


def bytes_a_token_and_row(manifest: Manifest) -> tuple[int, int]:
    """What a token takes in memory, and a row beside its tokens."""
    dtypes = shard_schema(manifest.tokenizer.vocabulary_size, manifest.columns).types
    a_token = sum(kind.value_type.bit_width for kind in dtypes if kind.num_fields) // 8
    a_row = sum(kind.bit_width for kind in dtypes if not kind.num_fields) // 8
    return a_token, a_row + _ROW_BYTES


def _full(manifest: Manifest) -> list[tuple[str, SplitInfo]]:
    """The splits that have rows."""
    return [(name, split) for name, split in manifest.splits.items() if split.rows]


def _bytes_in_memory(manifest: Manifest, split: SplitInfo) -> int:
    a_token, a_row = bytes_a_token_and_row(manifest)
    return split.tokens * a_token + split.rows * a_row


def _bucket_bytes(num_bytes: int, memory_bytes: int) -> int:
    """Large enough for sections that are worth a read each, small enough for the memory."""
    worth_it = max(isqrt(num_bytes * _SECTION_BYTES), _SMALLEST_BUCKET)
    return max(1, min(worth_it, int(memory_bytes / (_COPIES * _WORKERS_AT_LEAST))))


def _num_shards(manifest: Manifest, split: SplitInfo, shard_bytes: int | None) -> int:
    """Shards of a split: at least one, and none without a row."""
    wanted = len(split.shards)
    if shard_bytes:
        tokens = sum(part.tokens for part in manifest.splits.values())
        wanted = round(manifest.ledger.bytes * split.tokens / tokens / shard_bytes)
    return max(1, min(wanted, split.rows))
