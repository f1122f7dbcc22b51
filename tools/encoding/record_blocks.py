"""Group the records of a unit into batches large enough for an engine to run at speed.

Small files go together, and long blocks of a big one stay as they were read. What a reader or the
task refuses goes to the ledger.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenfeed.tools.corpus.parts import Part
from tokenfeed.tools.corpus.reader import fetched_ahead, read_records
from tokenfeed.tools.corpus.records import Records, Reject
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.counts import UnitCounts
from tokenfeed.tools.encoding.task import TaskEncoder

__all__ = ["RecordBlock", "read_record_blocks"]

logger = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 21
"""Weight at which a batch is full: an engine's output then still fits the processor's cache."""
_BATCH_RECORDS = 1 << 14


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Records that are encoded together."""

    values: dict[str, list[Any]]
    """The values of each field, R of them."""
    sources: np.ndarray
    """The source of each record, shape (R,), uint32."""
    records: np.ndarray
    """Its number there, shape (R,), uint64."""
    split: str | None
    """The split they all belong to; None draws it for each."""
    weight_bytes: float

    def __len__(self) -> int:
        return len(self.records)

    def take(self, kept: np.ndarray) -> "RecordBlock":
        """The records at the given places."""
        values = {name: [column[index] for index in kept] for name, column in self.values.items()}
        return RecordBlock(
            values, self.sources[kept], self.records[kept], self.split, self.weight_bytes
        )


def read_record_blocks(
    unit: Unit, task: TaskEncoder, ledger: UnitCounts, *, in_one_pass: bool = False
) -> Iterator[RecordBlock]:
    """The usable records of a unit, in order; the others go straight to `ledger`.

    For `in_one_pass` and what it raises see `read_records`.
    """
    pending: list[RecordBlock] = []
    weight_bytes, num_records = 0.0, 0
    for part in fetched_ahead(unit.parts):
        for records in read_records(part, task.fields, in_one_pass=in_one_pass):
            if records.warning:
                logger.warning("%s: %s", part.source.name, records.warning)
            for reject in records.rejects:
                ledger.reject(part.source.index, reject)
            batch = _fitting(_batch(part, records), task, ledger)
            pending.append(batch)
            weight_bytes += records.weight_bytes
            num_records += len(batch)
            if weight_bytes >= _BATCH_BYTES or num_records >= _BATCH_RECORDS:
                yield _joined(pending)
                pending, weight_bytes, num_records = [], 0.0, 0
    if pending:
        yield _joined(pending)


def _batch(part: Part, records: Records) -> RecordBlock:
    sources = np.full(len(records), part.source.index, np.uint32)
    return RecordBlock(
        records.fields, sources, records.numbers, part.source.split, records.weight_bytes
    )


def _fitting(batch: RecordBlock, task: TaskEncoder, ledger: UnitCounts) -> RecordBlock:
    """The batch without records whose fields do not fit together."""
    unusable = task.unusable(batch.values)
    if not unusable:
        return batch
    for index, reason in unusable.items():
        ledger.reject(int(batch.sources[index]), Reject(int(batch.records[index]), reason))
    return batch.take(np.setdiff1d(np.arange(len(batch)), [*unusable]))


def _joined(batches: list[RecordBlock]) -> RecordBlock:
    if len(batches) == 1:
        return batches[0]
    names = batches[0].values
    return RecordBlock(
        {name: [value for batch in batches for value in batch.values[name]] for name in names},
        np.concatenate([batch.sources for batch in batches]),
        np.concatenate([batch.records for batch in batches]),
        batches[0].split,
        sum(batch.weight_bytes for batch in batches),
    )
