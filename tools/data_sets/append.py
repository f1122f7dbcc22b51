"""`pretokenize --append`: tokenize new input files, and add their rows to a finished data set."""

import logging
import time

from tokenfeed.pipeline.format.manifest import read_checked
from tokenfeed.tools.corpus.spool import Spool
from tokenfeed.tools.data_sets.merge import Opened, grow
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.pretokenizing.append_target import NothingNew, Onto
from tokenfeed.tools.pretokenizing.make import make_rows
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.summary import Figures, Summary

logger = logging.getLogger(__name__)


def append_rows(options: Options, spool: Spool = tuple) -> Summary:
    """Add the rows of a corpus to a finished data set.

    Args:
        options: The options of the command.
        spool: Returns records of this process, instead of the files of the options.

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
            _, figures = make_rows(chosen, spool, onto)
            manifest = grow(onto.store, Opened.read(str(onto.hidden.folder)))
        except NothingNew:
            logger.info("the data set has all input files already")
            manifest, info = onto.manifest, onto.manifest.tokenizer
            json_bytes, origin = read_checked(onto.store, info), onto.store.path(info.file)
            tokenizer = TextTokenizer.load(json_bytes, origin=origin)
            figures = Figures(tokenizer, skipped_known=onto.skipped, already_finished=True)
        onto.remove_hidden()
    return Summary.of(options, manifest, figures, started)
