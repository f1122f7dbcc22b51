"""The ledger of one unit: what became of each of its records, and what is kept of it in the end."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.format.manifest import ShardInfo, length_histogram
from tokenfeed.tools.corpus.records import Reject
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.audit import Answers
from tokenfeed.tools.encoding.engine import EngineName, ReferenceEngine

__all__ = ["SourceCounts", "UnitCounts", "UnitResult", "too_many_rejects"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """What became of the records of one input file, within one unit."""

    source: int
    bytes: int
    """Bytes of text encoded, as UTF-8."""
    written: int
    empty: int
    rejected: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """All that is kept of a finished unit, beside its shards."""

    unit: int
    shards: dict[str, ShardInfo]
    """The shard of each split that has rows."""
    histograms: dict[str, list[int]]
    """Rows by length, of the same splits."""
    sources: list[SourceCounts]
    rejects: list[tuple[int, int, str]]
    """Index of the input file, record and reason, in the order of the input."""
    engine: EngineName = ReferenceEngine.name
    """What made the ids; for a run with another engine the unit counts as not done."""
    audited: int = 0
    """Texts of a sample, or all, that both engines encoded."""
    differing: list[str] = field(default_factory=list)
    """Those whose ids differed."""
    routed: int = 0
    """Texts that the fast engine has left to the reference."""

    @property
    def files(self) -> tuple[ShardInfo, ...]:
        """All that was written."""
        return tuple(self.shards.values())


class UnitCounts:
    """Counts by input file: short arrays, since the files of a unit are neighbours."""

    def __init__(self, unit: Unit, max_rejects: int | None) -> None:
        self.sample: list[Answers] = []
        """Some of its texts, with the ids that the fast engine gives, to be compared."""
        self.audited = 0
        """Texts by which they were compared already."""
        self.differing: list[bytes] = []
        """Those whose ids differed."""
        self.routed = 0
        """Texts that the fast engine has left to the reference."""
        self._unit = unit
        self._max_rejects = max_rejects
        self._rejects: list[tuple[int, int, str]] = []
        self._histograms: dict[str, np.ndarray] = {}
        self._first = unit.parts[0].source.index
        num_sources = unit.parts[-1].source.index - self._first + 1
        self._bytes, self._written, self._empty = np.zeros((3, num_sources), np.int64)

    def count(self, sources: np.ndarray, num_bytes: np.ndarray, has_text: np.ndarray) -> None:
        """Enter encoded records: their sources, bytes of text, and which gave tokens; (R,) each."""
        places = sources - self._first
        num_sources = len(self._bytes)
        for total, weights in (
            (self._bytes, num_bytes),
            (self._written, has_text),
            (self._empty, ~has_text),
        ):
            total += np.bincount(places, weights, num_sources).astype(np.int64)

    def count_lengths(self, split: str, lengths: np.ndarray) -> None:
        """Enter rows written to a split."""
        self._histograms[split] = self._histograms.get(split, 0) + length_histogram(lengths)

    def reject(self, source: int, reject: Reject) -> None:
        """Enter a record that could not be used.

        Raises:
            CorpusError: It is one more than allowed.
        """
        self._rejects.append((source, reject.record, reject.reason))
        if self._max_rejects is not None and len(self._rejects) > self._max_rejects:
            names = {part.source.index: part.source.name for part in self._unit.parts}
            raise too_many_rejects(names[source], reject.record, reject.reason, self._max_rejects)

    def result(self, shards: dict[str, ShardInfo | None], engine: EngineName) -> UnitResult:
        """What is kept of the unit, given the shards of the splits that have rows."""
        return UnitResult(
            unit=self._unit.number,
            shards={split: info for split, info in sorted(shards.items()) if info},
            histograms={
                split: counts.tolist() for split, counts in sorted(self._histograms.items())
            },
            sources=self._by_source(),
            rejects=sorted(self._rejects),
            engine=engine,
            audited=self.audited,
            differing=[text.decode() for text in self.differing],
            routed=self.routed,
        )

    def _by_source(self) -> list[SourceCounts]:
        mine = {part.source.index for part in self._unit.parts}
        rejected = Counter(source for source, _, _ in self._rejects)
        counts = np.stack([self._bytes, self._written, self._empty], axis=1).tolist()
        return [
            SourceCounts(
                source=source,
                bytes=num_bytes,
                written=written,
                empty=empty,
                rejected=rejected[source],
            )
            for source, (num_bytes, written, empty) in enumerate(counts, self._first)
            if source in mine
        ]


def too_many_rejects(name: str, record: int, reason: str, allowed: int) -> CorpusError:
    """The error of a run with one reject more than the `allowed` number."""
    limit = f"`--max-rejects {allowed}`" if allowed else "`--strict`"
    return CorpusError(
        f"{name}, record {record}: {reason}. {limit} ends the run here; allow more, "
        "or mend the record and start with an empty output folder."
    )
