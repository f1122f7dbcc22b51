"""Words that are encoded once have the ids that they have in a whole text."""

import functools
import itertools
import json
import random
from typing import Any

import pytest
from support.tokenizer_shapes import made_texts
from tokenizers import (
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.tools.encoding.engines import ReferenceEngine, Unencodable
from tokenfeed.tools.encoding.fast import words
from tokenfeed.tools.encoding.fast.words import Words
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

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


def of_tokenizer(tokenizer: TextTokenizer, encode: words.Encode) -> Words | None:
    special = tokenizer.splits_special
    return Words.of_tokenizer(tokenizer.tokenizer, encode, splits_special=special)


def test_known_words_are_not_encoded_again() -> None:
    tokenizer = TextTokenizer.load(bert(), origin="test")
    asked: list[bytes] = []

    def encode(texts: list[bytes]) -> Ragged:
        asked.extend(texts)
        return ReferenceEngine(tokenizer).encode(texts)

    made = of_tokenizer(tokenizer, encode)
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
        assert of_tokenizer(TextTokenizer.load(other, origin="test"), unused) is None
    assert of_tokenizer(TextTokenizer.load(json_bytes, origin="test"), unused) is not None


def test_words_without_an_unknown_token_name_their_texts() -> None:
    tokenizer = json.loads(bert())
    tokenizer["model"]["unk_token"] = "[NONE]"
    made = engine(json.dumps(tokenizer).encode())
    with pytest.raises(Unencodable, match="the tokenizer cannot encode it"):
        made.encode([b"w0", b"x" * 150, b"a"])
