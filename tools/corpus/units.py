"""Cut a corpus into units, and read their records in batches, for any format.

Each unit becomes one shard of each split. A unit has many small files, or a part of a large file if
the format can be cut. The cuts depend only on the input and the shard size, and not on the workers.

If a file is damaged, the records after the damage are lost, and one reject is listed. In a
compressed file, the records after the last verified byte are lost.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.remote.retrying import few_threads, results_of
from tokenfeed.tools.corpus.blocks import (
    DAMAGE,
    IS_UNREADABLE,
    READ_ERRORS,
    Blocks,
    damage_reason,
    packed_ending,
)
from tokenfeed.tools.corpus.field_paths import columns_of, computed, is_formula
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.input_files import FilePart, Format, InputFile
from tokenfeed.tools.corpus.locations import Location, RemoteFile
from tokenfeed.tools.corpus.records import FieldKind, Fields, Records, rejected

SMALLEST_SHARD_BYTES, LARGEST_SHARD_BYTES = 8_000_000, 256_000_000
_SHARDS_WANTED = 64
_ICONV = "convert the file: iconv -f NAME -t utf-8"


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


_AHEAD = 8
"""Number of small remote files that are fetched before they are read."""


class UnverifiedError(Exception):
    """Some of the yielded records come from a damaged part of a compressed file."""


def read_records(part: FilePart, fields: Fields, *, in_one_pass: bool = False) -> Iterator[Records]:
    """Read every record of `part`, with the weight of the part spread over them.

    Args:
        part: A part of the corpus.
        fields: The fields to read.
        in_one_pass: Decompress a compressed file once. By default, a first pass verifies the
            checksums, and a damaged file becomes one reject.

    Raises:
        CorpusError: The file is missing or changed since the corpus was listed.
        UnverifiedError: A compressed file, read in one pass, is damaged. Some of the yielded
            records may be wrong: drop all of them, and read again in two passes.
    """
    part.source.check_unchanged()
    behind, format_ = part.first_record, FORMATS[part.source.format]
    if part.source.compression and not in_one_pass:
        try:
            deque(Blocks(part.source.path, part.source.compression), maxlen=0)
        except READ_ERRORS as error:
            reason = _damage(error, part.source)
            yield rejected(part.first_record, fields, f"cannot be read: {reason}")
            return
    has_given = False
    try:
        read = format_.read(part, columns_of(fields))
        for records in computed(read, fields) if any(map(is_formula, fields)) else read:
            last = records.rejects[-1].record if records.rejects else -1
            last = max(last, int(records.numbers[-1]) if len(records) else -1)
            behind = max(behind, last + 1)
            has_given = True
            yield records
            part.source.check_unchanged()  # what is mapped into memory must not be cut off
    except DAMAGE as error:
        part.source.check_unchanged()  # then that is the reason
        reason = _damage(error, part.source)
        if part.source.compression and in_one_pass and has_given:
            raise UnverifiedError from error
        yield rejected(behind, fields, f"cannot be read from here on: {reason}")
    part.source.check_unchanged()


def _damage(error: Exception, source: InputFile) -> str:
    """Return the damage of a file. Raise CorpusError if the file may be sound, but unreadable."""
    try:
        return damage_reason(error)
    except OSError as refusal:
        if (number := refusal.errno) is None or number not in IS_UNREADABLE:
            raise
        raise CorpusError(
            f"{source.name}: cannot be read: {os.strerror(number)}. Make it readable and repeat "
            "the command, or leave it out by `--exclude`."
        ) from refusal


def with_remedy(reason: str, source: InputFile) -> str:
    """Return the reason for a reject, and what to do if text is not UTF-8."""
    is_undecodable = source.encoding is not None and "codec can't decode" in reason
    if not FORMATS[source.format].is_text or not ("invalid UTF-8" in reason or is_undecodable):
        return reason
    if source.encoding:
        return f"{reason}. It is neither UTF-8 nor {source.encoding}: {_ICONV}"
    if ending := _ending_of_packed(source.path):
        return f"{reason}. The file is compressed: let its name end in {ending}"
    given = "Give --encoding NAME if all such files have the encoding NAME, like cp1252 or gb18030"
    return f"{reason}. {given}, or {_ICONV}"


@lru_cache(64)
def _ending_of_packed(path: Location) -> str:
    """Return the ending that a compressed file on this machine should have; else empty."""
    with suppress(OSError), open(path if isinstance(path, str) else os.devnull, "rb") as file:
        return packed_ending(file.read(6))
    return ""


def fetched_ahead(parts: Iterable[FilePart]) -> Iterator[FilePart]:
    """Yield the same parts. Several small remote files are fetched early, at the same time."""
    with few_threads(_AHEAD) as threads:
        coming: deque[Future[FilePart] | FilePart] = deque()
        for part in parts:
            place = part.source.path
            is_small = isinstance(place, RemoteFile) and place.is_small
            coming.append(threads.submit(_fetched, part) if is_small else part)
            if len(coming) > _AHEAD:
                yield _result(coming.popleft())
        yield from map(_result, coming)


def _fetched(part: FilePart) -> FilePart:
    assert isinstance(part.source.path, RemoteFile)
    return replace(part, source=replace(part.source, path=part.source.path.fetched()))


def _result(part: Future[FilePart] | FilePart) -> FilePart:
    return part if isinstance(part, FilePart) else part.result()


def read_texts(part: FilePart, fields: Fields) -> Iterator[bytes]:
    """Yield the texts of all fields with texts. Words are joined by spaces.

    This is for samples: texts of a compressed file are not verified.
    """
    textual = (FieldKind.TEXT, FieldKind.WORDS)
    wanted: Fields = {name: kind for name, kind in fields.items() if kind in textual}
    if not wanted:
        return
    with suppress(UnverifiedError):
        for records in read_records(part, wanted, in_one_pass=True):
            for name, kind in wanted.items():
                values = records.fields[name]
                yield from values if kind is FieldKind.TEXT else map(b" ".join, values)


def first_reject(parts: Iterable[FilePart], fields: Fields) -> tuple[str, str]:
    """Return the first rejected record of a corpus, and the reason, for errors; both are empty
    without rejects."""
    for part in fetched_ahead(parts):
        for records in read_records(part, fields):
            for reject in records.rejects[:1]:
                return f"; {part.source.name}, record {reject.record}: ", with_remedy(
                    reject.reason, part.source
                )
    return "", ""
