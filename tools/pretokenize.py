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

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.pipeline.manifest import Manifest
from tokenfeed.pipeline.storage import atomic_write
from tokenfeed.tools.claim import claim, is_unfinished
from tokenfeed.tools.console import print_json, run_command
from tokenfeed.tools.corpus import Corpus, find_corpus
from tokenfeed.tools.encode import Job, ReferenceEngine
from tokenfeed.tools.freeze import freeze
from tokenfeed.tools.journal import Journal, UnitResult
from tokenfeed.tools.options import Options, parse_options
from tokenfeed.tools.runner import run_units
from tokenfeed.tools.summary import Summary
from tokenfeed.tools.tokenizer import TOKENIZER_FILE, TextTokenizer, fetch_tokenizer_json
from tokenfeed.tools.training import train_tokenizer_json
from tokenfeed.tools.units import Unit, auto_shard_bytes, cut_units

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
    corpus = find_corpus(options.corpus, out=options.out, exclude=options.exclude)
    shard_bytes = options.shard_bytes or auto_shard_bytes(corpus.sources)
    units = cut_units(corpus.sources, shard_bytes, options.text_field)
    tokenizer_started = time.perf_counter()
    tokenizer = _settle_tokenizer(options, units, unfinished=unfinished)
    tokenizer_seconds = time.perf_counter() - tokenizer_started
    if tokenizer.end_token is None:
        logger.info("the tokenizer has no end token: documents end without one (see --end-token)")
    with claim(options.out, _describe(options, corpus, shard_bytes, tokenizer)) as journal:
        resumed = list(journal.results.values())
        manifest = _encode(options, corpus, units, tokenizer, journal)
    return Summary.of(
        manifest,
        folder=options.out,
        tokenizer=tokenizer,
        vocabulary_wanted=None if options.tokenizer else options.vocab_size,
        skipped_binary=corpus.skipped_binary,
        units=len(units),
        resumed=resumed,
        seconds=time.perf_counter() - started,
        tokenizer_seconds=tokenizer_seconds,
    )


def _encode(
    options: Options,
    corpus: Corpus,
    units: tuple[Unit, ...],
    tokenizer: TextTokenizer,
    journal: Journal,
) -> Manifest:
    """Everything that writes."""
    atomic_write(options.out / TOKENIZER_FILE, tokenizer.json_bytes)
    job = Job(
        folder=options.out,
        text_field=options.text_field,
        validation=options.validation,
        end_token=tokenizer.end_token,
    )
    run_units(job, units, options.num_workers, journal)
    results = [journal.results[unit.number] for unit in units]
    if not any(result.shards for result in results):
        _withdraw(options.out, journal)
        raise _no_document(corpus, results)
    manifest = freeze(options.out, corpus.sources, tokenizer, results)
    journal.remove()
    return manifest


def _withdraw(out: Path, journal: Journal) -> None:
    """Leave nothing of a run that came to nothing."""
    (out / TOKENIZER_FILE).unlink()
    journal.remove()
    with contextlib.suppress(OSError):
        out.rmdir()


def _settle_tokenizer(
    options: Options, units: tuple[Unit, ...], *, unfinished: bool
) -> TextTokenizer:
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
            units,
            text_field=options.text_field,
            vocabulary_size=options.vocab_size,
            seed=options.seed,
        )
    return TextTokenizer.load(json_bytes, origin=origin, end_token=options.end_token)


def _describe(
    options: Options, corpus: Corpus, shard_bytes: int, tokenizer: TextTokenizer
) -> dict[str, Any]:
    """All that the output depends on, in words a user can compare."""
    states = [(source.path, source.bytes, source.modified_ns) for source in corpus.sources]
    states_xxh3 = xxhash.xxh3_64_hexdigest(repr(states).encode())
    training = None if options.tokenizer else [options.vocab_size, options.seed]
    return {
        "CORPUS": [str(path) for path in options.corpus],
        "--exclude": list(options.exclude),
        "--text-field": options.text_field,
        "--validation": options.validation,
        "--shard-size": shard_bytes,
        "--tokenizer": options.tokenizer,
        "--vocab-size and --seed": training,
        "--end-token": options.end_token,
        "the tokenizer's checksum": tokenizer.xxh3,
        "the engine": f"{ReferenceEngine.name} {ReferenceEngine.version}",
        "the number of input files": len(states),
        "the bytes of the input": sum(source.bytes for source in corpus.sources),
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
        f"{corpus.sources[source].path}, record {record}: {reason}."
    )


if __name__ == "__main__":
    main()
