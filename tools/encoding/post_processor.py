"""Templates: what a tokenizer puts around a text or a pair, read from its post-processor."""

from dataclasses import dataclass
from typing import Any

import msgspec

from tokenfeed.pipeline.errors import TokenizerError

__all__ = ["Piece", "read_template"]

_ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


@dataclass(frozen=True, slots=True)
class Piece:
    """Special tokens, or the place of a text."""

    type: int
    """What `token_type_ids` has there."""
    ids: tuple[int, ...] = ()
    text: int | None = None
    """0 for the first text, 1 for the second; None for special tokens."""


class _File(msgspec.Struct):
    """What is decoded of a tokenizer.json: the vocabulary takes a hundred times as long."""

    post_processor: dict[str, Any] | None = None


def read_template(json_bytes: bytes, num_texts: int) -> list[Piece]:
    """What stands around one or two texts, the texts among it in their order.

    Raises:
        TokenizerError: A text is missing, there twice, or not in its order.
    """
    found = _adding(msgspec.json.decode(json_bytes, type=_File).post_processor)
    if len(found) > 1:
        raise TokenizerError(
            "the tokenizer's post_processor has more than one template. Leave one of them there."
        )
    processor = found[0] if found else {"type": None}
    if processor["type"] == "TemplateProcessing":
        pieces = _read(processor, "pair" if num_texts > 1 else "single")
    elif processor["type"] in _ADDING:
        pieces = _bert(processor, num_texts)
    else:
        pieces = [Piece(type=text, text=text) for text in range(num_texts)]
    texts = [piece.text for piece in pieces if piece.text is not None]
    if texts != list(range(num_texts)):
        order = " ".join("AB"[text] for text in texts) or "none of them"
        raise TokenizerError(
            f"the tokenizer's template for {num_texts} text(s) has {order} where "
            f"{'A B' if num_texts > 1 else 'A'} can be understood: change its post_processor."
        )
    return pieces


def _adding(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The processors that add tokens, those of a sequence too; others touch offsets alone."""
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [found for inner in processor["processors"] for found in _adding(inner)]
    return [processor] if processor["type"] in _ADDING else []


def _read(processor: dict[str, Any], name: str) -> list[Piece]:
    pieces = []
    for part in processor[name]:
        ((kind, piece),) = part.items()
        if kind == "Sequence":
            pieces.append(Piece(piece["type_id"], text="AB".index(piece["id"])))
        else:
            ids = processor["special_tokens"][piece["id"]]["ids"]
            pieces.append(Piece(piece["type_id"], tuple(ids)))
    return pieces


def _bert(processor: dict[str, Any], num_texts: int) -> list[Piece]:
    """BERT's [CLS] A [SEP] B [SEP], and RoBERTa's <s> A </s></s> B </s>, which has one type."""
    (_, first), (_, last) = processor["cls"], processor["sep"]
    is_bert = processor["type"] == "BertProcessing"
    pieces = [Piece(0, (first,)), Piece(0, text=0), Piece(0, (last,))]
    if num_texts > 1:
        kind = 1 if is_bert else 0
        between = [] if is_bert else [Piece(0, (last,))]
        pieces += [*between, Piece(kind, text=1), Piece(kind, (last,))]
    return pieces
