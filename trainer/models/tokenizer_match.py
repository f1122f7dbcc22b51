"""Compare the tokenizer of loaded weights with the tokenizer of the shards.

An embedding fits by its shape, whatever tokenizer its rows were learnt with. Another tokenizer is
no error, for the body may be wanted alone; but nobody should learn of it by a bad loss.
"""

import contextlib
import logging
from pathlib import Path

from tokenizers import Tokenizer

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, Manifest
from tokenfeed.pipeline.format.store import open_store
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import first_of, read_tokenizer

__all__ = ["tokens_of", "warn_of_other_ids"]

_log = logging.getLogger(__name__)


def warn_of_other_ids(config: TrainConfig) -> None:
    """Warn if ids of --init-from are other tokens in the shards. Without a word where the
    tokenizer of --init-from cannot be found.

    Raises:
        ConfigError: The tokenizer of the shards cannot be read, or is another one by its checksum.
    """
    if config.init_from is None or config.resume:
        return
    shards = first_of(config.shards)
    ours = read_tokenizer(shards)
    with contextlib.suppress(TokenfeedError, OSError):
        file, theirs = _before(Path(config.init_from))
        others, known = _others(ours, theirs) if ours != theirs else (0, 0)
        if others:
            _log.warning(
                "`--init-from`=%s: its tokenizer is not that of %s: %s of %s ids are other tokens, "
                "so an embedding that is taken knows nothing of them. Shards that fit are made by "
                "`pretokenize --tokenizer %s`",
                config.init_from,
                shards,
                f"{others:,}",
                f"{known:,}",
                file,
            )


def _before(folder: Path) -> tuple[str, bytes]:
    """Return the tokenizer of an exported folder or of a run's shards, and its path."""
    path = folder / TOKENIZER_FILE
    if path.is_file():
        return str(path), path.read_bytes()
    begun = TrainConfig.of_run(folder)
    if begun is None:
        raise FileNotFoundError(folder)
    shards = first_of(begun.shards)
    file = Manifest.read(shards).tokenizer.file
    return open_store(shards).path(file), read_tokenizer(shards)


def _others(one: bytes, other: bytes) -> tuple[int, int]:
    """Return the number of common ids that are different tokens."""
    ours, theirs = tokens_of(one), tokens_of(other)
    known = ours.keys() & theirs.keys()
    return sum(ours[id] != theirs[id] for id in known), len(known)


def tokens_of(content: bytes) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by id; empty if it cannot be decoded."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception:  # `tokenizers` raises nothing more exact
        return {}
    return {id: token for token, id in tokenizer.get_vocab().items()}
