"""The audit: does a fast engine give the reference's ids?

This is the second check: the first, of a tokenizer's structure, decides whether the engine is used
at all. The beginning of a run compares texts made for the tokenizer at hand and a sample of the
corpus; later, one document in about a thousand is compared, chosen by a hash of its text. One text
whose ids differ is enough to reject the engine. Workers, who have the fast engine loaded, give its
ids; the process that runs them has the reference loaded, and compares.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged, ceil_div
from tokenfeed.tools.corpus.read_records import fetched_ahead, read_texts
from tokenfeed.tools.corpus.records import Fields
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.engines import (
    Engine,
    EngineFailure,
    FastEngine,
    ReferenceEngine,
    Unencodable,
)
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

__all__ = ["Answers", "Audit", "Questions", "adversarial_texts", "beginning", "sample_texts"]

_TEXTS = 400
_TEXTS_BYTES = 1 << 18
_SAMPLED_PART = 256
"""A small corpus gives one byte in so many, so that its run stays short."""
_PARTS = 16
_LONGEST_BYTES = 1 << 22
"""Longer texts are compared up to here, for which the reference takes a second."""

_ADDED_TOKEN_CHARACTERS = 1 << 18
"""Room for about a thousand added tokens; those beyond stand in the first two texts only."""
_NEIGHBOURS = (
    *("x{}y", "X{}Y", "1{}2", "!{}?", "_{}_", "{}{}", "{}  {}", "\n{}\n", "\t{}\u00a0", "'{}'s"),
    *("\u00e9{}\u6f22", "e{}\u0301", "\u2581{}\u2581"),
)


@dataclass(frozen=True, slots=True)
class Questions:
    """Texts that the fast engine is to encode, as a unit of work that does not count."""

    texts: list[bytes]
    weight_bytes: float = 0.0

    def __str__(self) -> str:
        return "the comparison of the engines"


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine gives for some texts."""

    texts: list[bytes]
    ids: Ragged
    failed: np.ndarray
    """The texts for which it gave none, since it broke down; shape (R,), bool."""
    routed: np.ndarray
    """The texts that it was not asked for, since the reference encodes them; shape (R,), bool."""

    @classmethod
    def from_engine(cls, engine: Engine, texts: list[bytes]) -> Self:
        """Ask an engine; where it breaks down over a batch, text by text."""
        none = np.zeros(len(texts), bool)
        try:
            return cls(texts, engine.encode(texts), none, none)
        except (EngineFailure, Unencodable):
            if len(texts) > 1:
                return cls.joined([cls.from_engine(engine, [text]) for text in texts])
            nothing = Ragged(np.empty(0, np.uint16), np.zeros(1, np.int64))
            return cls(texts, nothing, ~none, none)

    @classmethod
    def from_fast(cls, engine: FastEngine, texts: list[bytes]) -> Self:
        """Ask the fast engine for what it does not leave to the reference.

        To load that, and compare it with itself, would take longer than all the other texts.
        """
        routed = np.isin(np.arange(len(texts)), engine.routed_of(texts))
        pairs = zip(texts, routed, strict=True)
        answers = cls.from_engine(engine, [b"" if is_routed else text for text, is_routed in pairs])
        return cls(texts, answers.ids, answers.failed, routed)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Several, one after the other; none are no texts."""
        return cls(
            [text for part in parts for text in part.texts],
            Ragged(
                np.concatenate([np.empty(0, np.uint16), *(part.ids.values for part in parts)]),
                np.concatenate([np.empty(0, np.int64), *(part.ids.lengths for part in parts)]),
            ),
            np.concatenate([np.empty(0, bool), *(part.failed for part in parts)]),
            np.concatenate([np.empty(0, bool), *(part.routed for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.texts)

    def differing(self, reference: Engine) -> list[bytes]:
        """Return the texts that `reference` can encode and for which it gives other ids."""
        return self.differing_from(Answers.from_engine(reference, self.texts))

    def differing_from(self, right: "Answers") -> list[bytes]:
        """The texts that differ from the right answers to them, as far as there are both."""
        if self.ids == right.ids and not self.failed.any():
            return []
        rows = zip(self.ids.rows(), right.ids.rows(), strict=True)
        same = np.array([np.array_equal(*pair) for pair in rows], bool)
        wrong = ~right.failed & ~self.routed & (self.failed | ~same)
        return [self.texts[place] for place in np.flatnonzero(wrong)]


class Audit:
    """Compares the fast engine with the reference, in the process that runs the workers."""

    def __init__(
        self, tokenizer: TextTokenizer, units: tuple[Unit, ...], fields: Fields, seed: int
    ) -> None:
        """Costs nothing yet."""
        self.audited = 0
        """Texts compared at the beginning of the run."""
        self.differing: list[bytes] = []
        """Compared texts whose ids differed."""
        self._tokenizer = tokenizer
        self._reference = ReferenceEngine(tokenizer)
        self._right = Answers.joined([])
        self._units, self._fields, self._seed = units, fields, seed

    def questions(self) -> Questions:
        """The texts that the fast engine is to encode at the beginning of the run."""
        texts = adversarial_texts(self._tokenizer)
        return Questions(texts + sample_texts(self._units, self._fields, self._seed))

    def expect(self, questions: Questions) -> None:
        """Find the right answers, while those of the fast engine are waited for."""
        self._right = Answers.from_engine(self._reference, questions.texts)

    def begin(self, answers: Answers) -> None:
        """Look at the fast engine's answers to the questions, if there is a fast engine."""
        self.audited = len(answers)
        self.differing = answers.differing_from(self._right) if len(answers) else []

    def kept(self) -> dict[str, Any]:
        """What `begin` has found, as JSON can hold it."""
        return {"audited": self.audited, "differing": [text.decode() for text in self.differing]}

    def take_over(self, kept: dict[str, Any] | None) -> bool:
        """Take over what `begin` has found in another process. Return whether there is anything."""
        if kept is None:
            return False
        self.audited, self.differing = kept["audited"], [*map(str.encode, kept["differing"])]
        return True

    def compare(self, answers: Answers) -> list[bytes]:
        """The texts whose ids differ."""
        return answers.differing(self._reference)


def adversarial_texts(tokenizer: TextTokenizer) -> list[bytes]:
    """Texts of every kind that tokenizers are known to disagree about."""
    texts = [
        "e\u0301 = \u00e9, n\u0303 = \u00f1, a\u0308\u0301\u0327\u0323 o\u0338",  # combining marks
        "\u1ae3\ua7f3\uab69\u0c77\u1b7f",  # of younger Unicode versions than some tables
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f3f3\ufe0f\u200d"
        "\U0001f308 \U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 1\ufe0f\u20e3 \u2764\ufe0f \U0001fae0",
        "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587\u3002\u4e2d\u6587\u5b57\u7b26\uff0c"
        "\u5168\u89d2\uff01\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8 \u314e\u314f\u3134",
        "\u05e2\u05d1\u05e8\u05d9\u05ea \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u200f\u202e"
        "\u0645\u0631\u062d\u0628\u0627\u202c \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
        "".join(map(chr, range(32))) + "\x7f" + "".join(map(chr, range(0x80, 0xA0))),
        "\ufeffbom \u200b zero \u200d width \u2060 joiner \u00ad soft",
        "\ufffd\ufffe\uffff\U0001f9ff\U000e0001\U0010ffff\ue000",  # the ends of planes
        "\ufb01 \ufb02 \u2460 \u00bd \u2121 \u2167 \u338f \u210c \u017f \u1e9e \u0130 \u0131",
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u0937 \u0e44\u0e17\u0e22",
        "w" * 3000,
        "ab1" * 700 + "\u00e9" * 700,
        "0123456789" * 50 + " 1,234,567.89 -1e-10 0x7fff",
        " " * 100 + "a" + "\t" * 50 + "b" + "\n" * 50 + "c\r\n\r\nd \n \n e",
        "\u00a0\u2003\u3000\u2028\u2029\u0085x\u000b\u000cy",  # white space of every kind
        "don't I'll WE'VE they'd it's 'S 'tis rock'n'roll \u2019s",
        'snake_case camelCase HTTPServer v1.2.3-rc+build a/b\\c <p class="x">&amp;</p>',
        "def f(x):\n    return {'a': [1, 2, 3]}  # TODO\n\n\n",
        *("ends in space ", " ", "", "\n", "a", "a\n\t", "\n \t\n ", "\t \u00a0"),
        *("1", "12", "123", "1234", "12345", "1234567", "\u0661\u0662\u0663\u0664 \u00b2\u00b3"),
        "I'S he'\u017f YOU'RE we'Ve i'M '\u2019D''ll !'s 1's \u00e9's '\u00e9 's't'rest'more",
        "ABCdef AbC abC \u00c9\u00e9\u01c5\u02b0\u05d0\u0301",
        "\u01c5a A\u0301a x\u0301\u0301 !\u0301 1\u0301",
        "a//b/\r\n/\n(( \n))\r!!\n\n?  \r\n  x \r y\n/",
        *map(
            "".join,
            itertools.product(("a", " ", "  ", "\n"), ("\u2581", " \u2581", "\u2581 "), ("", "b")),
        ),
        *_added_token_texts(tokenizer),
    ]
    draw = random.Random(0)
    for start, stop in ((0x20, 0x7F), (0xA0, 0x2000), (0x2000, 0xD800), (0x10000, 0x20000)):
        texts += ["".join(chr(draw.randrange(start, stop)) for _ in range(40)) for _ in range(20)]
    return [text.encode() for text in texts]


def _added_token_texts(tokenizer: TextTokenizer) -> list[str]:
    """Every added token in every neighbourhood that its flags tell apart, as far as room is."""
    added = [token.content for token in tokenizer.tokenizer.get_added_tokens_decoder().values()]
    texts = ["".join(added), " ".join(f"x{token}y" for token in added)]
    room = _ADDED_TOKEN_CHARACTERS
    for content in added:
        if room < 0:
            break
        inner = " ".join(around.replace("{}", content) for around in _NEIGHBOURS)
        texts += [content, f" {content} a", f"a {content} ", f"\n{content}", inner]
        room -= 5 * len(content) + len(inner)
    return texts


def sample_texts(units: tuple[Unit, ...], fields: Fields, seed: int) -> list[bytes]:
    """Some hundred texts from all over the corpus, 256 kB at most: beginnings, a few as a whole."""
    parts = [part for unit in units for part in unit.parts]
    if not parts:
        return []
    corpus_bytes = int(sum(unit.weight_bytes for unit in units))
    room = min(_TEXTS_BYTES, corpus_bytes // _SAMPLED_PART)
    random.Random(seed).shuffle(parts)
    each = ceil_div(_TEXTS, min(len(parts), _PARTS))
    longest, left = max(1, room // 2 // _TEXTS), room // 2
    texts: list[bytes] = []
    for part in fetched_ahead(parts):
        for text in islice(read_texts(part, fields), each):
            is_whole = longest < len(text) <= left
            left -= len(text) if is_whole else 0
            texts.append(text if is_whole else beginning(text, longest))
        if len(texts) >= _TEXTS:
            break
    return texts


def beginning(text: bytes, longest: int = _LONGEST_BYTES) -> bytes:
    """As many whole characters of a text as fit into `longest` bytes."""
    return text if len(text) <= longest else text[:longest].decode(errors="ignore").encode()
