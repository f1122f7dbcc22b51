"""`pretokenize CORPUS... OUT`: tokenize a corpus once, into shards.

The run as a whole: find the input, cut it into units, settle the tokenizer, have the units encoded,
freeze the result under a manifest. What is written depends on the input and the options alone. The
journal goes first and the manifest last, so a folder is at any time new, unfinished or finished.
"""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import xxhash

from tokenfeed.pipeline.errors import CorpusError, TokenizerError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, Manifest
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.tools.console import print_json, run_command
from tokenfeed.tools.corpus.sources import Corpus
from tokenfeed.tools.encoding.audit import Audit
from tokenfeed.tools.encoding.engine import FastEngine, ReferenceEngine, installed_engines
from tokenfeed.tools.encoding.ledger import UnitResult
from tokenfeed.tools.encoding.tasks import ENDING_TASKS
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.encoding.training import train_tokenizer_json
from tokenfeed.tools.encoding.unit import Job
from tokenfeed.tools.job.claim import claim, is_unfinished
from tokenfeed.tools.job.freeze import freeze
from tokenfeed.tools.job.journal import Journal
from tokenfeed.tools.job.plan import Plan
from tokenfeed.tools.job.runner import Run, run_units, start_server
from tokenfeed.tools.job.summary import Summary
from tokenfeed.tools.options import Options, parse_options

__all__ = ["main", "pretokenize"]

logger = logging.getLogger(__name__)


def main() -> None:
    """The command `pretokenize`."""
    run_command(_command)


def _command() -> None:
    options = parse_options()
    summary = pretokenize(options)
    if options.json:
        print_json(summary.as_json())
    else:
        print(summary)


def pretokenize(options: Options) -> Summary:
    """Make the data set that `options` describe, or finish it, and say what became of the input.

    Raises:
        TokenfeedError: Whatever is wrong, in one line. What is under a final name then is whole,
            and the same options continue it.
    """
    started = time.perf_counter()
    options.check()
    unfinished = is_unfinished(options.out)
    start_server()
    plan = Plan.of(options)
    tokenizer_started = time.perf_counter()
    tokenizer = _settle_tokenizer(options, plan, unfinished=unfinished)
    tokenizer_seconds = time.perf_counter() - tokenizer_started
    _advise(options, tokenizer)
    plan.task.frame(tokenizer)  # an error here is one before anything is written
    with claim(options.out, _describe(options, plan, tokenizer)) as journal:
        resumed = list(journal.results.values())
        manifest = _encode(options, plan, tokenizer, journal)
    return Summary.of(
        manifest,
        folder=options.out,
        tokenizer=tokenizer,
        vocabulary_wanted=None if options.tokenizer else options.vocab_size,
        skipped_binary=plan.corpus.skipped_binary,
        units=len(plan.units),
        resumed=resumed,
        seconds=time.perf_counter() - started,
        tokenizer_seconds=tokenizer_seconds,
    )


def _encode(options: Options, plan: Plan, tokenizer: TextTokenizer, journal: Journal) -> Manifest:
    """Everything that writes."""
    atomic_write(options.out / TOKENIZER_FILE, tokenizer.json_bytes)
    asks_reference = options.engine == ReferenceEngine.name
    audit = Audit(tokenizer, plan.units, plan.task.fields, options.seed)
    job = Job(
        folder=options.out,
        task=plan.task,
        engine=ReferenceEngine.name if asks_reference else FastEngine.name,
        vocabulary_size=tokenizer.vocabulary_size,
        frame=plan.task.frame(tokenizer),
        validation=plan.validation,
        splits=plan.splits,
        splits_special=tokenizer.splits_special,
        max_rejects=options.allowed_rejects,
        verifies=options.verify_ids,
    )
    run = Run(
        job=job,
        units=plan.units,
        sources=plan.corpus.sources,
        workers=options.num_workers,
        audit=None if asks_reference else audit,
        falls_back=options.engine == "auto",
    )
    try:
        job = run_units(run, journal)
    except TokenizerError:  # another command may do better, here too
        if not journal.results:
            _withdraw(options.out, journal)
        raise
    results = [journal.results[unit.number] for unit in plan.units]
    if not any(result.shards for result in results):
        _withdraw(options.out, journal)
        raise _no_document(plan.corpus, results)
    manifest = freeze(job, plan.corpus.sources, tokenizer, run.audit, results)
    journal.remove()
    return manifest


def _withdraw(out: Path, journal: Journal) -> None:
    """Leave nothing of a run that came to nothing."""
    (out / TOKENIZER_FILE).unlink()
    journal.remove()
    with contextlib.suppress(OSError):
        out.rmdir()


def _settle_tokenizer(options: Options, plan: Plan, *, unfinished: bool) -> TextTokenizer:
    """The tokenizer asked for, or the one an unfinished run has trained, or a newly trained one."""
    trained = options.out / TOKENIZER_FILE
    origin: object = options.tokenizer or trained
    if options.tokenizer:
        json_bytes = fetch_tokenizer_json(options.tokenizer)
    elif unfinished and trained.exists():
        json_bytes = trained.read_bytes()
    else:
        logger.info("training a tokenizer on a sample of the corpus")
        json_bytes = train_tokenizer_json(
            plan.units,
            fields=plan.task.fields,
            vocabulary_size=options.vocab_size,
            seed=options.seed,
        )
    return TextTokenizer.load(
        json_bytes,
        origin=origin,
        end_token=options.end_token,
        splits_special=options.special_tokens_in_text == "split",
    )


def _advise(options: Options, tokenizer: TextTokenizer) -> None:
    """Say what a user of this tokenizer may not have expected."""
    ends = options.task in ENDING_TASKS
    if ends and tokenizer.end_token is None:
        logger.info("the tokenizer has no end token: rows end without one (see --end-token)")
    if not ends and tokenizer.has_template and not options.add_special_tokens:
        logger.info(
            "the tokenizer has a template for its special tokens, which is left out "
            "(see --add-special-tokens)"
        )


def _describe(options: Options, plan: Plan, tokenizer: TextTokenizer) -> dict[str, Any]:
    """All that the output depends on, in words a user can compare."""
    sources = plan.corpus.sources
    states = [(source.name, source.bytes, source.state, source.split) for source in sources]
    states_xxh3 = xxhash.xxh3_64_hexdigest(repr(states).encode())
    training = None if options.tokenizer else [options.vocab_size, options.seed]
    return {
        "CORPUS": list(options.corpus),
        "--exclude": list(options.exclude),
        "--split": list(options.split),
        "--task": plan.task.name,
        "the fields": list(plan.task.fields),
        "the labels": list(plan.task.label_names),
        "--validation": plan.validation,
        "--shard-size": plan.shard_bytes,
        "--tokenizer": options.tokenizer,
        "--vocab-size and --seed": training,
        "--end-token": options.end_token,
        "--add-special-tokens": options.add_special_tokens,
        "--special-tokens-in-text": options.special_tokens_in_text,
        "the tokenizer's checksum": tokenizer.xxh3,
        "--engine": options.engine,
        "--verify-ids": options.verify_ids,
        "the engines": installed_engines(),
        "the number of input files": len(states),
        "the bytes of the input": sum(source.bytes for source in sources),
        "the names, sizes and times of the input files": states_xxh3,
    }


def _no_document(corpus: Corpus, results: list[UnitResult]) -> CorpusError:
    rejects = [reject for result in results for reject in result.rejects]
    files = f"{len(corpus.sources):,} input file{'s' if len(corpus.sources) > 1 else ''}"
    if not rejects:
        return CorpusError(f"no text in {files}: every document is empty.")
    source, record, reason = rejects[0]
    return CorpusError(
        f"no usable document in {files}: {len(rejects):,} rejected, the first in "
        f"{corpus.sources[source].name}, record {record}: {reason}."
    )


if __name__ == "__main__":
    main()
