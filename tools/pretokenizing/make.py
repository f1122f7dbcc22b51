"""Make a data set, or with `--part I/N` every Nth unit of it.

Find the input, cut it into units, load or train the tokenizer, encode the units, and write the
manifest. The output depends only on the input and the options. Records of the run are written first
and the manifest last, so an output is always new, unfinished or finished.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenizerError
from tokenfeed.pipeline.facts import count_of
from tokenfeed.pipeline.format.manifest import REJECTS_FILE, TOKENIZER_FILE, Manifest
from tokenfeed.tools.corpus.sources import Corpus
from tokenfeed.tools.corpus.spool import Spooled
from tokenfeed.tools.encoding.record_blocks import UnitResult
from tokenfeed.tools.jobs.claim import recognise, remember, state_of, withdraw
from tokenfeed.tools.jobs.run_records import JobPart, RunRecords, planning_alone, remove_records
from tokenfeed.tools.pretokenizing.append import Onto
from tokenfeed.tools.pretokenizing.commit import commit
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.prepare import Listed, Prepared
from tokenfeed.tools.pretokenizing.runner import EngineRefused, run_units
from tokenfeed.tools.pretokenizing.summary import Summary

__all__ = ["Made", "PartSummary", "begin_writing", "make_dataset", "make_part", "make_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSummary:
    """The figures of a part of a run."""

    out: str
    part: str
    """The value of `--part`."""
    units: int
    """Units of this part."""
    resumed_units: int
    """Units of this part that were finished before."""
    already_finished: bool
    """Whether the data set was already finished."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return all fields as a JSON object."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if self.already_finished:
            return f"part {self.part} of {self.out}: the data set is already finished"
        resumed = f", {self.resumed_units:,} of them before" if self.resumed_units else ""
        return (
            f"part {self.part} of {self.out}: {count_of(self.units, 'unit')} finished{resumed}, in "
            f"{self.seconds:,.1f} s; `--finish` makes the data set when the parts have ended"
        )


def make_part(options: Options) -> PartSummary:
    """Make one part of the data set that `options` describe, or finish the data set.

    Args:
        options: The options of the command. All parts have the same except for `part`.

    Raises:
        TokenfeedError: Any error, in one line. The same command continues the part.
    """
    started = time.perf_counter()
    options.check()
    output, part = options.output, JobPart.from_text(str(options.part))
    state = state_of(output)
    listed = Listed.from_options(options, output, state)
    if state == "finished":
        _, num_units = recognise(output, listed.recipe)
        num_units = resumed_units = sum(map(part.has, range(num_units)))
    else:
        with contextlib.ExitStack() as stack:
            with planning_alone(output) if listed.plan is None else contextlib.nullcontext():
                prepared = Prepared.from_listed(listed)
                begun = RunRecords.begin(output, listed.recipe, UnitResult, part)
                records = stack.enter_context(begun)
                begin_writing(prepared, records)
            num_units, resumed_units = len(prepared.run.units), len(records.results)
            run_units(prepared.run, records)
    return PartSummary(
        out=str(output),
        part=str(options.part),
        units=num_units,
        resumed_units=resumed_units,
        already_finished=state == "finished",
        seconds=round(time.perf_counter() - started, 2),
    )


def begin_writing(prepared: Prepared, records: RunRecords[UnitResult]) -> None:
    """Store the plan, and the tokenizer for workers, unless another process has stored them."""
    if not prepared.is_kept:
        records.keep_plan(prepared.plan)
    output, json_bytes = prepared.run.settings.output, prepared.run.tokenizer.json_bytes
    there = output.exists(TOKENIZER_FILE)
    if not there or output.read(TOKENIZER_FILE) != json_bytes:
        output.write(TOKENIZER_FILE, json_bytes)


logger = logging.getLogger(__name__)


def make_dataset(options: Options, spooled: Sequence[Spooled] = ()) -> Summary:
    """Make the data set that `options` describe, or finish it.

    Args:
        options: The options of the command.
        spooled: Records of this process, instead of the files of the options.

    Raises:
        TokenfeedError: Any error, in one line. Files with final names are complete, and the same
            options continue the run.
    """
    started = time.perf_counter()
    options.check()
    made = make_rows(options, spooled)
    wanted = None if options.tokenizer else options.vocab_size
    return made.summary(str(options.output), started, vocabulary_wanted=wanted)


class Made(NamedTuple):
    """A finished data set, and the figures of the run."""

    manifest: Manifest
    figures: dict[str, Any]
    """Arguments of `Summary.from_manifest`."""

    def summary(self, out: str, started: float, *, vocabulary_wanted: int | None = None) -> Summary:
        """Return the figures at the end of a run that was started at `time.perf_counter()`."""
        return Summary.from_manifest(
            self.manifest,
            out=out,
            vocabulary_wanted=vocabulary_wanted,
            seconds=time.perf_counter() - started,
            **self.figures,
        )


def make_rows(options: Options, spooled: Sequence[Spooled] = (), onto: Onto | None = None) -> Made:
    """Make or finish a data set; see `make_dataset`.

    Args:
        options: The options of the command, checked.
        spooled: Records of this process, instead of the files of the options.
        onto: The data set that the rows are for. Input files that it has are left out.

    Raises:
        NothingNew: `onto` has all input files.
    """
    output = options.output
    state = state_of(output)
    if options.finish and state == "new":
        raise ConfigError(
            f"`--finish`: {output} holds nothing to finish. Run `--part I/N` for every I first."
        )
    listed = Listed.from_options(options, output, state, spooled, onto)
    if state == "finished":
        manifest, num_units = recognise(output, listed.recipe)
        _check_rejects(options, manifest)
        logger.info("already finished: the same command and input made this data set")
        tokenizer, tokenizer_seconds = listed.finished_tokenizer(), 0.0
        resumed_units, new_bytes = num_units, 0
    else:
        prepared = Prepared.from_listed(listed)
        tokenizer, tokenizer_seconds = prepared.run.tokenizer, prepared.tokenizer_seconds
        with RunRecords.begin(output, listed.recipe, UnitResult) as records:
            resumed_units, resumed_bytes = len(records.results), _text_bytes(records)
            manifest = _encode(prepared, records, listed.recipe)
        num_units = len(prepared.run.inputs.units)
        new_bytes = manifest.ledger.bytes - resumed_bytes
    figures = {
        "skipped_binary": len(listed.inputs.corpus.binary),
        "skipped_known": onto.skipped if onto else 0,
        "tokenizer": tokenizer,
        "units": num_units,
        "resumed_units": resumed_units,
        "new_bytes": new_bytes,
        "already_finished": state == "finished",
        "tokenizer_seconds": tokenizer_seconds,
    }
    return Made(manifest, figures)


def _check_rejects(options: Options, manifest: Manifest) -> None:
    """Check the number of rejects of a finished data set against the limit of this command."""
    allowed, rejected = options.allowed_rejects, manifest.ledger.rejected
    if allowed is not None and rejected > allowed:
        limit = f"`--max-rejects {allowed}`" if allowed else "`--strict`"
        raise CorpusError(
            f"{options.output}: this data set is finished, with {rejected:,} rejected, and {limit} "
            f"allows fewer: {REJECTS_FILE} there names them. Leave it out, or mend the records and "
            "give another folder."
        )


def _text_bytes(records: RunRecords[UnitResult]) -> int:
    """Return the bytes of text in finished units."""
    results = records.results.values()
    return sum(counts.bytes for result in results for counts in result.sources)


def _encode(
    prepared: Prepared, records: RunRecords[UnitResult], recipe: dict[str, Any]
) -> Manifest:
    """Encode the units and write the data set."""
    run = prepared.run
    output, inputs = run.settings.output, run.inputs
    try:
        begin_writing(prepared, records)
        settings = run_units(run, records)
    except TokenizerError as error:  # another command may do better, here too
        if isinstance(error, EngineRefused) or not records.results:
            withdraw(output, records, inputs.splits)
        raise
    results = [records.results[unit.number] for unit in inputs.units]
    if not any(result.shards for result in results):
        withdraw(output, records, inputs.splits)
        raise _no_document(inputs.corpus, results)
    files = ((source.name, source.bytes, source.state) for source in inputs.corpus.sources)
    remember(output, recipe, len(inputs.units), files)
    manifest = commit(settings, inputs.corpus.sources, run.tokenizer, run.audit, results)
    remove_records(output, job_first=True)
    return manifest


def _no_document(corpus: Corpus, results: list[UnitResult]) -> CorpusError:
    num_rejected = sum(result.rejected for result in results)
    files = f"{len(corpus.sources):,} input file{'s' if len(corpus.sources) > 1 else ''}"
    if not num_rejected:
        return CorpusError(f"no text in {files}: every document is empty.")
    source, record, reason = next(reject for result in results for reject in result.rejects)
    return CorpusError(
        f"no usable document in {files}: {num_rejected:,} rejected, the first in "
        f"{corpus.sources[source].name}, record {record}: {reason}."
    )
