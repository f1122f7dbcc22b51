"""Encode one unit into shards: read, tokenize, divide among the splits, write, count.

The result depends only on the unit and the settings. So every worker writes the same bytes, and an
interrupted unit is encoded again. All steps work on batches. No token becomes a Python object.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE
from tokenfeed.pipeline.format.schema import INPUT_IDS, ORIGIN_FILE, ORIGIN_RECORD, Rows
from tokenfeed.pipeline.format.shard_writer import ShardWriter
from tokenfeed.pipeline.format.store import Place
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.corpus.records import Records
from tokenfeed.tools.corpus.units import Unit, UnverifiedError
from tokenfeed.tools.encoding.audit import Answers, Questions, answers_without_routed, beginning
from tokenfeed.tools.encoding.engines import (
    Engine,
    EngineName,
    Unencodable,
    load_engine,
)
from tokenfeed.tools.encoding.fast.engine import EngineUnavailable, FastEngine
from tokenfeed.tools.encoding.limit import (
    TRAIN,
    VALIDATION,
    Mark,
    hashes_of,
    marks_of,
    may_train,
    until,
)
from tokenfeed.tools.encoding.record_blocks import (
    Ledger,
    UnitResult,
    read_record_blocks,
)
from tokenfeed.tools.encoding.tasks.base import TaskEncoder
from tokenfeed.tools.encoding.template import Template

Report = Callable[[float, int, str], None]
"""Takes the weight, the tokens and the last record of a finished part of a unit."""
_SAMPLED_PART = 1000
"""Both engines encode about one document in this many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeSettings:
    """The settings that every worker needs for any unit."""

    output: Place
    """The folder for shards. It already contains tokenizer.json."""
    task: TaskEncoder
    engine: EngineName
    """The engine that makes the ids."""
    vocabulary_size: int
    template: Template
    """The special tokens around the texts of a row."""
    validation: float
    splits_special: bool
    """Whether special tokens in a document become their ids."""
    max_rejects: int | None
    last: Mark | None = None
    """The last record of `--limit`; None without a limit."""
    audits: bool = False
    """Whether the fast engine encodes a sample for the comparison, for any `engine`."""

    def begin(
        self, on_progress: Report, engine: Engine | None = None
    ) -> "Callable[[Unit | Questions], Encoded | Answers]":
        """Load the engine, and return the function that encodes a unit or answers the audit."""
        return UnitEncoder(self, on_progress, engine).do


class Encoded(NamedTuple):
    """The message that a unit is encoded."""

    result: UnitResult
    """The result of the unit."""
    sample: Answers
    """The ids of the fast engine for some texts, for the comparison."""


class UnitEncoder:
    """The encoder of units. A process has one, because engines take long to load."""

    def __init__(
        self, settings: EncodeSettings, on_progress: Report, engine: Engine | None
    ) -> None:
        """Load what the task needs.

        Args:
            settings: What to encode, and where to.
            on_progress: Called with the weight and tokens of each block that is done, and the
                last record of it.
            engine: The engine that makes the ids. None: load the engine of the settings.
        """
        self._at = ""
        """The last record of the present block."""
        self._settings, self._on_progress, self._given = settings, on_progress, engine
        self._json = settings.output.read(TOKENIZER_FILE)
        self._task = settings.task.with_tokenizer(self._json)
        if settings.task.has_texts:
            _ = self._engine, self._fast  # before workers are forked

    @cached_property
    def _engine(self) -> Engine:
        """The engine that makes the ids. A large vocabulary takes a second."""
        return self._given or self._loaded(self._settings.engine)

    @cached_property
    def _fast(self) -> FastEngine | None:
        """The fast engine, if a sample of its ids is compared."""
        if not self._settings.audits:
            return None
        engine = self._engine
        if not isinstance(engine, FastEngine):
            try:
                engine = self._loaded(FastEngine.name)
            except EngineUnavailable:
                return None
        assert isinstance(engine, FastEngine)
        return engine

    def _loaded(self, name: EngineName) -> Engine:
        size, special = self._settings.vocabulary_size, self._settings.splits_special
        return load_engine(name, self._json, size, splits_special=special)

    def do(self, work: Unit | Questions) -> "Encoded | Answers":
        """Encode a unit, or return the ids of the fast engine for the texts of the audit."""
        return self.encode(work) if isinstance(work, Unit) else self._answers(work.texts)

    def _answers(self, texts: list[bytes]) -> Answers:
        return answers_without_routed(self._fast, texts) if self._fast else {}

    def encode(self, unit: Unit) -> "Encoded":
        """Write the shards of `unit` and count its records.

        Raises:
            EngineFailure: The fast engine failed.
            CorpusError: There are more rejects than the settings allow.
        """
        in_one_pass = self._settings.max_rejects is None  # rejects behind damage do not count
        try:
            return self._encode_unit(unit, in_one_pass=in_one_pass)
        except UnverifiedError:
            return self._encode_unit(unit, in_one_pass=False)

    def _encode_unit(self, unit: Unit, *, in_one_pass: bool) -> "Encoded":
        settings, writers, self._at = self._settings, dict[str, ShardWriter](), ""
        with settings.output.room() as folder, contextlib.ExitStack() as stack:
            ledger = stack.enter_context(Ledger(unit, settings.max_rejects, folder))
            blocks = read_record_blocks(unit, settings.task, ledger, in_one_pass=in_one_pass)
            for number, block in enumerate(blocks):
                if unit.number == number == 0:
                    self._task.check_first(block.fields)
                if len(block):
                    name = ledger.sources[int(block.sources[-1])].name
                    self._at = f"record {block.numbers[-1]} of {name}"
                for split, rows in self._encode_block(block, ledger).items():
                    if split not in writers:
                        file = f"{split}/{unit.number:05d}.arrow"
                        size, columns = settings.vocabulary_size, settings.task.columns
                        writer = ShardWriter(folder, file, size, columns, is_shared=True)
                        writers[split] = stack.enter_context(writer)
                    writers[split].append(rows)
                    ledger.count_rows(split, rows)
                ledger.write_rejects()
            if len(writers) > 1:  # to wait for the disk once, and not for each shard
                for _ in results_of(ShardWriter.close, [*writers.values()], len(writers)):
                    pass
        infos = {split: writer.info for split, writer in writers.items()}
        return Encoded(ledger.result(infos, settings.engine), ledger.sample)

    def _encode_block(self, block: Records, ledger: Ledger) -> dict[str, Rows]:
        """Tokenize a block, and return its rows by split. Splits without rows are left out."""
        settings = self._settings
        texts = settings.task.texts(block.fields)
        hashes = hashes_of(texts)
        if settings.last is not None:
            is_left_out = may_train(block, hashes, settings.validation)
            is_left_out &= ~until(marks_of(block, hashes), settings.last)
            ledger.leave_out(block.sources[is_left_out])
            kept = np.flatnonzero(~is_left_out)
            block, texts, hashes = block.take(kept), [texts[place] for place in kept], hashes[kept]
        if not len(block):
            self._on_progress(block.weight_bytes, 0, self._at)
            return {}
        try:
            encode = partial(self._encode, ledger)
            samples = self._task.encode(block.fields, encode, settings.template)
        except Unencodable:
            return self._encode_block(ledger.usable(block, self._unencodable(block)), ledger)
        num_bytes = np.fromiter(map(len, texts), np.int64, len(texts))
        for index, reason in samples.unusable.items():
            ledger.reject(int(block.sources[index]), int(block.numbers[index]), reason)
        usable = np.setdiff1d(np.arange(len(block)), [*samples.unusable])
        ledger.count(block.sources[usable], num_bytes[usable], samples.has_text[usable])
        for name, counts in samples.counts.items():
            ledger.counts[name] += int(counts[samples.has_text].sum())
        if self._fast:
            ledger.sample |= self._sampled(block.take(np.flatnonzero(hashes % _SAMPLED_PART == 0)))
        chosen = {block.split or TRAIN: samples.has_text}
        if block.split is None:
            is_train = may_train(block, hashes, settings.validation)
            chosen = {
                TRAIN: samples.has_text & is_train,
                VALIDATION: samples.has_text & ~is_train,
            }
        rows = Rows(
            samples.per_token[INPUT_IDS].lengths,
            {name: ragged.values for name, ragged in samples.per_token.items()},
            {**samples.per_row, ORIGIN_FILE: block.sources, ORIGIN_RECORD: block.numbers},
        )
        dealt = {split: rows.where(mask) for split, mask in chosen.items() if mask.any()}
        num_tokens = sum(len(rows.ids) for rows in dealt.values())
        self._on_progress(block.weight_bytes, num_tokens, self._at)
        return dealt

    def _encode(self, ledger: Ledger, texts: list[bytes]) -> Ragged:
        """Return the ids of texts. Count routed texts."""
        made = self._engine.encode(texts)
        if isinstance(self._engine, FastEngine):
            ledger.routed += self._engine.num_routed
        return made

    def _unencodable(self, block: Records) -> dict[int, str]:
        """Return the records that the tokenizer cannot encode, and why."""
        reasons = {}
        for index in range(len(block)):
            values = block.take(np.array([index])).fields
            try:
                self._task.encode(values, self._engine.encode, self._settings.template)
            except Unencodable as error:
                reasons[index] = str(error)
        return reasons

    def _sampled(self, sample: Records) -> Answers:
        """Return the fast engine's ids for the texts of a sample. Long texts are cut."""
        answers: Answers = {}

        def noting(given: list[bytes]) -> Ragged:
            answers.update(self._answers(list(map(beginning, given))))
            return self._engine.encode(given)

        if len(sample):
            self._task.encode(sample.fields, noting, self._settings.template)
        return answers
