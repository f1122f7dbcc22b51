"""Small tokenizers of every shape in the table, and texts made to trip an engine over each."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, trainers

from tokenfeed.tools.encoding.audit import answers_of, differing
from tokenfeed.tools.encoding.engines import Engine
from tokenfeed.tools.encoding.fast import shapes
from tokenfeed.tools.encoding.fast.shapes import byte_letters

MARK = "\u2581"
FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")

SENTENCES = [
    "The quick brown fox doesn't jump over 1234567 lazy dogs; HTTPServer's camelCase snake_case.\n",
    "na\u00efve \u00dcber stra\u00dfe \u010cesky \u6f22\u5b57 \u304b\u306a x = f(y)\r\n\t",
    "\ud55c\uad6d\uc5b4 ",
    "aaa bb ABBA lololol 000 ...  !!! they'll WE'VE it's <p class=\"x\">&amp;</p>\n\n",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0645\u0631\u062d\u0628\u0627 ",
    "\u0e44\u0e17\u0e22 \U0001f44d\U0001f3fd e\u0301 ",
]
_SPACES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\n\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u0085",
    "\x0b",
    " \n",
]
_ENDINGS = ["'s", "'S", "'ll", "'RE", "'ve", "'d", "\u2019s", "'\u017f", "n't", "'", "''s"]
_PLANES = [
    (0x20, 0x7F),
    (0xA0, 0x180),
    (0x180, 0x600),
    (0x600, 0x2000),
    (0x2000, 0x3100),
    (0x4E00, 0x9FFF),
]
_PLANES += [
    (0xA000, 0xD800),
    (0xE000, 0x10000),
    (0x10000, 0x20000),
    (0x1F300, 0x1FB00),
    (0x20000, 0x110000),
]


def shape_parts() -> Iterator[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """Kind, normalizer and pre-tokenizer of every shape in the table."""
    for pre_tokenizer, proved in sorted(shapes.PROVED.items(), key=str):
        for normalizer in proved.normalizers:
            yield proved.kind, normalizer, pre_tokenizer


def json_of(
    kind: str,
    normalizer: tuple[Any, ...] = (),
    pre_tokenizer: tuple[Any, ...] | None = None,
    added_tokens: list[dict[str, Any]] | None = None,
    **options: Any,
) -> bytes:
    """A tokenizer.json; `options` are of its model, or replace its top-level parts."""
    if pre_tokenizer is None:
        pre_tokenizer = (shapes.GPT_2,) if kind == "byte-level" else ()
    model = trained_model(kind) | {
        name: options.pop(name) for name in list(options) if name in MODEL_OPTIONS
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens or [],
        "normalizer": _sequence("normalizers", normalizer),
        "pre_tokenizer": _sequence("pretokenizers", pre_tokenizer),
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return json.dumps(content | options).encode()


MODEL_OPTIONS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"),
    *("byte_fallback", "ignore_merges", "vocab", "merges", "type"),
)


def _sequence(name: str, steps: tuple[Any, ...]) -> dict[str, Any] | None:
    made = [*map(json.loads, steps)]
    if len(made) < 2:
        return made[0] if made else None
    return {"type": "Sequence", name: made}


_models: dict[str, dict[str, Any]] = {}


def trained_model(kind: str) -> dict[str, Any]:
    """A small BPE over a few sentences; merges as they come from the library."""
    if kind not in _models:
        tokenizer = Tokenizer(models.BPE(byte_fallback=kind != "byte-level", unk_token=None))
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        letters = byte_letters()
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            initial_alphabet=sorted(letters.values()) if kind == "byte-level" else [],
            special_tokens=[] if kind == "byte-level" else ["<unk>", *byte_tokens],
            limit_alphabet=1000 if kind == "byte-level" else 60,
            show_progress=False,
        )
        tokenizer.train_from_iterator(_units(kind), trainer)
        _models[kind] = json.loads(tokenizer.to_str())["model"]
        _models[kind]["unk_token"] = None if kind == "byte-level" else "<unk>"
    return _models[kind]


def _units(kind: str) -> Iterator[str]:
    letters = byte_letters()
    for sentence in SENTENCES * 10:
        if kind == "byte-level":
            yield from (
                "".join(letters[b] for b in f" {word}".encode()) for word in sentence.split()
            )
            yield "".join(letters[b] for b in sentence.encode() if b < 33)
        else:
            yield from (f"{MARK}{word}" for word in sentence.split())


def added_tokens(kind: str, tokens: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """Added tokens with their flags, and the ids that the reference gives them."""
    vocab = trained_model(kind)["vocab"]
    others = itertools.count(max(vocab.values()) + 1)
    return [
        {"id": vocab[content] if content in vocab else next(others), "content": content}
        | {flag: flag in flags for flag in FLAGS}
        for content, flags in tokens.items()
    ]


def made_texts(draw: random.Random, contents: list[str], count: int) -> list[bytes]:
    """Texts of everything that regexes, normalizers and added tokens tell apart, in any order."""
    return [_made_text(draw, contents).encode(errors="ignore") for _ in range(count)]


def _made_text(draw: random.Random, contents: list[str]) -> str:
    pieces = []
    for _ in range(draw.choice([1, 2, 3, 5, 8, 13, 30])):
        kind = draw.randrange(10)
        if kind < 3 and contents:
            content = draw.choice(contents)
            cut = draw.randrange(len(content) + 1)
            pieces.append(draw.choice([content, content, content[:cut], content[cut:]]))
        elif kind < 5:
            pieces.append(draw.choice(_SPACES))
        elif kind == 5:
            pieces.append(draw.choice(_ENDINGS))
        elif kind == 6:
            pieces.append(draw.choice(" \n0a.=-\u2581\u0301\u6f22") * draw.randint(1, 40))
        elif kind == 7:
            first, last = draw.choice(_PLANES)
            pieces += [chr(draw.randrange(first, last)) for _ in range(draw.randint(1, 3))]
        else:
            words = draw.choice(SENTENCES).split(" ")
            pieces.append(draw.choice(words))
    return "".join(pieces)


def differing_texts(engine: Engine, reference: Engine, texts: list[bytes]) -> list[bytes]:
    """Return the texts to which two engines give other ids."""
    return differing(answers_of(engine, texts), answers_of(reference, texts))
