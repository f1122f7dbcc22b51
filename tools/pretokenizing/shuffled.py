"""`pretokenize --shuffle`: make a data set in a folder of the output folder, then shuffle it.

Each of the two continues by itself where it was interrupted, and what made the first is said to
have made the second. The hidden folder goes when the output folder is finished, not before.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path

from tokenfeed.pipeline.errors import ManifestError, ShardFormatError
from tokenfeed.pipeline.format.manifest import JOURNAL_FILE, MANIFEST_FILE, Manifest
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.tools.options import Options
from tokenfeed.tools.outputs.output import FolderOutput
from tokenfeed.tools.pretokenizing.make import make_dataset
from tokenfeed.tools.pretokenizing.summary import Summary
from tokenfeed.tools.run.claim import UNSHUFFLED_FOLDER, made_by, state_of
from tokenfeed.tools.run.crew import Server
from tokenfeed.tools.run.journal import kept_from_others
from tokenfeed.tools.shuffling.run import Settings, clear_away, shuffle_into

__all__ = ["make_shuffled_dataset"]

_REMEDIES_IN_VAIN = re.compile("Copy|Restore|`pretokenize`|[Dd]elete")


def make_shuffled_dataset(options: Options, server: Server | None = None) -> Summary:
    """Make the data set that `options` describe, with its rows in random order; see `make_dataset`.

    The bytes of the shards are those that `shards shuffle` makes of the same options without
    `--shuffle`.
    """
    started = time.perf_counter()
    options.check()
    if not _is_begun(options.out) and state_of(options.output) != "new":
        summary = make_dataset(options, server)  # says that it is finished, or of another command
        clear_away(options.out)
        return summary
    hidden = options.out / UNSHUFFLED_FOLDER
    settings = Settings(seed=options.seed, workers=options.num_workers)
    with _saying_how_to_start_again(options.out):
        with kept_from_others(options.out):
            summary = make_dataset(options, server, FolderOutput(hidden))
        manifest = Manifest.read(hidden)
        shuffled = shuffle_into(
            options.out, open_store(hidden), manifest, settings, made_by(FolderOutput(hidden))
        )
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


@contextlib.contextmanager
def _saying_how_to_start_again(out: Path) -> Iterator[None]:
    """Where what is to be shuffled is damaged: this command made it, and would take it as it is."""
    try:
        yield
    except (ManifestError, ShardFormatError) as error:
        what, _, remedy = str(error).partition(". ")
        if UNSHUFFLED_FOLDER not in what or not _REMEDIES_IN_VAIN.search(remedy):
            raise
        raise type(error)(f"{what}. Delete {out} and repeat the command.") from error


def _is_begun(out: Path) -> bool:
    """Whether a run with `--shuffle` is unfinished there, in whichever of its two parts."""
    is_finished = (out / MANIFEST_FILE).exists() and not (out / JOURNAL_FILE).exists()
    return (out / UNSHUFFLED_FOLDER).is_dir() and not is_finished
