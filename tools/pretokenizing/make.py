"""Make a data set: a run as a whole.

Find the input, cut it into units, load or train the tokenizer, have the units encoded, and commit
the result by a manifest. What is written depends on the input and the options alone. The journal
goes first and the manifest last, so a folder is at any time new, unfinished or finished.
"""

import logging
import time
from typing import Any

from tokenfeed.pipeline.errors import ConfigError, CorpusError, TokenfeedError, TokenizerError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, Manifest
from tokenfeed.tools.corpus.sources import Corpus
from tokenfeed.tools.encoding.counts import UnitResult
from tokenfeed.tools.options import Options
from tokenfeed.tools.outputs.output import Output
from tokenfeed.tools.pretokenizing.commit import REJECTS_FILE, commit
from tokenfeed.tools.pretokenizing.prepare import Prepared
from tokenfeed.tools.pretokenizing.runner import EngineRefused, Run, UnitsMissing, run_units
from tokenfeed.tools.pretokenizing.summary import Summary
from tokenfeed.tools.run.claim import Run as Claimed
from tokenfeed.tools.run.claim import claim, recognise, remember, state_of, withdraw
from tokenfeed.tools.run.crew import Server
from tokenfeed.tools.run.parts import parts_in, remove_parts

__all__ = ["make_dataset"]

logger = logging.getLogger(__name__)


def make_dataset(
    options: Options, server: Server | None = None, output: Output | None = None
) -> Summary:
    """Make the data set that `options` describe, or finish it, and say what became of the input.

    Args:
        options: What is wanted; its rows are in the order of the input all the same.
        server: A program to fork workers from, if one was started already.
        output: Where to make it; None for where the options say.

    Raises:
        TokenfeedError: Whatever is wrong, in one line. What is under a final name then is whole,
            and the same options continue it.
    """
    started = time.perf_counter()
    options.check()
    output = output or options.output
    state = state_of(output)
    if options.finish and state == "new":
        raise ConfigError(
            f"`--finish`: {output} holds nothing to finish. Run `--part I/N` for every I first."
        )
    prepared = Prepared.from_options(options, output, state, server)
    run, recipe = prepared.run, prepared.recipe
    if state == "finished":
        manifest = recognise(output, recipe)
        _check_rejects(options, manifest)
        if output == options.output:
            logger.info("already finished: the same command and input made this data set")
        resumed_units, new_bytes = len(run.inputs.units), 0
    else:
        with claim(output, recipe, UnitResult) as claimed:
            resumed_units, resumed_bytes = len(claimed.results), _text_bytes(claimed)
            manifest = _encode(run, claimed, recipe)
        new_bytes = manifest.ledger.bytes - resumed_bytes
    return Summary.from_manifest(
        manifest,
        run,
        vocabulary_wanted=None if options.tokenizer else options.vocab_size,
        resumed_units=resumed_units,
        new_bytes=new_bytes,
        already_finished=state == "finished",
        seconds=time.perf_counter() - started,
        tokenizer_seconds=prepared.tokenizer_seconds,
    )


def _check_rejects(options: Options, manifest: Manifest) -> None:
    """Check a finished data set against the limit that this command sets on rejects."""
    allowed, rejected = options.allowed_rejects, manifest.ledger.rejected
    if allowed is not None and rejected > allowed:
        limit = f"`--max-rejects {allowed}`" if allowed else "`--strict`"
        raise CorpusError(
            f"{options.output}: this data set is finished, with {rejected:,} rejected, and {limit} "
            f"allows fewer: {REJECTS_FILE} there names them. Leave it out, or mend the records and "
            "give another folder."
        )


def _text_bytes(claimed: Claimed[UnitResult]) -> int:
    """Text of the units that are done."""
    results = claimed.results.values()
    return sum(counts.bytes for result in results for counts in result.sources)


def _encode(run: Run, claimed: Claimed[UnitResult], recipe: dict[str, Any]) -> Manifest:
    """Encode the units and commit the result: all that writes."""
    output, inputs = run.settings.output, run.inputs
    output.write(TOKENIZER_FILE, run.tokenizer.json_bytes)
    try:
        settings = run_units(run, claimed)
    except UnitsMissing as missing:
        if claimed.is_new:
            claimed.remove()
        raise _parts_missing(output, missing) from None
    except TokenizerError as error:  # another command may do better, here too
        if isinstance(error, EngineRefused) or not claimed.results:
            withdraw(output, claimed, inputs.splits)
        raise
    results = [claimed.results[unit.number] for unit in inputs.units]
    if not any(result.shards for result in results):
        withdraw(output, claimed, inputs.splits)
        raise _no_document(inputs.corpus, results)
    remember(output, recipe)
    manifest = commit(settings, inputs.corpus.sources, run.tokenizer, run.audit, results)
    remove_parts(output)
    claimed.remove()
    return manifest


def _parts_missing(output: Output, missing: UnitsMissing) -> TokenfeedError:
    """Which parts have to be run again, as far as anything says how many there are."""
    count = parts_in(output)
    if not count:
        return TokenfeedError(f"{output}: {missing}. Repeat the command without `--finish`.")
    parts = sorted({number % count for number in missing.numbers})
    return TokenfeedError(
        f"{output}: {missing}, of part{'s' if parts[1:] else ''} {','.join(map(str, parts))} of "
        f"{count}. Run `--part I/{count}` for each of them, then `--finish` again."
    )


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
