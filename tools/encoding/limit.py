"""`--limit N`: the N usable records of the split train whose texts have the least hashes.

The choice depends on the texts alone, not on workers, parts of a run or the order of files. Equal
texts have equal hashes: among them, the first in the corpus are taken. A first pass over the corpus
hashes all records, which is much faster than encoding. A second pass encodes a few more than N
records, because some records turn out to be unusable when they are encoded. If too few are usable,
both passes are repeated with more candidates.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from tokenfeed.tools.corpus.records import Records
from tokenfeed.tools.corpus.units import Unit, UnverifiedError
from tokenfeed.tools.encoding.engines import Engine, ReferenceEngine, Unencodable, load_engine
from tokenfeed.tools.encoding.record_blocks import Ledger, read_record_blocks
from tokenfeed.tools.encoding.tasks.base import TaskEncoder

if TYPE_CHECKING:
    from tokenfeed.tools.encoding.unit import EncodeSettings, Report

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


Marks = np.ndarray
"""The marks of R records: hashes, sources and numbers of records, shape (3, R), uint64."""


def hashes_of(texts: list[bytes]) -> np.ndarray:
    """Return the hash of each text, which chooses its split and its place in the order."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(texts))


def until(marks: Marks, last: Mark) -> np.ndarray:
    """Return which marks are not behind `last`, shape (R,), bool."""
    found: np.ndarray = marks[2] <= np.uint64(last.record)
    for column, value in ((marks[1], last.source), (marks[0], last.hash)):
        found = (column < np.uint64(value)) | ((column == np.uint64(value)) & found)
    return found


def marks_of(block: Records, hashes: np.ndarray) -> Marks:
    """Return the marks of the records of a block."""
    return np.stack([hashes, block.sources.astype(np.uint64), block.numbers.astype(np.uint64)])


def may_train(block: Records, hashes: np.ndarray, validation: float) -> np.ndarray:
    """Return which records of a block belong to the split train, shape (R,), bool."""
    if block.split is not None:
        return np.full(len(block), block.split == TRAIN)
    return hashes >= np.uint64(int(validation * 2**64))


@dataclass(frozen=True, kw_only=True, slots=True)
class FindLeast:
    """The work on a unit: find the records of the split train with the least hashes."""

    settings: "EncodeSettings"
    json_bytes: bytes
    """The tokenizer."""
    most: int
    last: Mark | None = None
    """Encode the records up to this mark, to return the usable ones. None: encode no record."""

    def begin(self, on_progress: "Report") -> Callable[[Unit], Marks]:
        """Load the engine, and return the function that finds the records of a unit."""
        engine = load_engine(
            ReferenceEngine.name,
            self.json_bytes,
            self.settings.vocabulary_size,
            splits_special=self.settings.splits_special,
        )
        task = self.settings.task.with_tokenizer(self.json_bytes)

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
        on_progress: "Report",
        *,
        in_one_pass: bool,
    ) -> Marks:
        found = _NONE
        blocks = read_record_blocks(unit, task, Ledger(unit, None), in_one_pass=in_one_pass)
        for block in blocks:
            on_progress(block.weight_bytes, 0, "")
            hashes = hashes_of(task.texts(block.fields))
            marks = marks_of(block, hashes)
            is_wanted = may_train(block, hashes, self.settings.validation)
            if found.shape[1] == self.most:
                is_wanted &= until(marks, Mark(*found[:, -1].tolist()))
            if self.last is not None:
                is_wanted &= until(marks, self.last)
            places = np.flatnonzero(is_wanted)
            if self.last is not None and len(places):
                places = places[self._usable(block.take(places), task, engine)]
            found = _least([found, marks[:, places]], self.most)
        return found

    def _usable(self, block: Records, task: TaskEncoder, engine: Engine) -> np.ndarray:
        """Return which records have tokens and can be written, shape (R,), bool."""
        try:
            return task.encode(block.fields, engine.encode, self.settings.template).has_text
        except Unencodable:
            if len(block) == 1:
                return np.zeros(1, bool)
            each = (block.take(np.array([place])) for place in range(len(block)))
            return np.concatenate([self._usable(one, task, engine) for one in each])


_NONE: Marks = np.empty((3, 0), np.uint64)


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
        if candidates.shape[1] <= limit:
            return None
        last = Mark(*candidates[:, -1].tolist())
        usable = _least(found(replace(work, most=limit, last=last)), limit)
        if usable.shape[1] == limit:
            return Mark(*usable[:, -1].tolist())
        if candidates.shape[1] < most:
            return None
        most *= _MORE


def _least(found: Iterable[Marks], most: int) -> Marks:
    """Return the first `most` marks, in order, with the marks of few units in memory."""
    least = _NONE
    for marks in found:
        both = np.concatenate([least, marks], axis=1)
        least = both[:, np.lexsort(both[::-1])[:most]]
    return least
