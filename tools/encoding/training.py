"""Train a tokenizer on a sample of the corpus, for users without one.

Byte-level BPE: every text can be encoded and decoded back exactly. The sample (about 32 MB, drawn
by part in seeded random order) bounds time and memory; what a larger one would add to a vocabulary
is little. The same corpus, size and seed give the same tokenizer, byte for byte.
"""

import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain, takewhile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenfeed.pipeline.errors import CorpusError
from tokenfeed.tools.corpus.input_files import FilePart
from tokenfeed.tools.corpus.records import Fields
from tokenfeed.tools.corpus.units import Unit, fetched_ahead, first_reject, read_texts

END_TOKEN = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""Every byte, and the end of a document."""

_SAMPLE_CHARACTERS = 32_000_000
_PART_CHARACTERS = 1_000_000
"""No part gives more, unless parts are few: one huge file must not be the whole sample."""
_MIN_FREQUENCY = 2


def train_tokenizer_json(
    units: tuple[Unit, ...],
    *,
    fields: Fields,
    vocabulary_size: int,
    seed: int,
    remedy: Callable[[str], str] = lambda reason: "",
) -> bytes:
    """Train a byte-level BPE of at most `vocabulary_size` ids and give its tokenizer.json.

    Args:
        units: The corpus.
        fields: The fields with texts, by the names of the user.
        vocabulary_size: Largest number of ids.
        seed: Chooses the sample of texts.
        remedy: Returns what to do about the reason of a rejected record; see `TaskEncoder.remedy`.

    Raises:
        CorpusError: The corpus has no text.
    """
    texts = _sample(units, fields, seed)
    first = next(texts, None)
    if first is None:
        where, reason = first_reject((part for unit in units for part in unit.parts), fields)
        raise CorpusError(
            f"no text to train a tokenizer on: every document is empty or rejected{where}{reason}."
            f"{remedy(reason)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=_MIN_FREQUENCY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # a set: its order varies
        special_tokens=[END_TOKEN],
        show_progress=bool(sys.stderr and sys.stderr.isatty()),
    )
    _run_interruptibly(lambda kept: tokenizer.train_from_iterator(kept, trainer), first, texts)
    return tokenizer.to_str().encode()


def _run_interruptibly(
    train: Callable[[Iterator[str]], None], first: str, texts: Iterator[str]
) -> None:
    """Train on a background thread, so that Ctrl-C ends the command within a second.

    In the main thread, Python would handle the signal only when the library returns, which takes
    many seconds. An interruption ends the iterator. The library then merges tokens without calling
    Python, so the process can exit while the thread runs.
    """
    stopped = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            train(takewhile(lambda _: not stopped.is_set(), chain([first], texts)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tokenizer training", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        stopped.set()
        thread.join(1)  # the library asks for a last text
        raise
    if errors:
        raise errors[0]


def _sample(units: tuple[Unit, ...], fields: Fields, seed: int) -> Iterator[str]:
    """Non-empty texts, the last of a part cut where the part's share ends."""
    parts = [part for unit in units for part in unit.parts]
    random.Random(seed).shuffle(parts)
    share = max(_PART_CHARACTERS, _SAMPLE_CHARACTERS // max(len(parts), 1))
    wanted = _SAMPLE_CHARACTERS
    for part in fetched_ahead(parts):
        for text in _beginning(part, fields, min(share, wanted)):
            wanted -= len(text)
            yield text
        if wanted <= 0:
            return


_LONGEST_WORD = 1000
"""Characters. The time to train grows with the square of the longest word of the sample."""
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD}}}(?=\S)")


def _beginning(part: FilePart, fields: Fields, characters: int) -> Iterator[str]:
    for utf8 in read_texts(part, fields):
        if text := utf8.decode()[:characters]:
            characters -= len(text)
            yield _LONG_WORD.sub(r"\g<0>\n", text) if len(text) > _LONGEST_WORD else text
        if characters <= 0:
            return
