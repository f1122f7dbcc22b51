"""Cut a corpus into units. Each unit becomes one shard of each split.

A unit has many small files, or a part of a large file if the format can be cut. The cuts depend
only on the input and the shard size, and not on the workers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.corpus.formats.base import Format
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.input_files import FilePart, InputFile
from tokenfeed.tools.corpus.locations import RemoteFile

SMALLEST_SHARD_BYTES, LARGEST_SHARD_BYTES = 8_000_000, 256_000_000
_SHARDS_WANTED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """The records that one worker encodes into one shard of each split."""

    number: int
    parts: tuple[FilePart, ...]

    @property
    def weight_bytes(self) -> int:
        """Expected bytes of text."""
        return sum(part.weight_bytes for part in self.parts)

    def __str__(self) -> str:
        first, *others = dict.fromkeys(part.source.name for part in self.parts)
        more = f" and {len(others):,} other files" if others else ""
        return f"unit {self.number}, {first}{more}"


def auto_shard_bytes(sources: Iterable[InputFile]) -> int:
    """Return 1/64 of the input, but 8 to 256 MB, so that small corpora occupy many cores."""
    total = sum(source.text_bytes for source in sources)
    return min(max(total // _SHARDS_WANTED, SMALLEST_SHARD_BYTES), LARGEST_SHARD_BYTES)


def cut_units(sources: Iterable[InputFile], shard_bytes: int) -> tuple[Unit, ...]:
    """Cut `sources` into units of at most about `shard_bytes` of text each.

    Files keep their order, except that files of the same given split are neighbours. Files of
    different given splits are never in one unit. For a shard size of 10:

        files   a: 4, b: 24 (can be cut), c: 3 (of a given split), d: 2, e: 5
        parts   a 4 | b 8 | b 8 | b 8, d 2 | e 5 | c 3
        units     0 |   1 |   2 |        3 |   4 |   5
    """
    units: list[Unit] = []
    parts: list[FilePart] = []
    weight_bytes = 0
    for part in _parts(sorted(sources, key=lambda source: source.split or ""), shard_bytes):
        is_full = weight_bytes + part.weight_bytes > shard_bytes
        if parts and (is_full or parts[-1].source.split != part.source.split):
            units.append(Unit(number=len(units), parts=tuple(parts)))
            parts, weight_bytes = [], 0
        parts.append(part)
        weight_bytes += part.weight_bytes
    if parts:
        units.append(Unit(number=len(units), parts=tuple(parts)))
    return tuple(units)


def _parts(sources: Iterable[InputFile], shard_bytes: int) -> Iterator[FilePart]:
    """Yield the parts of each file. Neighbouring objects of a store are cut at the same time."""
    for (name, is_remote), group in groupby(
        sources, key=lambda source: (source.format, isinstance(source.path, RemoteFile))
    ):
        format_ = FORMATS[name]

        def cut(source: InputFile, format_: Format = format_) -> list[FilePart]:
            return list(format_.cut(source, shard_bytes))

        at_once = format_.cut_at_once if is_remote else 1
        alike = [*group]
        found = results_of(cut, alike, at_once) if at_once > 1 else map(cut, alike)
        yield from chain.from_iterable(found)
