"""Trust: whether the fast engine is known to be right about a tokenizer, and the tokenizer.json
that is written for it."""

import importlib.metadata

import msgspec

from tokenfeed.tools.encoding.routes import sort_tokens
from tokenfeed.tools.encoding.shapes import Shape
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.encoding.vocabulary import Unproved, check_vocabulary

__all__ = ["check_tokenizer", "fast_json", "proved_shape"]

_COMPARED = {"gigatoken": ("0.10.",), "tokenizers": ("0.21.", "0.22.", "0.23.")}
"""Versions that were compared: the tables of another may differ."""


def proved_shape(json_bytes: bytes) -> Shape:
    """The shape of a tokenizer.json, if the engines were compared for it.

    Raises:
        Unproved: They were not; the message says what is unusual.
    """
    for package, versions in _COMPARED.items():
        version = importlib.metadata.version(package)
        if not version.startswith(versions):
            raise Unproved(f"{package} {version}")
    return Shape.from_json(json_bytes)


def check_tokenizer(tokenizer: TextTokenizer) -> None:
    """Check what takes too long for every worker to check: vocabulary, merges, added tokens.

    Raises:
        Unproved: The message says what is unusual about them.
    """
    shape = proved_shape(tokenizer.json_bytes)
    model, added = shape.model, shape.added_tokens
    known = tokenizer.tokenizer.get_added_tokens_decoder()
    for token in added:
        if token.id not in known or known[token.id].content != token.content:
            raise Unproved(
                f"the added token {token.content!r}, to which the reference gives another id"
            )
    findable = {token.content for token in added} if model.ignore_merges else None
    check_vocabulary(shape.kind, bytes(model.vocab), bytes(model.merges), findable=findable)


def fast_json(shape: Shape, *, splits_special: bool) -> bytes:
    """A tokenizer.json for the fast engine: without what it needs not know, or would get wrong.

    It always splits at special added tokens and knows no way to leave them as text; without them in
    its file they are text like any other. A normalizer that it need not apply is left out, since
    texts that NFC would change go to the reference.
    """
    kept, _ = sort_tokens(shape, splits_special=splits_special)
    is_sentence_piece = shape.kind == "SentencePiece"
    normalizers = {"type": "Sequence", "normalizers": shape.normalizer}
    pre_tokenizers = {"type": "Sequence", "pretokenizers": shape.pre_tokenizer}
    (pre_tokenizer, *others) = shape.pre_tokenizer or (None,)
    content = {
        "added_tokens": kept,
        "normalizer": normalizers if is_sentence_piece and shape.normalizer else None,
        "pre_tokenizer": pre_tokenizers if others else pre_tokenizer,
        "model": shape.model,
    }
    return msgspec.json.encode(content)
