"""Make a data set, or with `--part I/N` every Nth unit of it.

Find the input, prepare the run, encode the units, and write the manifest. The output depends only
on the input and the options. Records of the run are written first and the manifest last, so an
output is always new, unfinished or finished.
"""

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenizerError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, Manifest, read_checked
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.tools.corpus.spool import Spool
from tokenfeed.tools.encoding.chat_messages import UNREAD_KEY
from tokenfeed.tools.encoding.labels import Labels
from tokenfeed.tools.encoding.limit import TRAIN
from tokenfeed.tools.encoding.record_blocks import UnitResult
from tokenfeed.tools.jobs.run_records import (
    WHOLE,
    JobPart,
    RunRecords,
    planning_alone,
    recognise,
    recorded_units,
    remove_records,
    state_of,
)
from tokenfeed.tools.pretokenizing.commit import commit
from tokenfeed.tools.pretokenizing.inputs import (
    Inputs,
    find_inputs,
    load_tokenizer,
    unread_fields,
)
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.prepare import Prepared, prepare
from tokenfeed.tools.pretokenizing.runner import run_units
from tokenfeed.tools.pretokenizing.summary import PartSummary, Summary

logger = logging.getLogger(__name__)


def make_part(options: Options) -> PartSummary:
    """Make one part of the data set that `options` describe. The last part to end makes the data
    set.

    Args:
        options: The options of the command. All parts have the same except for `part`.

    Raises:
        TokenfeedError: Any error, in one line. The same command continues the part.
    """
    started, part = time.perf_counter(), options.job_part
    inputs = find_inputs(options)
    if inputs.state == "finished":
        _, num_units = recognise(inputs.output, inputs.recipe)
        num_units = resumed_units = part.num_units(num_units)
        is_complete = True
    else:
        with _begun(inputs, part) as (run, records):
            num_units, resumed_units = part.num_units(len(run.units)), len(records.results)
            run_units(run, records)
        is_complete = _finished_by_last(run)
    return PartSummary(
        out=str(inputs.output),
        part=str(part),
        units=num_units,
        resumed_units=resumed_units,
        already_finished=inputs.state == "finished",
        is_complete=is_complete,
        seconds=round(time.perf_counter() - started, 2),
    )


@contextlib.contextmanager
def _begun(inputs: Inputs, part: JobPart) -> Iterator[tuple[Prepared, RunRecords]]:
    """Plan the run, or read its plan, and begin a part of it."""
    output = inputs.output
    with contextlib.ExitStack() as stack:
        with planning_alone(output):
            run = prepare(inputs)
            begun = RunRecords.begin(output, run.recipe, len(run.units), part)
            records = stack.enter_context(begun)
            if not run.has_kept_plan:
                records.keep_plan(run.plan)
            json_bytes = run.tokenizer.json_bytes  # for workers
            if not output.exists(TOKENIZER_FILE) or output.read(TOKENIZER_FILE) != json_bytes:
                output.write(TOKENIZER_FILE, json_bytes)
        yield run, records


def _finished_by_last(run: Prepared) -> bool:
    """Make the data set if every part has ended. Return whether it is made.

    In a folder, the part that leaves last makes it, because a part keeps its lock until its units
    are recorded. In a store, two parts may do so at once: they write the same bytes. If a part has
    found the fast engine wrong, units of other parts may have to be encoded again.
    """
    output, num_units = run.output, len(run.units)
    if len(recorded_units(output)) < num_units:
        return False
    try:
        with RunRecords.begin(output, run.recipe, num_units) as records:
            if not records.engine_rejected:
                _encode(run, records)
    except (ConfigError, FileNotFoundError):  # another part is at work, or has just made it
        pass
    return state_of(output) == "finished"


def make_dataset(options: Options, spool: Spool = tuple) -> Summary:
    """Make the data set that `options` describe, or finish it.

    Args:
        options: The options of the command.
        spool: A function that returns records made in this Python process. They are read instead
            of the files that the options name.

    Raises:
        TokenfeedError: Any error, in one line. Files with final names are complete, and the
            same options continue the run.
    """
    started = time.perf_counter()
    inputs = find_inputs(options, spool)
    output = inputs.output
    if options.finish and inputs.state == "new":
        raise ConfigError(
            f"`--finish`: {output} holds nothing to finish. Run `--part I/N` for every I first."
        )
    if inputs.state == "finished":
        manifest, num_units = recognise(output, inputs.recipe)
        logger.info("already finished: the same command and input made this data set")
        info = manifest.tokenizer
        tokenizer = inputs.tokenizer or load_tokenizer(
            options, read_checked(output, info), output.path(info.file)
        )
        return Summary.of(
            replace(inputs, tokenizer=tokenizer),
            manifest,
            units=num_units,
            resumed_units=num_units,
            already_finished=True,
            seconds=time.perf_counter() - started,
        )
    with _begun(inputs, WHOLE) as (run, records):
        resumed_units, resumed_bytes = len(records.results), _text_bytes(records)
        manifest = _encode(run, records)
    new_bytes = manifest.ledger.bytes - resumed_bytes
    unread = unread_fields(run.corpus, run.task) if new_bytes else {}
    _warn(run, manifest, unread)
    return Summary.of(
        run,
        manifest,
        units=len(run.units),
        resumed_units=resumed_units,
        new_bytes=new_bytes,
        unread_fields=unread,
        seconds=time.perf_counter() - started,
        tokenizer_seconds=run.tokenizer_seconds,
    )


def _encode(run: Prepared, records: RunRecords) -> Manifest:
    """Encode the units that are missing, and write the data set."""
    try:
        run = run_units(run, records)
    except TokenizerError:  # another command may do better, here too
        if not records.results:
            records.withdraw(run.splits)
        raise
    results = [records.results[unit.number] for unit in run.units]
    if not any(result.shards for result in results):
        failure = _no_document(run, results)
        records.withdraw(run.splits)
        raise failure
    manifest = commit(run, results)
    remove_records(run.output)
    _warn_of_labels(run.task.labels, results)
    return manifest


def _warn_of_labels(labels: Labels, results: list[UnitResult]) -> None:
    """Warn of labels that records have, but no row of the split train."""
    found: dict[str, set[int]] = {}
    for split, numbers in chain.from_iterable(result.labels.items() for result in results):
        found.setdefault(split, {IGNORED}).update(numbers)
    learnt = found.pop(TRAIN, set())
    named = set[int]() if labels.are_numbers else {*range(len(labels.names))}
    if learnt and (others := sorted(named.union(*found.values()) - learnt)):
        splits = ", ".join(split for split, numbers in found.items() if numbers & {*others})
        logger.warning(
            "%s of %s labels, like %s, have no row in the split train%s. A model gets an output "
            "for each of them and does not learn it: move records to train, or leave them out",
            *(f"{len(others):,}", f"{len(labels.names):,}", labels.names[others[0]]),
            splits and f", only in {splits}",
        )


def _no_document(run: Prepared, results: list[UnitResult]) -> CorpusError:
    num_files = len(run.corpus.sources)
    num_rejected = sum(result.rejected for result in results)
    files = f"{num_files:,} input file{'s' if num_files > 1 else ''}"
    if not num_rejected:
        num_empty = sum(counts.empty for result in results for counts in result.sources)
        why = "every document is empty" if num_empty else "there is no record"
        return CorpusError(f"no text in {files}: {why}.")
    name = next(result.reject_file.file for result in results if result.reject_file)
    reject = json.loads(run.output.read(name).splitlines()[0])
    remedy = run.task.remedy(reject["reason"])
    return CorpusError(
        f"no usable document in {files}: {num_rejected:,} rejected, the first in {reject['file']}, "
        f"record {reject['record']}: {reject['reason']}.{remedy}"
    )


def _text_bytes(records: RunRecords) -> int:
    """Return the bytes of text in finished units."""
    results = records.results.values()
    return sum(counts.bytes for result in results for counts in result.sources)


_WARNED = {
    "unread_tools": "%s conversations have tools, but the chat template does not write them",
    "text_arguments": "%s calls have arguments as a text, which the chat template writes as JSON "
    "again, with more quotes: give the arguments as objects",
    "weights": "%s messages have weights other than 0 and 1, not used: give --keep weight",
    "unread_systems": "%s conversations begin with another system message than their system field, "
    "which was not read",
    "unread_labels": "%s records have a label that is neither true nor false: they are learnt",
}
"""Warnings by the counts of the manifest that change what a model learns."""
_WARNED_KEYS = re.compile("train|loss|mask|function_calls|image")
"""Matches keys of messages that change what a model should learn, or lack in its text."""


def _warn(run: Prepared, manifest: Manifest, unread: dict[str, str]) -> None:
    """Warn of what changes the meaning and was not read: fields of records, and parts of them."""
    counts, kept = manifest.counts or {}, {column.name for column in manifest.columns}
    for name, share in unread.items():
        if remedy := run.task.warning_of(name):
            logger.warning("the field `%s` was not read (%s): %s", name, share, remedy)
    for name, said in _WARNED.items():
        if counts.get(name) and not (name == "weights" and "weight" in kept):
            logger.warning(said, f"{counts[name]:,}")
    for name, number in counts.items():
        key = name.removeprefix(UNREAD_KEY)
        if number and key != name and _WARNED_KEYS.search(key):
            logger.warning("%s messages have the key `%s`, which was not read", f"{number:,}", key)
