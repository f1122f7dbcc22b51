"""The fast engine never gives another id than the reference: by shape, or by route."""

import random
import unicodedata
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from support.programs.character_probe import CHARACTERS, differing_characters
from support.tokenizer_shapes import (
    FLAGS,
    MARK,
    added_tokens,
    differing_texts,
    json_of,
    made_texts,
    shape_parts,
)
from tokenizers import normalizers, pre_tokenizers

from tokenfeed.pipeline.arithmetic import Ragged
from tokenfeed.tools.encoding.audit import (
    adversarial_texts,
    answers_of,
    answers_without_routed,
    differing,
)
from tokenfeed.tools.encoding.engines import (
    EngineUnavailable,
    ReferenceEngine,
    Unencodable,
    fast_engine,
    load_engine,
)
from tokenfeed.tools.encoding.fast import shapes
from tokenfeed.tools.encoding.fast.engine import FastEngine
from tokenfeed.tools.encoding.fast.routes import LETTERS, NFC_LEADS, NUMERALS, SIGNS
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

LLAMA_3 = shapes.split_steps(shapes.REGEXES["Llama 3, OLMo 2"], "Isolated", invert=False)
DEEPSEEK = shapes.split_steps(shapes.REGEXES["DeepSeek V3"], "Isolated", invert=False)
LLAMA_2 = (shapes.PREPEND, shapes.SPACES)
CONTENTS = [
    *("<|end|>", "New York", "snake_case", "ab", "bc", "\n\n", "  ", "|>x", "\u6f22", "N", "end|>"),
    *(f"{MARK}a", " lead", "a\u0301b"),
]


def engines(
    json_bytes: bytes, *, splits_special: bool = False
) -> tuple[FastEngine, ReferenceEngine]:
    made = TextTokenizer.load(json_bytes, origin="test", splits_special=splits_special)
    return fast_engine(made), ReferenceEngine(made)


def random_tokens(draw: random.Random, kind: str) -> list[dict[str, Any]]:
    """Some added tokens, each with some flags."""
    chances = {"special": 0.4, "normalized": 0.4}
    return added_tokens(
        kind,
        {
            content: tuple(flag for flag in FLAGS if draw.random() < chances.get(flag, 0.15))
            for content in draw.sample(CONTENTS, draw.randint(0, 6))
        },
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("rounds", "texts", "least"), [(1, 40, 35), pytest.param(12, 400, 400, marks=pytest.mark.long)]
)
def test_every_shape_gives_the_reference_ids(rounds: int, texts: int, least: int) -> None:
    """With random added tokens."""
    proved = 0
    for kind, normalizer, pre_tokenizer in shape_parts():
        for number in range(rounds):
            draw = random.Random(f"{kind}{normalizer}{pre_tokenizer}{number}")
            tokens = random_tokens(draw, kind)
            options = {"ignore_merges": kind == "byte-level" and draw.random() < 0.5}
            json_bytes = json_of(kind, normalizer, pre_tokenizer, tokens, **options)
            try:
                fast, reference = engines(json_bytes, splits_special=draw.random() < 0.5)
            except EngineUnavailable as failure:
                assert "normalizer would change" in str(failure) or "begins with a space" in str(
                    failure
                )
                continue
            proved += 1
            made = made_texts(draw, [token["content"] for token in tokens], texts)
            found = differing_texts(fast, reference, made)
            assert found == [], (kind, normalizer, pre_tokenizer, tokens)
    assert proved > least


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
def test_an_added_token_with_flags_has_the_reference_ids(kind: str, flag: str) -> None:
    normalizer = LLAMA_2 if kind == "SentencePiece" else ()
    tokens = {f"tok{index}": () for index in range(70)} | {"New York": (flag,), "Yorker": ()}
    json_bytes = json_of(kind, normalizer, None, added_tokens(kind, tokens))
    fast, reference = engines(json_bytes)
    around = ["{}", "x{}y", "I love {} a lot", "{}ers", "a {} ", "{}{}", " {}", "tok7{}tok70"]
    texts = [text.replace("{}", "New York").encode() * times for text in around for times in (1, 3)]
    texts += [b"nothing of it", b"New  York", "New\u2581York".encode(), b"a New York"]
    assert differing_texts(fast, reference, texts) == []


def test_what_the_reference_lets_go_hides_what_overlaps_with_it() -> None:
    tokens = {"<|tool|>": ("special",), "tool|": (), "oo": ("normalized",), "<|x": ("normalized",)}
    json_bytes = json_of("byte-level", (), LLAMA_3, added_tokens("byte-level", tokens))
    for splits_special in (False, True):
        fast, reference = engines(json_bytes, splits_special=splits_special)
        texts = [b"a <|tool|> b", b"tool| x", b"a tool|>", b"<|x<|tool|><|too", b"foo"]
        assert differing_texts(fast, reference, texts) == []


ENDS = sorted({end for pair in (*LETTERS, *SIGNS) for end in pair})


@pytest.mark.parametrize("pre_tokenizer", [(shapes.GPT_2,), LLAMA_3, DEEPSEEK], ids=str)
def test_characters_that_the_engines_classify_differently_go_to_the_reference(
    pre_tokenizer: Any,
) -> None:
    fast, reference = engines(json_of("byte-level", (), pre_tokenizer))
    texts = [f"{around}{chr(end)}{around}".encode() for end in ENDS for around in ("a", " 1", "!")]
    assert differing_texts(fast, reference, texts) == []
    routed = fast.routed(texts)
    sought = ENDS if pre_tokenizer == DEEPSEEK else sorted({e for pair in LETTERS for e in pair})
    assert {ENDS[place // 3] for place in routed} == set(sought)


def _sample() -> list[int]:
    near = {end + step for end in ENDS for step in (-1, 0, 1)}
    return sorted(near | set(random.Random(0).sample(CHARACTERS, 500)) | set(range(0x180)))


PARTS = [
    pytest.param(name, CHARACTERS[place::64] + ENDS, marks=pytest.mark.long)
    for place, name in enumerate(["", *shapes.REGEXES])
]
"""Another part for each: all characters, which take an hour, `character_probe.py` compares."""


@pytest.mark.parametrize(
    ("name", "characters"),
    [*((name, _sample()) for name in ("", "GPT-4o, gpt-oss", "DeepSeek V3")), *PARTS],
    ids=lambda given: given if isinstance(given, str) else str(len(given)),
)
def test_no_other_character_differs(name: str, characters: list[int]) -> None:
    ranges = LETTERS + SIGNS if name == "DeepSeek V3" else LETTERS
    found = set(differing_characters(name, characters))
    assert found
    assert all(any(first <= c <= last for first, last in ranges) for c in found)


def test_a_text_that_nfc_would_change_goes_to_the_reference() -> None:
    fast, reference = engines(json_of("byte-level", (shapes.NFC,), LLAMA_3))
    changed = [
        "e\u0301",
        "\u212b",
        "a\u0323\u0307 q\u0307\u0323",
        "\u1100\u1161",
        "\u0958",
        "\uf900",
    ]
    kept = ["\u00e9", "ascii", "q\u0323\u0307", "\uac00", "\u0939\u093f\u0902", "x\u0301"]
    texts = [text.encode() for text in (*changed, *kept)]
    assert fast.routed(texts).tolist() == list(range(len(changed)))
    assert differing_texts(fast, reference, texts) == []


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.long)])
def test_nfc_does_nothing_to_other_and_to_unassigned_characters(step: int) -> None:
    """The texts are normalized together: nothing composes with the end of a line."""
    texts = []
    for letter in map(chr, CHARACTERS[::step]):
        if letter.encode()[:1] not in NFC_LEADS:
            texts += [letter, f"e{letter}", f"{letter}\u0334", f"\u0345{letter}"]
        if unicodedata.category(letter) == "Cn":
            texts.append(f"e{letter}\u0345{letter}\u0334")
    text = "\n".join(texts)
    assert normalizers.NFC().normalize_str(text) == text


@pytest.mark.parametrize(
    "steps", [steps for steps, proved in shapes.PROVED.items() if proved.engine != steps], ids=str
)
def test_texts_are_cut_at_numbers_as_the_reference_cuts_them(steps: Any) -> None:
    tokens = added_tokens("byte-level", {"ab": (), "7up": (), "a b": ()})
    fast, reference = engines(json_of("byte-level", (), steps, tokens))
    spaces = [" ", "  ", "\t", "\n", "\r\n ", *map(chr, (0xA0, 0x85, 0x2003, 0x2028, 0x3000))]
    numbers = ["1", "12", "345", "6789", "\u00b2", "1\u00bd", "\uff11\uff12", "\u0663", "\u2167"]
    draw = random.Random(4)
    parts = [*spaces, *spaces, *numbers, "a", "ab", "!", "'s", "7up", "a b", "\u6f22", "\u00e9"]
    texts = ["".join(draw.choices(parts, k=draw.randint(0, 9))).encode() for _ in range(3000)]
    assert differing_texts(fast, reference, texts) == []
    ascii_texts = [text for text in texts if text.isascii() and b"7up" not in text]
    assert len(fast.routed(ascii_texts)) < len(ascii_texts) / 4  # of "a b" alone


def test_every_character_that_the_reference_takes_for_a_number_is_a_numeral() -> None:
    letters = [chr(character) for character in CHARACTERS if 0x80 <= character < 0x20000]
    pieces = pre_tokenizers.Digits(True).pre_tokenize_str("a".join(letters))
    found = {piece for piece, _ in pieces if len(piece) == 1} - {"a"}
    assert len(found) > 1800
    assert all(any(a <= ord(c) <= b for a, b in NUMERALS) for c in found)


def test_ids_do_not_depend_on_the_batch_and_keep_their_order() -> None:
    tokens = added_tokens("byte-level", {"New York": ("single_word",)})
    fast, reference = engines(json_of("byte-level", (shapes.NFC,), LLAMA_3, tokens))
    draw = random.Random(1)
    texts = [*made_texts(draw, ["New York"], 200), b"", b"New York", "e\u0301".encode(), b""]
    together, right = fast.encode(texts), reference.encode(texts)
    assert 0 < fast.num_routed < len(texts)
    assert np.array_equal(together.values, right.values)
    assert np.array_equal(together.lengths, right.lengths)
    apart = [fast.encode([text]).values for text in texts]
    assert np.array_equal(np.concatenate(apart), right.values)


def test_a_worker_loads_the_reference_for_the_first_text_that_needs_it() -> None:
    tokens = added_tokens("byte-level", {"New York": ("lstrip",)})
    json_bytes = json_of("byte-level", (), LLAMA_3, tokens)
    with patch.object(TextTokenizer, "load", wraps=TextTokenizer.load) as load:
        fast = load_engine("gigatoken", json_bytes, 3000, splits_special=False)
        fast.encode([b"nothing special", "\u6f22\u5b57".encode()])
        assert load.call_count == 0
        fast.encode([b"  New York"])
        assert load.call_count == 1


def unused(texts: list[bytes]) -> Ragged:
    raise AssertionError(texts)


def test_the_fast_engine_is_not_asked_for_what_it_leaves_to_the_reference() -> None:
    tokens = added_tokens("byte-level", {"New York": ("lstrip",)})
    json_bytes = json_of("byte-level", (), LLAMA_3, tokens)
    fast = FastEngine(json_bytes, 3000, splits_special=False, reference=unused)
    reference = ReferenceEngine(TextTokenizer.load(json_bytes, origin="test"))
    texts = made_texts(random.Random(2), ["New York"], 200)
    answers = answers_without_routed(fast, texts)
    assert 0 < len(answers) < len({*texts})
    expected = answers_of(reference, texts)
    assert differing(answers, expected) == []
    shifted = {text: ids + np.uint16(1) for text, ids in answers.items() if ids is not None}
    assert differing({**shifted}, expected) == [*filter(None, answers)]


def test_a_text_over_which_the_reference_panics_has_a_reason() -> None:
    tokens = added_tokens("byte-level", {"x": ("rstrip",), "\n\n": ("lstrip",)})
    for engine in engines(json_of("byte-level", (), LLAMA_3, tokens)):
        with pytest.raises(Unencodable, match="the tokenizer cannot encode it"):
            engine.encode([b"x", b"x\n\n ", b"y"])
        assert engine.encode([b"x y"]).lengths.tolist() == [2]  # it goes on


def test_the_texts_of_the_audit_have_every_added_token_in_every_neighbourhood() -> None:
    tokens = added_tokens("byte-level", {f"tok{index}en": () for index in range(300)})
    made = TextTokenizer.load(json_of("byte-level", added_tokens=tokens), origin="test")
    texts = adversarial_texts(made)
    for around in ("{}", "x{}y", "1{}2", "{}{}", " {} a", "a {} "):
        sought = around.replace("{}", "tok299en").encode()
        assert any(sought in text for text in texts)
    assert sum(map(len, texts)) < 1 << 20
