"""`pretokenize --shuffle`: make a data set in a folder of the output folder, then shuffle it.

Each of the two continues by itself where it was interrupted, and what made the first is said to
have made the second. The hidden folder goes when the output folder is finished, not before.
"""

import dataclasses
import time
from pathlib import Path

from tokenfeed.pipeline.format.manifest import JOURNAL_FILE, MANIFEST_FILE, Manifest
from tokenfeed.tools.options import Options
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.summary import Summary
from tokenfeed.tools.run.claim import UNSHUFFLED_FOLDER, made_by, state_of
from tokenfeed.tools.run.crew import Server
from tokenfeed.tools.shuffling.run import Settings, clear_away, shuffle_into

__all__ = ["make_shuffled_dataset"]


def make_shuffled_dataset(options: Options, server: Server | None = None) -> Summary:
    """Make the data set that `options` describe, with its rows in random order; see `make_dataset`.

    The bytes of the shards are those that `shards shuffle` makes of the same options without
    `--shuffle`.
    """
    started = time.perf_counter()
    options.check()
    if not _is_begun(options.out) and state_of(options.out) != "new":
        summary = make_dataset(options, server)  # says that it is finished, or of another command
        clear_away(options.out)
        return summary
    hidden = options.out / UNSHUFFLED_FOLDER
    summary = make_dataset(options, server, hidden)
    settings = Settings(seed=options.seed, workers=options.num_workers)
    shuffled = shuffle_into(options.out, hidden, Manifest.read(hidden), settings, made_by(hidden))
    seconds = time.perf_counter() - started
    read_mb = summary.mb_per_s * (summary.seconds - summary.tokenizer_seconds)
    return dataclasses.replace(
        summary,
        out=str(options.out),
        shard_bytes=shuffled.shard_bytes,
        shard_bytes_per_token=round(shuffled.shard_bytes / shuffled.tokens, 3),
        already_finished=False,
        seconds=round(seconds, 2),
        mb_per_s=round(read_mb / (seconds - summary.tokenizer_seconds), 2),
    )


def _is_begun(out: Path) -> bool:
    """Whether a run with `--shuffle` is unfinished there, in whichever of its two parts."""
    is_finished = (out / MANIFEST_FILE).exists() and not (out / JOURNAL_FILE).exists()
    return (out / UNSHUFFLED_FOLDER).is_dir() and not is_finished
