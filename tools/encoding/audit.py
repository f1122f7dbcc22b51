"""The audit: compare the ids of the fast engine with the ids of the reference.

The audit is the second check. The first check, of the tokenizer's structure, decides whether the
engine is used at all. At its start, a run compares generated texts and a sample of the corpus.
Later, it compares one document in about a thousand, chosen by a hash of the text. One text with
other ids is enough to reject the engine. Workers encode with the fast engine. The main process
encodes with the reference, and compares.
"""

import itertools
import random
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.tools.corpus.records import Fields
from tokenfeed.tools.corpus.units import Unit, fetched_ahead, read_texts
from tokenfeed.tools.encoding.engines import Engine, ReferenceEngine, Unencodable
from tokenfeed.tools.encoding.fast.engine import EngineFailure, FastEngine
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

_TEXTS = 400
_TEXTS_BYTES = 1 << 18
_SAMPLED_PART = 256
"""One byte in this many is compared, so that a run over a small corpus stays short."""
_PARTS = 16
_LONGEST_BYTES = 1 << 22
"""Bytes of a text that are compared. The reference takes a second for them."""

_ADDED_TOKEN_CHARACTERS = 1 << 18
"""Enough for about a thousand added tokens. Further tokens are only in the first two texts."""
_NEIGHBOURS = (
    *("x{}y", "X{}Y", "1{}2", "!{}?", "_{}_", "{}{}", "{}  {}", "\n{}\n", "\t{}\u00a0", "'{}'s"),
    *("\u00e9{}\u6f22", "e{}\u0301", "\u2581{}\u2581"),
)


@dataclass(frozen=True, slots=True)
class Questions:
    """Texts that the fast engine encodes for the comparison: a unit of work without progress."""

    texts: list[bytes]
    weight_bytes: float = 0.0

    def __str__(self) -> str:
        return "the comparison of the engines"


Answers = dict[bytes, np.ndarray | None]
"""The ids that an engine found for texts; None for a text on which it failed."""


def answers_of(engine: Engine, texts: list[bytes]) -> Answers:
    """Encode texts by an engine, one by one if the engine fails on the batch."""
    try:
        return dict(zip(texts, engine.encode(texts).rows(), strict=True))
    except (EngineFailure, Unencodable):
        if len(texts) == 1:
            return {texts[0]: None}
        return {text: answers_of(engine, [text])[text] for text in texts}


def answers_without_routed(engine: FastEngine, texts: list[bytes]) -> Answers:
    """Encode the texts that the fast engine does not leave to the reference.

    Loading the reference in a worker would take longer than encoding all other texts.
    """
    routed = {*engine.routed(texts).tolist()}
    return answers_of(engine, [text for place, text in enumerate(texts) if place not in routed])


def differing(answers: Answers, expected: Answers) -> list[bytes]:
    """Return the texts with other ids than expected, except where the reference failed."""
    return [
        text
        for text, ids in answers.items()
        if (wanted := expected[text]) is not None
        and (ids is None or not np.array_equal(ids, wanted))
    ]


class Audit:
    """Compares the fast engine with the reference, in the process that runs the workers."""

    def __init__(
        self, tokenizer: TextTokenizer, units: tuple[Unit, ...], fields: Fields, seed: int
    ) -> None:
        """Prepare the comparison. Nothing is encoded yet."""
        self.audited = 0
        """Texts compared at the beginning of the run."""
        self.differing: list[bytes] = []
        """Compared texts whose ids differed."""
        self._tokenizer = tokenizer
        self._expected: Answers = {}
        self._units, self._fields, self._seed = units, fields, seed

    @cached_property
    def _reference(self) -> ReferenceEngine:
        return ReferenceEngine(self._tokenizer)  # takes 0.1 s, and is not always needed

    def questions(self) -> Questions:
        """Return the texts that the fast engine encodes at the start of the run."""
        texts = adversarial_texts(self._tokenizer)
        return Questions(texts + sample_texts(self._units, self._fields, self._seed))

    def expect(self, questions: Questions) -> None:
        """Encode the questions by the reference, while a worker encodes them by the fast engine."""
        self._expected = answers_of(self._reference, questions.texts)

    def begin(self, answers: Answers) -> None:
        """Compare the answers of the fast engine, if there is one."""
        self.audited, self.differing = len(answers), differing(answers, self._expected)

    def compare(self, answers: Answers) -> list[bytes]:
        """Return the texts whose ids differ from the ids of the reference."""
        return differing(answers, answers_of(self._reference, [*answers])) if answers else []


def adversarial_texts(tokenizer: TextTokenizer) -> list[bytes]:
    """Return texts of every kind on which tokenizers are known to differ."""
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
    """Return every added token with every kind of neighbour, up to a total length."""
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
    """Return the beginnings of hundreds of texts from all parts of the corpus, at most 256 kB."""
    parts = [part for unit in units for part in unit.parts]
    if not parts:
        return []
    corpus_bytes = int(sum(unit.weight_bytes for unit in units))
    longest = max(1, min(_TEXTS_BYTES, corpus_bytes // _SAMPLED_PART) // _TEXTS)
    random.Random(seed).shuffle(parts)
    each = ceil_div(_TEXTS, min(len(parts), _PARTS))
    texts: list[bytes] = []
    for part in fetched_ahead(parts):
        texts += [beginning(text, longest) for text in islice(read_texts(part, fields), each)]
        if len(texts) >= _TEXTS:
            break
    return texts


def beginning(text: bytes, longest: int = _LONGEST_BYTES) -> bytes:
    """Return the whole characters in the first `longest` bytes of a text."""
    return text if len(text) <= longest else text[:longest].decode(errors="ignore").encode()
