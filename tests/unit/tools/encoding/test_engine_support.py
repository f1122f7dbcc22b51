"""Whatever about a tokenizer was never compared is left to the reference, and named."""

import json
from typing import Any

import pytest
from support.tokenizer_shapes import FLAGS, json_of, trained_model

from tokenfeed.tools.encoding.engines import fast_engine
from tokenfeed.tools.encoding.fast import shapes
from tokenfeed.tools.encoding.fast.engine import EngineUnavailable, EngineUntested
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

LLAMA_2 = (shapes.PREPEND, shapes.SPACES)


def options(**model: Any) -> bytes:
    return json_of("byte-level", **model)


def _with(kind: str, **parts: Any) -> bytes:
    return json.dumps(json.loads(json_of(kind)) | parts).encode()


VOCAB = trained_model("byte-level")["vocab"]
PIECES = trained_model("SentencePiece")["vocab"]
MERGES = trained_model("byte-level")["merges"]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BARE = BYTES | {"use_regex": True}


def _split(regex: str, **changes: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return split | changes


def _steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


KNOWN = shapes.REGEXES["Llama 3, OLMo 2"][0]
TOKEN = {"id": len(VOCAB), "content": "tok"} | dict.fromkeys(FLAGS, False)
UNPROVED = {
    "Digits": _with(
        "byte-level",
        pre_tokenizer=_steps({"type": "Digits", "individual_digits": True}, _split(KNOWN), BYTES),
    ),
    "digits in groups": _with(
        "byte-level", pre_tokenizer=_steps({"type": "Digits", "individual_digits": False}, BARE)
    ),
    "steps out of order": _with("byte-level", pre_tokenizer=_steps(BYTES, _split(KNOWN))),
    "a behavior": _with(
        "byte-level", pre_tokenizer=_steps(_split(KNOWN, behavior="MergedWithNext"), BYTES)
    ),
    "inverted": _with("byte-level", pre_tokenizer=_steps(_split(KNOWN, invert=True), BYTES)),
    "two regexes": _with("byte-level", pre_tokenizer=_steps(_split(KNOWN), BARE)),
    "bytes without a regex": _with("byte-level", pre_tokenizer=BYTES),
    "no pre-tokenizer": _with("byte-level", pre_tokenizer=None),
    "an unknown key of a step": _with("byte-level", pre_tokenizer=BARE | {"new": 1}),
    "NFKC": _with("byte-level", normalizer={"type": "NFKC"}),
    "Lowercase": _with("byte-level", normalizer={"type": "Lowercase"}),
    "dropout": options(dropout=0.5),
    "continuing_subword_prefix": options(continuing_subword_prefix="##", merges=[]),
    "end_of_word_suffix": options(end_of_word_suffix="</w>", merges=[]),
    "the same id twice": options(vocab=VOCAB | {"zqzq": max(VOCAB.values())}),
    "the same bytes twice": options(
        vocab=VOCAB | {"\u6f22": len(VOCAB), "\u00e6\u00bc\u00a2": 5000}
    ),
    "a bare space": options(vocab=VOCAB | {" ": len(VOCAB)}),
    "the same merge twice": options(merges=[*MERGES, MERGES[0]]),
    "a raw word that is not merged": options(
        vocab=VOCAB | {"\u6f22\u6f22": len(VOCAB)}, ignore_merges=True
    ),
    "an added token of great length": _with(
        "byte-level", added_tokens=[TOKEN | {"content": "x" * 300}]
    ),
    "another id in the file": _with("byte-level", added_tokens=[TOKEN | {"id": 5000}]),
    "ignore_merges of pieces": json_of("SentencePiece", LLAMA_2, ignore_merges=True),
    "pieces without spaces": json_of("SentencePiece"),
    "almost a byte": json_of("SentencePiece", LLAMA_2, vocab=PIECES | {"<0x+f>": 5000}),
    "no piece for a byte": json_of(
        "SentencePiece",
        LLAMA_2,
        vocab={token: PIECES[token] for token in PIECES if token != "<0xE2>"},
    ),
}


@pytest.mark.parametrize("trait", UNPROVED)
def test_what_was_never_compared_is_left_to_the_reference(trait: str) -> None:
    made = TextTokenizer.load(UNPROVED[trait], origin="test")
    with pytest.raises(EngineUnavailable, match="never compared"):
        fast_engine(made)


def test_a_part_that_nobody_knows_is_not_ignored() -> None:
    content = json.loads(json_of("byte-level"))
    for changed in (
        content | {"post_normalizer": None},
        content | {"model": content["model"] | {"new": None}},
        content | {"added_tokens": [{"id": 1, "content": "a"}]},
        content | {"pre_tokenizer": BARE | {"new": 1}},
        content | {"pre_tokenizer": _steps(BARE) | {"new": 1}},
        content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [None, 5]}},
        content | {"version": "2.0"},
    ):
        with pytest.raises(shapes.Unproved):
            shapes.Shape.from_json(json.dumps(changed).encode())


def test_the_message_names_the_trait() -> None:
    made = TextTokenizer.load(UNPROVED["Digits"], origin="test")
    with pytest.raises(EngineUnavailable, match=r'pre-tokenizer.*"Digits"'):
        fast_engine(made)


def test_versions_that_were_never_compared_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TextTokenizer.load(json_of("byte-level"), origin="test")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.0")
    with pytest.raises(EngineUntested, match=r"gigatoken 0\.99\.0: `pip install 'gigatoken>=0"):
        fast_engine(made)


def test_text_that_ends_in_white_space_after_a_line_differs_with_gpt_4s_regex() -> None:
    import gigatoken
    from tokenizers import Tokenizer

    gpt_4 = KNOWN.replace(r"\s*[\r\n]+", r"\s*[\r\n]")
    json_bytes = _with("byte-level", pre_tokenizer=_steps(_split(gpt_4), BYTES))
    right = Tokenizer.from_buffer(json_bytes).encode("a\n\t").ids
    bare = gigatoken.Tokenizer.from_json(json_bytes).encode_batch([b"a\n\t"], parallel=False)
    assert bare.to_list()[0] != right
    made = TextTokenizer.load(json_bytes, origin="test")
    assert fast_engine(made).encode([b"a\n\t"]).values.tolist() == right
