"""`pretokenize --append`: tokenize new input files, and add their rows to a finished data set."""

import logging
import time
from collections.abc import Sequence

from tokenfeed.pipeline.format.manifest import read_checked
from tokenfeed.tools.corpus.spool import Spooled
from tokenfeed.tools.data_sets.merge import Opened, grow
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.pretokenizing.append import NothingNew, Onto
from tokenfeed.tools.pretokenizing.make import Made, make_rows
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.summary import Summary

__all__ = ["append_rows"]

logger = logging.getLogger(__name__)


def append_rows(options: Options, spooled: Sequence[Spooled] = ()) -> Summary:
    """Add the rows of a corpus to a finished data set.

    Args:
        options: The options of the command.
        spooled: Records of this process, instead of the files of the options.

    Raises:
        TokenfeedError: Any error, in one line. The data set is as before, and the same options
            continue the run.
    """
    started = time.perf_counter()
    options.check()
    with Onto.opened(options.output) as onto:
        chosen = onto.options(options)
        chosen.check()
        try:
            made = make_rows(chosen, spooled, onto)
            manifest = grow(onto.store, Opened.read(str(onto.hidden.folder)))
        except NothingNew:
            logger.info("the data set has all input files already")
            made, manifest = _nothing(onto), onto.manifest
        onto.remove_hidden()
    return Made(manifest, made.figures).summary(str(options.output), started)


def _nothing(onto: Onto) -> Made:
    """Return the result of a run without new input files."""
    info = onto.manifest.tokenizer
    json_bytes, origin = read_checked(onto.store, info), onto.store.path(info.file)
    figures = {
        "skipped_binary": 0,
        "skipped_known": onto.skipped,
        "tokenizer": TextTokenizer.load(json_bytes, origin=origin),
        "units": 0,
        "resumed_units": 0,
        "new_bytes": 0,
        "already_finished": True,
        "tokenizer_seconds": 0.0,
    }
    return Made(onto.manifest, figures)
