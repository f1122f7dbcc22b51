"""Encode one unit into shards: read, tokenize, split off validation, write, count.

What comes out depends on the unit and the job alone, so it is the same whoever runs it, and a unit
that was interrupted is simply run again. An engine takes a batch of texts and gives flat ids and
lengths as numpy arrays; nothing here touches a single token in Python.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import xxhash

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.manifest import length_histogram
from tokenfeed.pipeline.schema import token_dtype
from tokenfeed.pipeline.shard import Rows, ShardWriter
from tokenfeed.tools.journal import SourceCounts, UnitResult
from tokenfeed.tools.records import Document, Reject, read_records
from tokenfeed.tools.tokenizer import TextTokenizer
from tokenfeed.tools.units import Unit

__all__ = ["TRAIN", "VALIDATION", "Job", "ReferenceEngine", "UnitEncoder"]

TRAIN, VALIDATION = "train", "validation"
_BATCH_BYTES = 1 << 20
"""Text encoded at once: bounds memory, since an encoding takes many times the text's space."""
_BATCH_DOCUMENTS = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker must know, whichever unit it gets."""

    folder: Path
    """The output folder; tokenizer.json lies there already."""
    text_field: str
    validation: float
    end_token: str | None


class ReferenceEngine:
    """The `tokenizers` package: by definition what is right."""

    name = "tokenizers"
    version = tokenizers.__version__

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._dtype = token_dtype(tokenizer.vocabulary_size)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode a batch of texts.

        Returns:
            All ids one text after the other, shape (N,), in storage dtype; and the number of ids of
            each text, shape (R,), int64, 0 where a text gives none.
        """
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises what its Rust side gives
            raise TokenizerError(f"the tokenizer cannot encode a text: {error}.") from error
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        flat = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(flat, self._dtype, int(lengths.sum())), lengths


class UnitEncoder:
    """Encodes units, one after the other, with one engine. One per process."""

    def __init__(
        self,
        job: Job,
        tokenizer: TextTokenizer,
        on_progress: Callable[[int, int], None] = lambda num_bytes, num_tokens: None,
    ) -> None:
        """Args: `on_progress` is told the bytes and tokens of each batch that is done."""
        self._job = job
        self._engine = ReferenceEngine(tokenizer)
        self._vocabulary_size = tokenizer.vocabulary_size
        self._end_id = tokenizer.end_id
        self._threshold = int(job.validation * 2**64)
        self._on_progress = on_progress

    def encode(self, unit: Unit) -> UnitResult:
        """Write the shards of `unit` and count what became of its records."""
        counts = _Counts(unit)
        writers: dict[str, ShardWriter] = {}
        with contextlib.ExitStack() as stack:
            for batch in _batches(unit, self._job.text_field, counts):
                for split, rows in self._encode_batch(batch, counts).items():
                    if split not in writers:
                        writer = self._writer(split, unit.number)
                        writers[split] = stack.enter_context(writer)
                    writers[split].append(rows)
                    counts.histograms[split] += length_histogram(rows.lengths)
        return UnitResult(
            unit=unit.number,
            shards={split: writer.info for split, writer in sorted(writers.items()) if writer.info},
            histograms={split: counts.histograms[split].tolist() for split in sorted(writers)},
            sources=counts.by_source(),
            rejects=counts.rejects,
        )

    def _writer(self, split: str, number: int) -> ShardWriter:
        return ShardWriter(self._job.folder, f"{split}/{number:05d}.arrow", self._vocabulary_size)

    def _encode_batch(self, batch: "_Batch", counts: "_Counts") -> dict[str, Rows]:
        """Tokenize a batch and deal its rows to the splits; a split without rows is left out."""
        ids, lengths = self._engine.encode([document.text for document in batch.documents])
        filled = lengths > 0
        counts.add(batch, filled)
        if self._end_id is not None:
            ends = np.cumsum(lengths[filled])
            ids, lengths = np.insert(ids, ends, self._end_id), lengths + 1
        rows = Rows(
            ids,
            lengths[filled],
            batch.sources[filled],
            np.array([document.record for document in batch.documents], np.uint64)[filled],
        )
        self._on_progress(int(batch.num_bytes.sum()), len(ids))
        aside = self._is_validation(batch.documents)[filled]
        parts = {TRAIN: _select(rows, ~aside), VALIDATION: _select(rows, aside)}
        return {split: part for split, part in parts.items() if len(part)}

    def _is_validation(self, documents: list[Document]) -> np.ndarray:
        """By a hash of the text, so that copies of a text never stand on both sides."""
        hashes = [xxhash.xxh3_64_intdigest(document.utf8) for document in documents]
        return np.array(hashes, np.uint64) < np.uint64(self._threshold)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Documents that are tokenized together."""

    documents: list[Document]
    sources: np.ndarray
    """The source of each document, shape (R,), uint32."""
    num_bytes: np.ndarray
    """Bytes of each document's text, shape (R,), int64."""


class _Counts:
    """The ledger of a unit while it is encoded. Its sources are consecutive, so arrays will do."""

    def __init__(self, unit: Unit) -> None:
        self.rejects: list[tuple[int, int, str]] = []
        self.histograms = {split: length_histogram(np.empty(0)) for split in (TRAIN, VALIDATION)}
        self._first = unit.parts[0].source.index
        num_sources = unit.parts[-1].source.index - self._first + 1
        self._bytes, self._written, self._empty = np.zeros((3, num_sources), np.int64)

    def add(self, batch: _Batch, filled: np.ndarray) -> None:
        sources = batch.sources - self._first
        np.add.at(self._bytes, sources, batch.num_bytes)
        np.add.at(self._written, sources, filled)
        np.add.at(self._empty, sources, ~filled)

    def reject(self, source: int, reject: Reject) -> None:
        self.rejects.append((source, reject.record, reject.reason))

    def by_source(self) -> list[SourceCounts]:
        rejected = Counter(source for source, _, _ in self.rejects)
        return [
            SourceCounts(
                source=self._first + index,
                bytes=int(num_bytes),
                written=int(written),
                empty=int(empty),
                rejected=rejected[self._first + index],
            )
            for index, (num_bytes, written, empty) in enumerate(
                zip(self._bytes, self._written, self._empty, strict=True)
            )
        ]


def _batches(unit: Unit, text_field: str, counts: _Counts) -> Iterator[_Batch]:
    """The documents of a unit in batches of limited size; rejects go straight to `counts`."""
    documents: list[Document] = []
    sources: list[int] = []
    pending_bytes = 0
    for part in unit.parts:
        for record in read_records(part, text_field):
            if isinstance(record, Reject):
                counts.reject(part.source.index, record)
                continue
            documents.append(record)
            sources.append(part.source.index)
            pending_bytes += len(record.utf8)
            if pending_bytes >= _BATCH_BYTES or len(documents) >= _BATCH_DOCUMENTS:
                yield _batch(documents, sources)
                documents, sources, pending_bytes = [], [], 0
    if documents:
        yield _batch(documents, sources)


def _batch(documents: list[Document], sources: list[int]) -> _Batch:
    num_bytes = np.array([len(document.utf8) for document in documents], np.int64)
    return _Batch(documents, np.array(sources, np.uint32), num_bytes)


def _select(rows: Rows, chosen: np.ndarray) -> Rows:
    return Rows(
        rows.ids[np.repeat(chosen, rows.lengths)],
        rows.lengths[chosen],
        rows.origin_file[chosen],
        rows.origin_record[chosen],
    )
