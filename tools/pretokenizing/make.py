"""Make a data set, or with `--part I/N` every Nth unit of it.

Find the input, cut it into units, load or train the tokenizer, encode the units, and write the
manifest. The output depends only on the input and the options. Records of the run are written first
and the manifest last, so an output is always new, unfinished or finished.
"""

import contextlib
import json
import logging
import time

from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenizerError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, Manifest
from tokenfeed.pipeline.format.store import Place
from tokenfeed.tools.corpus.spool import Spool
from tokenfeed.tools.encoding.record_blocks import UnitResult
from tokenfeed.tools.jobs.claim import recognise, remember, state_of, withdraw
from tokenfeed.tools.jobs.run_records import RunRecords, planning_alone, remove_records
from tokenfeed.tools.pretokenizing.append_target import Onto
from tokenfeed.tools.pretokenizing.commit import commit
from tokenfeed.tools.pretokenizing.inputs import Inputs
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.prepare import Listed, prepared
from tokenfeed.tools.pretokenizing.runner import Run, run_units
from tokenfeed.tools.pretokenizing.summary import Figures, PartSummary, Summary

logger = logging.getLogger(__name__)


def make_part(options: Options) -> PartSummary:
    """Make one part of the data set that `options` describe, or finish the data set.

    Args:
        options: The options of the command. All parts have the same except for `part`.

    Raises:
        TokenfeedError: Any error, in one line. The same command continues the part.
    """
    started = time.perf_counter()
    options.check()
    output, part = options.output, options.job_part
    state = state_of(output)
    listed = Listed.from_options(options, state)
    if state == "finished":
        _, num_units = recognise(output, listed.recipe)
        num_units = resumed_units = sum(map(part.has, range(num_units)))
    else:
        with contextlib.ExitStack() as stack:
            with planning_alone(output) if listed.plan is None else contextlib.nullcontext():
                run = prepared(listed)
                begun = RunRecords.begin(output, listed.recipe, part)
                records = stack.enter_context(begun)
                begin_writing(run, records)
            num_units, resumed_units = len(run.units), len(records.results)
            run_units(run, records)
    return PartSummary(
        out=str(output),
        part=str(options.part),
        units=num_units,
        resumed_units=resumed_units,
        already_finished=state == "finished",
        seconds=round(time.perf_counter() - started, 2),
    )


def begin_writing(run: Run, records: RunRecords) -> None:
    """Store the plan, and the tokenizer for workers, unless another process has stored them."""
    if not run.has_kept_plan:
        records.keep_plan(run.plan)
    output, json_bytes = run.settings.output, run.tokenizer.json_bytes
    if not output.exists(TOKENIZER_FILE) or output.read(TOKENIZER_FILE) != json_bytes:
        output.write(TOKENIZER_FILE, json_bytes)


def make_dataset(options: Options, spool: Spool = tuple) -> Summary:
    """Make the data set that `options` describe, or finish it.

    Args:
        options: The options of the command.
        spool: A function that returns records made in this Python process. They are read instead
            of the files that the options name.

    Raises:
        TokenfeedError: Any error, in one line. Files with final names are complete, and the same
            options continue the run.
    """
    started = time.perf_counter()
    options.check()
    return Summary.of(options, *make_rows(options, spool), started)


def make_rows(
    options: Options, spool: Spool = tuple, onto: Onto | None = None
) -> tuple[Manifest, Figures]:
    """Make or finish a data set; see `make_dataset`. Return its manifest, and figures of the run.

    Args:
        options: The options of the command, checked.
        spool: A function that returns records made in this Python process. They are read instead
            of the files that the options name.
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
    listed = Listed.from_options(options, state, spool, onto)
    skipped_binary = len(listed.inputs.corpus.binary)
    skipped_known = onto.skipped if onto else 0
    if state == "finished":
        manifest, num_units = recognise(output, listed.recipe)
        logger.info("already finished: the same command and input made this data set")
        return manifest, Figures(
            listed.finished_tokenizer(),
            skipped_binary,
            skipped_known,
            units=num_units,
            resumed_units=num_units,
            already_finished=True,
        )
    run = prepared(listed)
    with RunRecords.begin(output, listed.recipe) as records:
        resumed_units, resumed_bytes = len(records.results), _text_bytes(records)
        manifest = _encode(run, records, listed)
    return manifest, Figures(
        run.tokenizer,
        skipped_binary,
        skipped_known,
        units=len(run.units),
        resumed_units=resumed_units,
        new_bytes=manifest.ledger.bytes - resumed_bytes,
        tokenizer_seconds=run.tokenizer_seconds,
    )


def _text_bytes(records: RunRecords) -> int:
    """Return the bytes of text in finished units."""
    results = records.results.values()
    return sum(counts.bytes for result in results for counts in result.sources)


def _encode(run: Run, records: RunRecords, listed: Listed) -> Manifest:
    """Encode the units and write the data set."""
    output, inputs = run.settings.output, run.inputs
    try:
        begin_writing(run, records)
        settings = run_units(run, records)
    except TokenizerError:  # another command may do better, here too
        if not records.results:
            withdraw(output, records, inputs.splits)
        raise
    results = [records.results[unit.number] for unit in inputs.units]
    if not any(result.shards for result in results):
        failure = _no_document(output, inputs, results)
        withdraw(output, records, inputs.splits)
        raise failure
    files = ((source.name, source.bytes, source.state) for source in inputs.corpus.sources)
    remember(output, listed.recipe, len(inputs.units), files)
    manifest = commit(settings, inputs.corpus.sources, run.tokenizer, run.audit, results)
    remove_records(output, job_first=True)
    return manifest


def _no_document(output: Place, inputs: Inputs, results: list[UnitResult]) -> CorpusError:
    corpus = inputs.corpus
    num_rejected = sum(result.rejected for result in results)
    files = f"{len(corpus.sources):,} input file{'s' if len(corpus.sources) > 1 else ''}"
    if not num_rejected:
        num_empty = sum(counts.empty for result in results for counts in result.sources)
        why = "every document is empty" if num_empty else "there is no record"
        return CorpusError(f"no text in {files}: {why}.")
    name = next(result.reject_file.file for result in results if result.reject_file)
    reject = json.loads(output.read(name).splitlines()[0])
    remedy = inputs.task.remedy(reject["reason"])
    return CorpusError(
        f"no usable document in {files}: {num_rejected:,} rejected, the first in {reject['file']}, "
        f"record {reject['record']}: {reject['reason']}.{remedy}"
    )
