"""Group the records of a unit into batches for an engine, and count written and rejected records.

Small files are grouped, because an engine is fast only with large batches. Large blocks of a file
are not copied. Records that a reader or a task rejects are counted with their reasons.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from tokenfeed.pipeline.format.schema import LABEL, LABELS, Rows
from tokenfeed.pipeline.format.storage import atomic_file
from tokenfeed.tools.corpus.formats.registry import FORMATS
from tokenfeed.tools.corpus.records import Records
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
    labels: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of the labels that rows have, for each split; -100 stands for no label."""

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """The files that were written."""
        rejects = (self.reject_file,) if self.reject_file else ()
        return (*self.shards.values(), *rejects)

    @property
    def rejected(self) -> int:
        """The number of rejected records."""
        return sum(counts.rejected for counts in self.sources)


class Ledger:
    """The counts of a unit by input file, and the file with its rejects."""

    def __init__(self, unit: Unit, max_rejects: int | None, folder: Path | None = None) -> None:
        """Begin with no records.

        Args:
            unit: The unit.
            max_rejects: More rejects end the run. None: no limit.
            folder: The folder for the file, which is created with the first reject. None: no file.
        """
        self.sample: Answers = {}
        """Texts of the unit with the ids of the fast engine, for the comparison."""
        self.routed = 0
        """Number of texts that only the reference encoded."""
        self.counts: Counter[str] = Counter()
        """Counts by the task, by name."""
        self.sources = {part.source.index: part.source for part in unit.parts}
        """The input files of the unit, by index."""
        self._unit, self._max_rejects, self._folder = unit, max_rejects, folder
        self._waiting: list[tuple[int, int, str]] = []
        """Rejects that are not in the file yet."""
        self._rejected: Counter[int] = Counter()
        """Rejected records by input file."""
        self._name = f"{PARTS_FOLDER}/{unit.number:05d}.rejects"
        self._closing = contextlib.ExitStack()
        self._file: IO[bytes] | None = None
        self._digest, self._num_bytes = xxhash.xxh3_64(), 0
        self._histograms: dict[str, np.ndarray] = {}
        self._labels: dict[str, np.ndarray] = {}
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

    def count_rows(self, split: str, rows: Rows) -> None:
        """Count the rows that were written to a split by length, and collect their labels."""
        self._histograms[split] = self._histograms.get(split, 0) + length_histogram(rows.lengths)
        found = rows.per_row.get(LABEL, rows.per_token.get(LABELS, np.empty(0, np.int64)))
        self._labels[split] = np.union1d(self._labels.get(split, found), found)

    def reject(self, source: int, record: int, reason: str) -> None:
        """Count a rejected record.

        Raises:
            CorpusError: There are more rejects than allowed.
        """
        file = self.sources[source]
        reason = with_remedy(reason, file)
        self._waiting.append((source, record, reason))
        self._rejected[source] += 1
        if self._max_rejects is not None and self._rejected.total() > self._max_rejects:
            raise too_many_rejects(file.name, record, reason, self._max_rejects)

    def usable(self, block: Records, unusable: dict[int, str]) -> Records:
        """Count records as rejected, by index. Return the other records."""
        for index, reason in unusable.items():
            self.reject(int(block.sources[index]), int(block.numbers[index]), reason)
        return block.take(np.setdiff1d(np.arange(len(block)), [*unusable])) if unusable else block

    def write_rejects(self) -> None:
        """Add the rejects since the last call to the file, in the order of the input."""
        if not self._waiting:
            return
        if self._file is None:
            assert self._folder
            path = self._folder / self._name
            self._file = self._closing.enter_context(atomic_file(path, is_shared=True))
        content = "".join(map(self._line, sorted(self._waiting))).encode()
        self._waiting = []
        self._file.write(content)
        self._digest.update(content)
        self._num_bytes += len(content)

    def _line(self, reject: tuple[int, int, str]) -> str:
        """Return a line in the format of rejects.jsonl."""
        index, record, reason = reject
        source = self.sources[index]
        has_lines = FORMATS[source.format].has_record_per_line
        line = {"line": record + 1} if has_lines else {}
        return json.dumps({"file": source.name, **line, "record": record, "reason": reason}) + "\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.write_rejects()
        self._closing.__exit__(*error)

    def result(self, shards: dict[str, ShardInfo | None], engine: EngineName) -> UnitResult:
        """Return the result of the unit, given the shards that were written."""
        digest, counts = self._digest.hexdigest(), self._by_source.tolist()
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
                for source, (num_bytes, written, empty, left_out) in enumerate(counts, self._first)
                if source in self.sources
            ],
            reject_file=(
                FileInfo(file=self._name, bytes=self._num_bytes, xxh3=digest)
                if self._file
                else None
            ),
            engine=engine,
            routed=self.routed,
            counts=dict(self.counts),
            labels={split: labels.tolist() for split, labels in self._labels.items()},
        )


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


def read_record_blocks(
    unit: Unit, task: TaskEncoder, ledger: Ledger, *, in_one_pass: bool = False
) -> Iterator[Records]:
    """Yield the usable records of a unit in order, with the task's names of their fields. Enter the
    other records into `ledger`.

    See `read_records` for `in_one_pass` and the errors.
    """
    pending: list[Records] = []
    weight_bytes, num_records = 0.0, 0
    for part in fetched_ahead(unit.parts):
        source, split = part.source.index, part.source.split
        for records in read_records(part, task.fields, in_one_pass=in_one_pass):
            for reject in records.rejects:
                ledger.reject(source, *reject)
            values, sources = task.values_of(records), np.full(len(records), source, np.uint32)
            block = replace(records, fields=values, sources=sources, split=split)
            if not task.checks_in_encode:
                block = ledger.usable(block, task.unusable(values))
            pending.append(block)
            weight_bytes += records.weight_bytes
            num_records += len(block)
            if weight_bytes >= _BATCH_BYTES or num_records >= _BATCH_RECORDS:
                yield Records.joined(pending)
                pending, weight_bytes, num_records = [], 0.0, 0
    if pending:
        yield Records.joined(pending)
