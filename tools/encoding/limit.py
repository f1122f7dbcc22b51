"""`--limit N`: the N usable records of the split train whose texts have the least hashes.

The choice depends on the texts alone, not on workers, parts of a run or the order of files. Equal
texts have equal hashes: among them, the first in the corpus are taken. A first pass over the corpus
hashes all records, which is much faster than encoding. A second pass encodes a few more than N
records, because some records turn out to be unusable when they are encoded. If too few are usable,
both passes are repeated with more candidates.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import xxhash

from tokenfeed.tools.corpus.units import Unit, UnverifiedError
from tokenfeed.tools.encoding.engines import Engine, ReferenceEngine, Unencodable, load_engine
from tokenfeed.tools.encoding.record_blocks import RecordBlock, UnitCounts, read_record_blocks
from tokenfeed.tools.encoding.tasks.base import TaskEncoder
from tokenfeed.tools.encoding.template import Template

TRAIN, VALIDATION = "train", "validation"
_SPARE = 8
"""One in this many candidates may be unusable before the passes are repeated."""
_MORE = 4
"""How many times as many candidates the next passes have."""


class Mark(NamedTuple):
    """The place of a record in the order of `--limit`."""

    hash: int
    source: int
    record: int


class Marks(NamedTuple):
    """The marks of R records, shape (R,) each."""

    hashes: np.ndarray
    sources: np.ndarray
    records: np.ndarray

    @classmethod
    def joined(cls, marks: "Iterable[Marks]") -> Self:
        """Return the marks of all records."""
        return cls(*(np.concatenate(column) for column in zip(*marks, strict=True)))

    def least(self, most: int) -> "Marks":
        """Return the first `most` marks, in order."""
        order = np.lexsort((self.records, self.sources, self.hashes))[:most]
        return Marks(*(column[order] for column in self))

    def until(self, last: Mark) -> np.ndarray:
        """Return which marks are not behind `last`, shape (R,), bool."""
        is_before = self.records <= last.record
        for column, value in ((self.sources, last.source), (self.hashes, last.hash)):
            is_before = (column < np.uint64(value)) | ((column == np.uint64(value)) & is_before)
        return is_before

    def last(self) -> Mark:
        """Return the last mark."""
        return Mark(*(int(column[-1]) for column in self))


def hashes_of(texts: list[bytes]) -> np.ndarray:
    """Return the hash of each text, which chooses its split and its place in the order."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts))


def marks_of(batch: RecordBlock, hashes: np.ndarray) -> Marks:
    """Return the marks of the records of a batch."""
    return Marks(hashes, batch.sources.astype(np.uint64), batch.records.astype(np.uint64))


def may_train(batch: RecordBlock, hashes: np.ndarray, validation: float) -> np.ndarray:
    """Return which records of a batch belong to the split train, shape (R,), bool."""
    if batch.split is not None:
        return np.full(len(batch), batch.split == TRAIN)
    return hashes >= np.uint64(int(validation * 2**64))


@dataclass(frozen=True, kw_only=True, slots=True)
class FindLeast:
    """The work on a unit: find the records of the split train with the least hashes."""

    task: TaskEncoder
    template: Template
    json_bytes: bytes
    """The tokenizer."""
    vocabulary_size: int
    splits_special: bool
    validation: float
    most: int
    last: Mark | None = None
    """Encode the records up to this mark, to return the usable ones. None: encode no record."""

    def begin(self, on_progress: Callable[[float, int, str], None]) -> Callable[[Unit], Marks]:
        """Load the engine, and return the function that finds the records of a unit."""
        engine = load_engine(
            ReferenceEngine.name,
            self.json_bytes,
            self.vocabulary_size,
            splits_special=self.splits_special,
        )
        task = self.task.with_tokenizer(self.json_bytes)

        def of_unit(unit: Unit) -> Marks:
            try:
                return self._of_unit(unit, task, engine, on_progress, in_one_pass=True)
            except UnverifiedError:
                return self._of_unit(unit, task, engine, on_progress, in_one_pass=False)

        return of_unit

    def _of_unit(
        self,
        unit: Unit,
        task: TaskEncoder,
        engine: Engine,
        on_progress: Callable[[float, int, str], None],
        *,
        in_one_pass: bool,
    ) -> Marks:
        found = _NONE
        blocks = read_record_blocks(unit, task, UnitCounts(unit, None), in_one_pass=in_one_pass)
        for batch in blocks:
            on_progress(batch.weight_bytes, 0, "")
            hashes = hashes_of(task.texts(batch.values))
            marks, is_wanted = marks_of(batch, hashes), may_train(batch, hashes, self.validation)
            if len(found.hashes) == self.most:
                is_wanted &= marks.until(found.last())
            if self.last is not None:
                is_wanted &= marks.until(self.last)
            places = np.flatnonzero(is_wanted)
            if self.last is not None and len(places):
                places = places[self._usable(batch.take(places), task, engine)]
            more = Marks(*(column[places] for column in marks))
            found = Marks.joined([found, more]).least(self.most)
        return found

    def _usable(self, batch: RecordBlock, task: TaskEncoder, engine: Engine) -> np.ndarray:
        """Return which records have tokens and can be written, shape (R,), bool."""
        try:
            return task.encode(batch.values, engine.encode, self.template).has_text
        except Unencodable:
            if len(batch) == 1:
                return np.zeros(1, bool)
            each = (batch.take(np.array([place])) for place in range(len(batch)))
            return np.concatenate([self._usable(one, task, engine) for one in each])


_NONE = Marks(*np.empty((3, 0), np.uint64))


def find_last(
    work: FindLeast, limit: int, found: Callable[[FindLeast], Iterator[Marks]]
) -> Mark | None:
    """Return the mark of the last record of `--limit`; None if all records are within the limit.

    Args:
        work: The work on a unit.
        limit: The number of records to find.
        found: Does the work on all units.
    """
    most = limit + limit // _SPARE + _SPARE
    while True:
        candidates = _least(found(replace(work, most=most)), most)
        if len(candidates.hashes) <= limit:
            return None
        usable = _least(found(replace(work, most=limit, last=candidates.last())), limit)
        if len(usable.hashes) == limit:
            return usable.last()
        if len(candidates.hashes) < most:
            return None
        most *= _MORE


def _least(found: Iterator[Marks], most: int) -> Marks:
    """Return the least marks of all units, with those of few units in memory."""
    least = _NONE
    for marks in found:
        least = Marks.joined([least, marks]).least(most)
    return least
