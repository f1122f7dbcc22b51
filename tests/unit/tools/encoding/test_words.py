"""Words that are encoded once have the ids that they have in a whole text."""

import functools
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from support.tokenizer_shapes import made_texts
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of
from tokenfeed.tools.encoding import words
from tokenfeed.tools.encoding.engines import ReferenceEngine, Unencodable
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.encoding.unigram import MARK, UnigramWords
from tokenfeed.tools.encoding.words import SpacedWords, Words

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[MASK]"]
PARTS = [
    *("[MASK]", "[CLS", "x [PAD]", "Stra\u00dfe", "\u0130", "\u03a3\u03c2", "\u0301", "e\u0301"),
    *("\x00", "\x07", "\u200d", "\u2028", "\ufb01", "\uac01", "\u1112\u1161", "w" * 120, "\u3002"),
    *("\ufffd", "\U0001f44d\U0001f3fd", "\u0e44\u0e17\u0e22", "don't", "1,234.5", "\u00bf\u00a1"),
]
FLAGS = ("clean_text", "handle_chinese_chars", "lowercase")


@functools.cache
def bert(**flags: Any) -> bytes:
    """A small tokenizer of BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**flags)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=SPECIAL, limit_alphabet=150, show_progress=False
    )
    texts = [text.decode() for text in made_texts(random.Random(0), PARTS, 500)]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()


def oracle(json_bytes: bytes, texts: list[bytes], *, splits_special: bool) -> list[list[int]]:
    tokenizer = Tokenizer.from_buffer(json_bytes)
    tokenizer.encode_special_tokens = not splits_special
    return [tokenizer.encode(text.decode(), add_special_tokens=False).ids for text in texts]


def engine(json_bytes: bytes, *, splits_special: bool = False) -> ReferenceEngine:
    return ReferenceEngine(
        TextTokenizer.load(json_bytes, origin="test", splits_special=splits_special)
    )


def unused(texts: list[bytes]) -> Ragged:
    raise AssertionError(texts)


COMBINATIONS = [
    pytest.param(values, accents, marks=[] if number % 5 == 0 else pytest.mark.long)
    for number, (*values, accents) in enumerate(
        itertools.product(*3 * [(False, True)], (None, False, True))
    )
]
"""All values of the flags, and of `strip_accents`."""


@pytest.mark.parametrize(("values", "accents"), COMBINATIONS, ids=str)
def test_words_have_the_ids_of_whole_texts(values: list[bool], accents: bool | None) -> None:
    flags = dict(zip(FLAGS, values, strict=True)) | {"strip_accents": accents}
    json_bytes = bert(**flags)
    for splits_special in (False, True):
        texts = [*made_texts(random.Random(str(flags)), PARTS, 300), b"", b" ", b"\n", b"."]
        made = engine(json_bytes, splits_special=splits_special)
        rows = [row.tolist() for _ in range(2) for row in made.encode(texts).rows()]
        assert rows == 2 * oracle(json_bytes, texts, splits_special=splits_special)


def test_known_words_are_not_encoded_again() -> None:
    tokenizer = TextTokenizer.load(bert(), origin="test")
    asked: list[bytes] = []

    def encode(texts: list[bytes]) -> Ragged:
        asked.extend(texts)
        return ReferenceEngine(tokenizer).encode(texts)

    made = Words.of_tokenizer(tokenizer, encode)
    assert made is not None
    texts = made_texts(random.Random(1), PARTS, 300)
    first, num_asked = made.encode(texts), len(asked)
    assert 0 < num_asked == len(set(asked))
    assert made.encode(texts) == first
    assert len(asked) == num_asked


def test_words_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "CACHE_BYTES", 1000)
    json_bytes = bert()
    made = engine(json_bytes)
    for seed in range(20):
        texts = made_texts(random.Random(seed), PARTS, 30)
        rows = [row.tolist() for row in made.encode(texts).rows()]
        assert rows == oracle(json_bytes, texts, splits_special=False)


NORMALIZERS: dict[str, Any] = {
    "none": None,
    "NFKC": normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    ),
    "stripping": normalizers.Sequence(
        [normalizers.Strip(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), MARK)]
    ),
    "ALBERT": normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    ),
}
SPACED = [*("``", "\u2581", "\u2581 ", "<mask>", "\u0600", "\u0d4e", "\u00b4", "\uff9e", "\ufeff")]
SPACED += ["\u3000\u0301", "\u2581\u0301", "\u00a0\uff9e", "\u0e01\u0e34\u0e49", "\u0301 "]
SPACED += ["\u0928\u094d", "\u041f\u0440", "\r\n", "\t", "\u00a0", "\u3000", "  ", "the", "Dog."]


@functools.cache
def unigram(name: str, scheme: str) -> bytes:
    """A small tokenizer of the kind of T5, XLM-R and ALBERT."""
    tokenizer = Tokenizer(models.Unigram())
    if NORMALIZERS[name] is not None:
        tokenizer.normalizer = NORMALIZERS[name]
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if scheme != "after a split":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=1200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    texts = [text.decode() for text in made_texts(random.Random(0), PARTS + SPACED, 300)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer.to_str().encode()


SCHEMES = ("always", "first", "never", "after a split")
TOKENIZERS = [
    pytest.param(name, scheme, marks=[] if number in (0, 5, 7, 8, 14) else pytest.mark.long)
    for number, (name, scheme) in enumerate(itertools.product(NORMALIZERS, SCHEMES))
    if name != "stripping" or scheme in ("always", "after a split")
]


@pytest.mark.parametrize(("name", "scheme"), TOKENIZERS)
def test_spaced_words_have_the_ids_of_whole_texts(name: str, scheme: str) -> None:
    json_bytes = unigram(name, scheme)
    draw = random.Random(scheme)
    texts = made_texts(draw, PARTS + SPACED, 150)
    spaced = (draw.choices(PARTS + SPACED, k=draw.randint(1, 8)) for _ in range(250))
    texts += [*(" ".join(words).encode() for words in spaced), b"", b" ", b"  ", b" a", b"a "]
    for splits_special in (False, True):
        made = engine(json_bytes, splits_special=splits_special)
        assert isinstance(made._words, SpacedWords)
        rows = [row.tolist() for _ in range(2) for row in made.encode(texts).rows()]
        assert rows == 2 * oracle(json_bytes, texts, splits_special=splits_special)


@pytest.mark.parametrize(
    ("parts", "token"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"normalizer": {"type": "Prepend", "prepend": "a"}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a b"}, "content": ""}}, None),
        ({}, AddedToken("a b")),
        ({}, AddedToken("new", rstrip=True)),
    ],
)
def test_other_unigram_tokenizers_have_no_words(parts: Any, token: AddedToken | None) -> None:
    made = Tokenizer.from_buffer(changed(unigram("none", "always"), **parts))
    if token:
        made.add_tokens([token])
    loaded = TextTokenizer.load(made.to_str().encode(), origin="test")
    assert SpacedWords.of_tokenizer(loaded, unused) is None


NMT = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
JOINING = normalizers.Replace(Regex(" {2,}"), MARK)
SPLITS = pre_tokenizers.WhitespaceSplit()
PIECES = [("<unk>", -9.0), (MARK, -2.0), (MARK + "a", -2.5), ("ab", -2.2), ("...", -2.0)]
PIECES += [(c, -3.0 - n / 100) for n, c in enumerate("abcdefghijklmnopqrstuvwxyz.<>")]
HUGE = [(text, 1e308 if text == "a" else score) for text, score in PIECES]


@pytest.mark.parametrize(
    ("normalizer", "scheme", "splits", "token", "pieces", "text"),
    [
        (NMT, "always", False, AddedToken("\u2026"), PIECES, "a ..."),
        (NMT, "always", False, AddedToken("\ufdfa"), PIECES, "a \ufdfa b"),
        (None, "first", True, None, PIECES, "ab ab abc"),
        (None, "never", True, None, PIECES, "ab ab abc"),
        (normalizers.Replace("\n", "<n>"), "always", True, None, PIECES, "a\nb"),
        (normalizers.Replace("a\tb", "zz"), "always", False, None, PIECES, "a\tb c"),
        (JOINING, "always", False, AddedToken("<m>", lstrip=True), PIECES, "b  <m> b"),
        (JOINING, "always", True, AddedToken("<m>"), PIECES, "b  <m> b  b"),
        (None, "always", False, None, HUGE, "a abc ab"),
        (NMT, "always", False, None, PIECES, "\u00a0\u0e33 < \u0e22\n\u0e33\u0301 b"),
    ],
)
def test_words_that_depend_on_others_have_the_ids_of_whole_texts(
    normalizer: Any,
    scheme: str,
    splits: bool,
    token: AddedToken | None,
    pieces: list[tuple[str, float]],
    text: str,
) -> None:
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    spaced = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    steps = pre_tokenizers.Sequence([SPLITS, spaced]) if splits else spaced
    tokenizer.pre_tokenizer = steps
    if token:
        tokenizer.add_tokens([token])
    json_bytes, texts = tokenizer.to_str().encode(), [text.encode()]
    rows = [row.tolist() for row in engine(json_bytes).encode(texts).rows()]
    assert rows == oracle(json_bytes, texts, splits_special=False)


@pytest.mark.parametrize("seed", range(4))
def test_many_unigram_words_have_the_ids_of_single_words(seed: int) -> None:
    """Also where sums of scores are equal, or differ only by the order of additions."""
    draw = random.Random(seed)
    letters = "ab-(="[: 2 + seed % 4]
    texts = {"".join(draw.choices(letters, k=draw.randint(2, 6))) for _ in range(99)}
    pieces = [MARK, *letters, *sorted(texts), *(MARK + text for text in sorted(texts)[::3])]
    scores = [-1.0, -2.0, -0.1, -0.2, -0.3, -1 / 3, -2 / 3]
    vocabulary = [("<unk>", 0.0), *((piece, draw.choice(scores)) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, False))
    made = UnigramWords.from_tokenizer(tokenizer)
    assert made is not None
    words = [f" {''.join(draw.choices(letters, k=draw.randint(1, 127)))}" for _ in range(2_000)]
    asked = [word.encode() for word in words]
    assert made.can_encode(*flat(asked)).all()
    rows = [row.tolist() for row in made.encode(asked)[0].rows()]
    marked = (word.replace(" ", MARK) for word in words)
    assert rows == [[token.id for token in tokenizer.model.tokenize(word)] for word in marked]
    others = [
        b" ",
        b" a a",
        b"a ",
        b" z",
        " \u00e9".encode(),
        b" " + b"a" * 128,
        b" a\n",
        b" a",
        b"a",
    ]
    assert made.can_encode(*flat(others)).tolist() == [False] * 7 + [True] * 2


def flat(words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return all letters, and where each word begins."""
    return np.frombuffer(b"".join(words), np.uint8), offsets_of(np.array([*map(len, words)]))


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_words_have_the_ids_of_whole_texts(seed: int) -> None:
    """No piece has letters and signs. With some scores, many paths are nearly as good as the best
    one."""
    draw = random.Random(seed)
    alphabets = ["abc", "-=(", "01"]
    texts = {"".join(draw.choices(draw.choice(alphabets), k=draw.randint(1, 5))) for _ in range(60)}
    pieces = sorted(texts | {*"abc-=(01<unk>"})
    close = [-1.0, -0.1, -0.2, -0.3, -1 / 3, -2 / 3]
    scores = close if seed % 2 else [-draw.uniform(1, 9) for _ in range(999)]
    vocabulary = [
        ("<unk>", -9.0),
        (MARK, -2.0),
        *((piece, draw.choice(scores)) for piece in pieces),
    ]
    vocabulary += [(MARK + piece, draw.choice(scores)) for piece in pieces[::3]]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=SCHEMES[seed % 3])
    tokenizer.add_special_tokens(["a=b", AddedToken("(0)", single_word=True)])
    json_bytes = tokenizer.to_str().encode()
    asked: list[bytes] = []
    for splits_special in (False, True):

        def encode(texts: list[bytes], splits_special: bool = splits_special) -> Ragged:
            asked.extend(texts)
            rows = oracle(json_bytes, texts, splits_special=splits_special)
            return Ragged(
                np.array([*itertools.chain(*rows)], np.uint32),
                np.array([*map(len, rows)], np.int64),
            )

        loaded = TextTokenizer.load(json_bytes, origin="test", splits_special=splits_special)
        made = SpacedWords.of_tokenizer(loaded, encode)
        assert made is not None
        parts = [
            *"abc-=(01",
            " ",
            " ",
            "<unk>",
            "a=b",
            "(0)",
            "---",
            "aaaa",
            "0101",
            "z",
            "\u00e9",
            "\n",
        ]
        given = ["".join(draw.choices(parts, k=draw.randint(1, 40))).encode() for _ in range(400)]
        given += [b"", b" ", b"a" + b"-" * 5000, b" " + b"a-" * 3000]
        for few in (given[::2], given[1::2], given):
            rows = [row.tolist() for row in made.encode(few).rows()]
            assert rows == oracle(json_bytes, few, splits_special=splits_special)
    asked.clear()
    made.encode([b"a ab-0", b"a -0ab0"])
    assert {*asked} <= {b"a"}, "words are cut"


def changed(json_bytes: bytes, **parts: Any) -> bytes:
    return json.dumps(json.loads(json_bytes) | parts).encode()


def test_other_tokenizers_have_no_words() -> None:
    json_bytes = bert()
    token = json.loads(json_bytes)["added_tokens"][0]
    new = token | {"id": 600, "content": "new"}
    for other in (
        changed(json_bytes, normalizer={"type": "Lowercase"}),
        changed(json_bytes, normalizer=None),
        changed(json_bytes, pre_tokenizer={"type": "Whitespace"}),
        changed(json_bytes, added_tokens=[new | {"special": False}]),
        changed(json_bytes, added_tokens=[new | {"normalized": True}]),
    ):
        assert Words.of_tokenizer(TextTokenizer.load(other, origin="test"), unused) is None
    assert Words.of_tokenizer(TextTokenizer.load(json_bytes, origin="test"), unused) is not None


def test_words_without_an_unknown_token_name_their_texts() -> None:
    tokenizer = json.loads(bert())
    tokenizer["model"]["unk_token"] = "[NONE]"
    made = engine(json.dumps(tokenizer).encode())
    with pytest.raises(Unencodable) as caught:
        made.encode([b"w0", b"x" * 150, b"a"])
    assert list(caught.value.reasons) == [1]
