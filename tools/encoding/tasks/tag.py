"""Tagging: words and their tags become ids and a label for each token."""

from dataclasses import replace
from itertools import chain
from typing import ClassVar

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS, LABELS
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.encoding.tasks.base import SHOWN, Encode, Samples, TaskEncoder, Values
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


class TagEncoder(TaskEncoder):
    """Classification of words. The first token of a word has the tag of the word, the other tokens
    have no tag."""

    option = "tag"
    record = "words and their tags"
    kinds: ClassVar = {"tokens": FieldKind.WORDS, "tags": FieldKind.LABELS}

    def template(self, tokenizer: TextTokenizer) -> Template:
        """Return the special tokens around the words of a row, and the text before each word."""
        return replace(super().template(tokenizer), before_word=tokenizer.before_word)

    def texts(self, values: Values) -> list[bytes]:
        """Return the words, joined."""
        return list(map(b" ".join, values["tokens"]))

    def unusable(self, values: Values) -> dict[int, str]:
        """Return records with more or fewer tags than words, or with a tag without a number."""
        pairs = zip(values["tokens"], values["tags"], strict=True)
        return super().unusable(values) | {
            index: f"{len(words):,} word(s), but {len(tags):,} tag(s)"
            for index, (words, tags) in enumerate(pairs)
            if len(words) != len(tags)
        }

    def encode(self, values: Values, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. A word without a token would lose its tag, and spans beside
        it would merge: such a record is unusable."""
        flat = chain.from_iterable(values["tokens"])
        words = encode([word and template.before_word + word for word in flat])
        tags = chain.from_iterable(values["tags"])
        numbers = np.fromiter(map(self.labels.numbers.__getitem__, tags), np.int16, len(words))
        has_tokens = words.lengths > 0
        labels = np.full(len(words.values), IGNORED, np.int16)
        labels[words.offsets[:-1][has_tokens]] = numbers[has_tokens]
        counts = np.fromiter(map(len, values["tokens"]), np.int64)
        ends = np.cumsum(counts)
        lengths = np.diff(words.offsets[np.append(0, ends)])
        row = np.repeat(np.arange(len(counts)), counts)
        without = np.unique(row[~has_tokens & (lengths[row] > 0)])
        unusable = {
            r: _lost_tag(values["tokens"][r], has_tokens[ends[r] - counts[r] : ends[r]])
            for r in without.tolist()
        }
        has_text = lengths > 0
        has_text[without] = False
        return Samples(
            {
                INPUT_IDS: template.around(Ragged(words.values, lengths)),
                LABELS: template.labels_around(Ragged(labels, lengths)),
            },
            {},
            has_text,
            unusable,
        )


def _lost_tag(words: list[bytes], has_tokens: np.ndarray) -> str:
    """Return why a record is unusable: its first word without a token has a tag that no token can
    carry."""
    place = int(np.argmin(has_tokens))
    return f"word {place + 1:,} ({words[place].decode()[:SHOWN]!r}) has no token for its tag"
