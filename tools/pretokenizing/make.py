"""Make a data set: a run as a whole.

Find the input, cut it into units, load or train the tokenizer, have the units encoded, and commit
the result by a manifest. What is written depends on the input and the options alone. The journal
goes first and the manifest last, so a folder is at any time new, unfinished or finished.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from tokenfeed.pipeline.errors import CorpusError, TokenizerError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, Manifest
from tokenfeed.pipeline.format.schema import ENDED_TASKS
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.tools.corpus.sources import Corpus
from tokenfeed.tools.encoding.audit import Audit
from tokenfeed.tools.encoding.counts import UnitResult
from tokenfeed.tools.encoding.engine import FastEngine, ReferenceEngine, installed_engines
from tokenfeed.tools.encoding.preloading import preload
from tokenfeed.tools.encoding.tokenizer import TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.encoding.training import train_tokenizer_json
from tokenfeed.tools.encoding.unit import EncodeSettings
from tokenfeed.tools.options import Options
from tokenfeed.tools.pretokenizing.commit import REJECTS_FILE, commit
from tokenfeed.tools.pretokenizing.inputs import Inputs
from tokenfeed.tools.pretokenizing.runner import EngineRefused, Run, is_small, run_units
from tokenfeed.tools.pretokenizing.summary import Summary
from tokenfeed.tools.run.claim import State, claim, recognise, remember, state_of, withdraw
from tokenfeed.tools.run.crew import Server
from tokenfeed.tools.run.journal import Journal

__all__ = ["make_dataset"]

logger = logging.getLogger(__name__)


def make_dataset(
    options: Options, server: Server | None = None, folder: Path | None = None
) -> Summary:
    """Make the data set that `options` describe, or finish it, and say what became of the input.

    Args:
        options: What is wanted; its rows are in the order of the input all the same.
        server: A program to fork workers from, if one was started already.
        folder: Where to make it; None for the output folder.

    Raises:
        TokenfeedError: Whatever is wrong, in one line. What is under a final name then is whole,
            and the same options continue it.
    """
    started = time.perf_counter()
    options.check()
    folder = folder or options.out
    state = state_of(folder)
    tokenizer = _given_tokenizer(options, folder, state)
    if tokenizer and server:
        server.prepare(_preloading(options, folder, tokenizer))
    inputs = Inputs.from_options(options)
    training_started = time.perf_counter()
    tokenizer = tokenizer or _trained_tokenizer(options, inputs, folder)
    training_seconds = time.perf_counter() - training_started
    _advise(options, tokenizer)
    run = _plan_run(options, inputs, tokenizer, folder, server)
    recipe = _recipe(options, inputs, tokenizer)
    if state == "finished":
        manifest = recognise(folder, recipe)
        _check_rejects(options, manifest)
        if folder == options.out:
            logger.info("already finished: the same command and input made this data set")
        resumed_units, new_bytes = len(inputs.units), 0
    else:
        with claim(folder, recipe, UnitResult) as journal:
            resumed_units, resumed_bytes = len(journal.results), _text_bytes(journal)
            manifest = _encode(run, journal)
        new_bytes = manifest.ledger.bytes - resumed_bytes
    return Summary.from_manifest(
        manifest,
        run,
        vocabulary_wanted=None if options.tokenizer else options.vocab_size,
        resumed_units=resumed_units,
        new_bytes=new_bytes,
        already_finished=state == "finished",
        seconds=time.perf_counter() - started,
        tokenizer_seconds=training_seconds,
    )


def _check_rejects(options: Options, manifest: Manifest) -> None:
    """Check a finished data set against the limit that this command sets on rejects."""
    allowed, rejected = options.allowed_rejects, manifest.ledger.rejected
    if allowed is not None and rejected > allowed:
        limit = f"`--max-rejects {allowed}`" if allowed else "`--strict`"
        raise CorpusError(
            f"{options.out}: this data set is finished, with {rejected:,} rejected, and {limit} "
            f"allows fewer: {REJECTS_FILE} there names them. Leave it out, or mend the records and "
            "give another folder."
        )


def _text_bytes(journal: Journal[UnitResult]) -> int:
    """Text of the units that are done."""
    results = journal.results.values()
    return sum(counts.bytes for result in results for counts in result.sources)


def _encode(run: Run, journal: Journal[UnitResult]) -> Manifest:
    """Encode the units and commit the result: all that writes."""
    folder, inputs = run.settings.folder, run.inputs
    atomic_write(folder / TOKENIZER_FILE, run.tokenizer.json_bytes)
    try:
        settings = run_units(run, journal)
    except TokenizerError as error:  # another command may do better, here too
        if isinstance(error, EngineRefused) or not journal.results:
            withdraw(journal, inputs.splits)
        raise
    results = [journal.results[unit.number] for unit in inputs.units]
    if not any(result.shards for result in results):
        withdraw(journal, inputs.splits)
        raise _no_document(inputs.corpus, results)
    remember(folder, journal.recipe)
    manifest = commit(settings, inputs.corpus.sources, run.tokenizer, run.audit, results)
    journal.remove()
    return manifest


def _plan_run(
    options: Options, inputs: Inputs, tokenizer: TextTokenizer, folder: Path, server: Server | None
) -> Run:
    """Who encodes: the reference where it was asked for, and where the input is small.

    Raises:
        TokenizerError: The tokenizer has no template for the task.
    """
    falls_back = options.engine == "auto"
    is_reference = options.engine == ReferenceEngine.name or (falls_back and is_small(inputs.units))
    sample_seed = 0 if options.tokenizer else options.seed  # another order is no other sample
    settings = EncodeSettings(
        folder=folder,
        task=inputs.task,
        engine=ReferenceEngine.name if is_reference else FastEngine.name,
        vocabulary_size=tokenizer.vocabulary_size,
        template=inputs.task.template(tokenizer),
        validation=inputs.validation,
        splits=inputs.splits,
        splits_special=tokenizer.splits_special,
        max_rejects=options.allowed_rejects,
        audits=not is_reference,
        verifies=options.verify_ids and not is_reference,
    )
    return Run(
        settings=settings,
        inputs=inputs,
        tokenizer=tokenizer,
        workers=options.num_workers,
        audit=Audit(tokenizer, inputs.units, inputs.task.fields, sample_seed),
        falls_back=falls_back,
        server=server,
    )


def _given_tokenizer(options: Options, folder: Path, state: State) -> TextTokenizer | None:
    """The tokenizer asked for, or the one that an earlier run has trained; None for a new one."""
    trained = folder / TOKENIZER_FILE
    if options.tokenizer:
        return _load(options, fetch_tokenizer_json(options.tokenizer), options.tokenizer)
    if state != "new" and trained.exists():
        return _load(options, trained.read_bytes(), trained)
    return None


def _trained_tokenizer(options: Options, inputs: Inputs, folder: Path) -> TextTokenizer:
    logger.info("training a tokenizer on a sample of the corpus")
    json_bytes = train_tokenizer_json(
        inputs.units,
        fields=inputs.task.fields,
        vocabulary_size=options.vocab_size,
        seed=options.seed,
    )
    return _load(options, json_bytes, folder / TOKENIZER_FILE)


def _load(options: Options, json_bytes: bytes, origin: object) -> TextTokenizer:
    return TextTokenizer.load(
        json_bytes,
        origin=origin,
        end_token=options.end_token,
        splits_special=options.special_tokens_in_text == "split",
    )


def _preloading(options: Options, folder: Path, tokenizer: TextTokenizer) -> Callable[[], None]:
    """What loads the fast engine for a tokenizer, in another process."""
    name = options.tokenizer or str(folder / TOKENIZER_FILE)
    special = tokenizer.splits_special
    return partial(preload, name, tokenizer.vocabulary_size, splits_special=special)


def _advise(options: Options, tokenizer: TextTokenizer) -> None:
    """Say what a user of this tokenizer may not have expected."""
    ends = options.task in ENDED_TASKS
    if ends and tokenizer.end_token is None:
        logger.info("the tokenizer has no end token: rows end without one (see --end-token)")
    if not ends and tokenizer.has_template and not options.add_special_tokens:
        logger.info(
            "the tokenizer has a template for its special tokens, which is left out "
            "(see --add-special-tokens)"
        )


def _recipe(options: Options, inputs: Inputs, tokenizer: TextTokenizer) -> dict[str, Any]:
    """All that the output depends on, in words a user can compare."""
    sources = inputs.corpus.sources
    states = [(source.name, source.bytes, source.state, source.split) for source in sources]
    states_xxh3 = xxhash.xxh3_64_hexdigest(repr(states).encode())
    training = None if options.tokenizer else [options.vocab_size, options.seed]
    shuffle = {"--shuffle and --seed": options.seed} if options.shuffle else {}
    return shuffle | {
        "CORPUS": list(options.corpus),
        "--exclude": list(options.exclude),
        "--split": list(options.split),
        "--task": inputs.task.name,
        "the fields": list(inputs.task.fields),
        "the labels": list(inputs.task.label_names),
        "--validation": inputs.validation,
        "--shard-size": inputs.shard_bytes,
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
