"""Read the records of a part of the corpus in batches, for any format.

If a file is damaged, the records after the damage are lost, and one reject is listed. In a
compressed file, the records after the last verified byte are lost.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from tokenfeed.pipeline.remote.retrying import few_threads
from tokenfeed.tools.corpus.blocks import DAMAGE, READ_ERRORS, damage_reason
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.locations import RemoteFile
from tokenfeed.tools.corpus.records import FieldKind, Fields, Records, rejected

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
    in_one_pass = in_one_pass and not format_.packages  # other packages may ignore damage
    if part.source.compression and not in_one_pass and (reason := _damage(part)):
        yield rejected(part.first_record, fields, f"cannot be read: {reason}")
        return
    has_given = False
    try:
        for records in format_.read(part, fields):
            last = records.rejects[-1].record if records.rejects else -1
            last = max(last, int(records.numbers[-1]) if len(records) else -1)
            behind = max(behind, last + 1)
            has_given = True
            yield records
            part.source.check_unchanged()  # what is mapped into memory must not be cut off
    except (*DAMAGE, *format_.damage) as error:
        reason = damage_reason(error)
        part.source.check_unchanged()  # then that is the reason
        if part.source.compression and in_one_pass and has_given:
            raise UnverifiedError from error
        yield rejected(behind, fields, f"cannot be read from here on: {reason}")
    part.source.check_unchanged()


def fetched_ahead(parts: Iterable[FilePart]) -> Iterator[FilePart]:
    """Yield the same parts. Several small remote files are fetched early, at the same time."""
    with few_threads(_AHEAD) as threads:
        coming: deque[Future[FilePart] | FilePart] = deque()
        for part in parts:
            coming.append(threads.submit(_fetched, part) if _is_small(part) else part)
            if len(coming) > _AHEAD:
                yield _result(coming.popleft())
        while coming:
            yield _result(coming.popleft())


def _is_small(part: FilePart) -> bool:
    return isinstance(part.source.path, RemoteFile) and part.source.path.is_small


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


def first_reject(parts: Iterable[FilePart], fields: Fields) -> str:
    """Return the first rejected record of a corpus and why, for errors; empty without rejects."""
    for part in fetched_ahead(parts):
        for records in read_records(part, fields):
            for reject in records.rejects[:1]:
                return f"; {part.source.name}, record {reject.record}: {reject.reason}"
    return ""


def _damage(part: FilePart) -> str:
    """Return the damage of a compressed file; empty if it has none."""
    try:
        for _ in part.blocks():
            pass
    except READ_ERRORS as error:
        return damage_reason(error)
    return ""
