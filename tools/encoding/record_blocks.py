"""Group the records of a unit into batches for an engine, and count written and rejected records.

Small files are grouped, because an engine is fast only with large batches. Large blocks of a file
are not copied. Records that a reader or a task rejects are counted with their reasons.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import xxhash

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.format.manifest import (
    PARTS_FOLDER,
    FileInfo,
    ShardInfo,
    length_histogram,
)
from tokenfeed.pipeline.format.storage import atomic_file
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.records import IdRows, Reject
from tokenfeed.tools.corpus.units import Unit, fetched_ahead, read_records, with_remedy
from tokenfeed.tools.encoding.audit import Answers
from tokenfeed.tools.encoding.engines import EngineName, ReferenceEngine
from tokenfeed.tools.encoding.tasks.base import TaskEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """Counts of the records of one input file in one unit."""

    source: int
    bytes: int
    """Bytes of text encoded, as UTF-8."""
    written: int
    empty: int
    rejected: int
    left_out: int = 0
    """Records beyond `--limit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """The result of a finished unit, except for its shards."""

    unit: int
    shards: dict[str, ShardInfo]
    """The shard of each split that has rows."""
    histograms: dict[str, list[int]]
    """Rows by length, for each split in `shards`."""
    sources: list[SourceCounts]
    reject_file: FileInfo | None = None
    """The file with all rejects, one per line. None without rejects."""
    engine: EngineName = ReferenceEngine.name
    """The engine that made the ids. A run with another engine encodes the unit again."""
    audited: int = 0
    """Number of texts that both engines encoded."""
    differing: list[str] = field(default_factory=list)
    """The compared texts with different ids."""
    routed: int = 0
    """Number of texts that only the reference encoded."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts by the task, by name."""

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """The files that were written."""
        rejects = (self.reject_file,) if self.reject_file else ()
        return (*self.shards.values(), *rejects)

    @property
    def rejected(self) -> int:
        """The number of rejected records."""
        return sum(counts.rejected for counts in self.sources)


class UnitCounts:
    """Counts of a unit by input file, in arrays from the first file of the unit to its last."""

    def __init__(self, unit: Unit, max_rejects: int | None) -> None:
        self.sample: Answers = {}
        """Texts of the unit with the ids of the fast engine, for the comparison."""
        self.routed = 0
        """Number of texts that only the reference encoded."""
        self.counts: Counter[str] = Counter()
        """Counts by the task, by name."""
        self._unit = unit
        self._sources = {part.source.index: part.source for part in unit.parts}
        self._max_rejects = max_rejects
        self._rejects: list[tuple[int, int, str]] = []
        """Rejects that are not in the file yet."""
        self._rejected: Counter[int] = Counter()
        """Rejected records by input file."""
        self._histograms: dict[str, np.ndarray] = {}
        self._first = unit.parts[0].source.index
        num_sources = unit.parts[-1].source.index - self._first + 1
        self._by_source = np.zeros((num_sources, 4), np.int64)
        """Bytes of text, and written, empty and left out records of each input file."""

    def count(self, sources: np.ndarray, num_bytes: np.ndarray, has_text: np.ndarray) -> None:
        """Count encoded records: source, bytes of text, and whether it has tokens; (R,) each."""
        for column, weights in enumerate((num_bytes, has_text, ~has_text)):
            counts = np.bincount(sources - self._first, weights, len(self._by_source))
            self._by_source[:, column] += counts.astype(np.int64)

    def leave_out(self, sources: np.ndarray) -> None:
        """Count records beyond `--limit` by their source, shape (R,)."""
        self._by_source[:, 3] += np.bincount(sources - self._first, None, len(self._by_source))

    def count_lengths(self, split: str, lengths: np.ndarray) -> None:
        """Count the rows that were written to a split."""
        self._histograms[split] = self._histograms.get(split, 0) + length_histogram(lengths)

    def reject(self, source: int, reject: Reject) -> None:
        """Count a rejected record.

        Raises:
            CorpusError: There are more rejects than allowed.
        """
        reason = with_remedy(reject.reason, self._sources[source])
        self._rejects.append((source, reject.record, reason))
        self._rejected[source] += 1
        if self._max_rejects is not None and self._rejected.total() > self._max_rejects:
            name = self._sources[source].name
            raise too_many_rejects(name, reject.record, reason, self._max_rejects)

    def take_rejects(self) -> list[tuple[int, int, str]]:
        """Return the rejects since the last call, in the order of the input."""
        taken, self._rejects = sorted(self._rejects), []
        return taken

    def result(
        self,
        shards: dict[str, ShardInfo | None],
        reject_file: FileInfo | None,
        engine: EngineName,
    ) -> UnitResult:
        """Return the result of the unit, given the files that were written."""
        mine = {part.source.index for part in self._unit.parts}
        return UnitResult(
            unit=self._unit.number,
            shards={split: info for split, info in sorted(shards.items()) if info},
            histograms={
                split: counts.tolist() for split, counts in sorted(self._histograms.items())
            },
            sources=[
                SourceCounts(
                    source=source,
                    bytes=num_bytes,
                    written=written,
                    empty=empty,
                    rejected=self._rejected[source],
                    left_out=left_out,
                )
                for source, (num_bytes, written, empty, left_out) in enumerate(
                    self._by_source.tolist(), self._first
                )
                if source in mine
            ],
            reject_file=reject_file,
            engine=engine,
            routed=self.routed,
            counts=dict(self.counts),
        )


class RejectFile:
    """A file with the rejects of a unit, in the format of rejects.jsonl.

    The file is created with the first reject.
    """

    def __init__(self, folder: Path, unit: Unit) -> None:
        self.info: FileInfo | None = None
        """The finished file; None if there are no rejects."""
        self._name = f"{PARTS_FOLDER}/{unit.number:05d}.rejects"
        self._path = folder / self._name
        self._sources = {part.source.index: part.source for part in unit.parts}
        self._closing = contextlib.ExitStack()
        self._file: IO[bytes] | None = None
        self._digest = xxhash.xxh3_64()
        self._num_bytes = 0

    def write(self, rejects: list[tuple[int, int, str]]) -> None:
        """Add rejects: index of the input file, record and reason."""
        if not rejects:
            return
        if self._file is None:
            self._file = self._closing.enter_context(atomic_file(self._path, is_shared=True))
        content = "".join(map(self._line, rejects)).encode()
        self._file.write(content)
        self._digest.update(content)
        self._num_bytes += len(content)

    def _line(self, reject: tuple[int, int, str]) -> str:
        index, record, reason = reject
        source = self._sources[index]
        has_lines = FORMATS[source.format].has_record_per_line
        line = {"line": record + 1} if has_lines else {}
        return json.dumps({"file": source.name, **line, "record": record, "reason": reason}) + "\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)
        if self._file is not None and error[0] is None:
            digest = self._digest.hexdigest()
            self.info = FileInfo(file=self._name, bytes=self._num_bytes, xxh3=digest)


def too_many_rejects(name: str, record: int, reason: str, allowed: int) -> CorpusError:
    """Return the error of a run with more rejects than `allowed`."""
    limit = f"`--max-rejects {allowed}`"
    return CorpusError(
        f"{name}, record {record}: {reason}. {limit} ends the run here; allow more, "
        "or mend the record and start with an empty output folder."
    )


_BATCH_BYTES = 1 << 21
"""Weight of a full batch. The output of an engine then fits into the processor's cache."""
_BATCH_RECORDS = 1 << 14


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Records that are encoded together."""

    values: dict[str, Any]
    """The R values of each field: a list, or `IdRows`."""
    sources: np.ndarray
    """The source of each record, shape (R,), uint32."""
    records: np.ndarray
    """The number of each record in its source, shape (R,), uint64."""
    split: str | None
    """The split of all records. None: a hash chooses the split of each record."""
    weight_bytes: float

    def __len__(self) -> int:
        return len(self.records)

    def take(self, kept: np.ndarray) -> "RecordBlock":
        """Return the records with the given indexes."""
        values = {name: _taken(column, kept) for name, column in self.values.items()}
        return RecordBlock(
            values, self.sources[kept], self.records[kept], self.split, self.weight_bytes
        )


def _taken(column: Sequence[Any], rows: np.ndarray) -> Sequence[Any]:
    return column.take(rows) if isinstance(column, IdRows) else [column[row] for row in rows]


def _all(columns: list[Sequence[Any]]) -> Sequence[Any]:
    """Return the values of several columns one after another."""
    ids = [column for column in columns if isinstance(column, IdRows)]
    return IdRows.joined(ids) if len(ids) == len(columns) else [*chain.from_iterable(columns)]


def read_record_blocks(
    unit: Unit, task: TaskEncoder, ledger: UnitCounts, *, in_one_pass: bool = False
) -> Iterator[RecordBlock]:
    """Yield the usable records of a unit in order. Enter the other records into `ledger`.

    See `read_records` for `in_one_pass` and the errors.
    """
    pending: list[RecordBlock] = []
    weight_bytes, num_records = 0.0, 0
    for part in fetched_ahead(unit.parts):
        for records in read_records(part, task.fields, in_one_pass=in_one_pass):
            for reject in records.rejects:
                ledger.reject(part.source.index, reject)
            sources = np.full(len(records), part.source.index, np.uint32)
            batch = RecordBlock(
                records.fields, sources, records.numbers, part.source.split, records.weight_bytes
            )
            batch = _fitting(batch, task, ledger)
            pending.append(batch)
            weight_bytes += records.weight_bytes
            num_records += len(batch)
            if weight_bytes >= _BATCH_BYTES or num_records >= _BATCH_RECORDS:
                yield _joined(pending)
                pending, weight_bytes, num_records = [], 0.0, 0
    if pending:
        yield _joined(pending)


def _fitting(batch: RecordBlock, task: TaskEncoder, ledger: UnitCounts) -> RecordBlock:
    """Return a batch without the records whose fields contradict each other."""
    unusable = {} if task.checks_in_encode else task.unusable(batch.values)
    if not unusable:
        return batch
    for index, reason in unusable.items():
        ledger.reject(int(batch.sources[index]), Reject(int(batch.records[index]), reason))
    return batch.take(np.setdiff1d(np.arange(len(batch)), [*unusable]))


def _joined(batches: list[RecordBlock]) -> RecordBlock:
    if len(batches) == 1:
        return batches[0]
    return RecordBlock(
        {name: _all([batch.values[name] for batch in batches]) for name in batches[0].values},
        np.concatenate([batch.sources for batch in batches]),
        np.concatenate([batch.records for batch in batches]),
        batches[0].split,
        sum(batch.weight_bytes for batch in batches),
    )
