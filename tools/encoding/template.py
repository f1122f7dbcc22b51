"""The template of a tokenizer: special tokens around texts, as in `[CLS] A [SEP] B [SEP]`.

The template is read from the post-processor in tokenizer.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged, join
from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

__all__ = ["Piece", "Template", "read_template"]

_ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


@dataclass(frozen=True, slots=True)
class Piece:
    """One element of a template: special tokens or a text."""

    type: int
    """The value of `token_type_ids`."""
    ids: tuple[int, ...] = ()
    text: int | None = None
    """0 for the first text, 1 for the second; None for special tokens."""


class _TemplateFile(msgspec.Struct):
    """The part of a tokenizer.json with the template. The rest would take 100 times as long."""

    post_processor: dict[str, Any] | None = None


def read_template(json_bytes: bytes, num_texts: int) -> list[Piece]:
    """Return the elements of the template for one or two texts.

    Raises:
        TokenizerError: The template lacks a text, or has it twice or in another order.
    """
    found = _adding(msgspec.json.decode(json_bytes, type=_TemplateFile).post_processor)
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
    """Return the post-processors that add tokens, flattened. The others change offsets only."""
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
    """Return BERT's template [CLS] A [SEP] B [SEP] or RoBERTa's <s> A </s></s> B </s>."""
    (_, first), (_, last) = processor["cls"], processor["sep"]
    is_bert = processor["type"] == "BertProcessing"
    pieces = [Piece(0, (first,)), Piece(0, text=0), Piece(0, (last,))]
    if num_texts > 1:
        kind = 1 if is_bert else 0
        between = [] if is_bert else [Piece(0, (last,))]
        pieces += [*between, Piece(kind, text=1), Piece(kind, (last,))]
    return pieces


_LARGEST_TYPE = 255
"""`token_type_ids` is stored as uint8."""


@dataclass(frozen=True, slots=True)
class Template:
    """The special ids before, between and after the texts of a row, with their types."""

    ids: tuple[np.ndarray, ...]
    """Arrays of shape (S,), one more than texts. An array may be empty."""
    types: tuple[np.ndarray, ...]
    """The `token_type_ids` of `ids`, in the same shapes."""
    text_types: tuple[int, ...]
    """The type of each text. Most templates have 0 and 1."""
    before_word: bytes = b""
    """See `TextTokenizer.before_word`."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: TextTokenizer, *, num_texts: int, special: bool, end_id: int | None
    ) -> "Template":
        """Return the template for rows of one or two texts.

        Args:
            tokenizer: The tokenizer with the template.
            num_texts: 1 or 2.
            special: Whether rows have the special tokens of the tokenizer's template.
            end_id: The last id of a row, added if the template does not end with it. None: no id.
        """
        ids, types, text_types = _template(tokenizer.json_bytes, num_texts, special)
        largest = max((id_ for part in ids for id_ in part), default=0)
        if largest >= (size := tokenizer.vocabulary_size):
            raise TokenizerError(
                f"the tokenizer's template has the id {largest:,}, expected ids below {size:,}, "
                "the size of its vocabulary. Correct the post_processor of tokenizer.json, or "
                "leave out --add-special-tokens."
            )
        if special and not any(ids):
            raise TokenizerError(
                f"`--add-special-tokens`: the tokenizer has no template for {num_texts} text(s). "
                "Leave it out."
            )
        if end_id is not None and ids[-1][-1:] != [end_id]:
            ids[-1].append(end_id)
            types[-1].append(text_types[-1])
        return cls(
            tuple(np.array(part, np.uint32) for part in ids),
            tuple(np.array(part, np.uint8) for part in types),
            tuple(text_types),
        )

    def around(self, *texts: Ragged) -> Ragged:
        """Return the ids of rows, given the ids of their texts."""
        return join(_alternate(self.ids, texts))

    def types_around(self, *texts: Ragged) -> Ragged:
        """Return the type of each token of these rows, uint8."""
        types = [
            Ragged(np.full(len(text.values), kind, np.uint8), text.lengths)
            for kind, text in zip(self.text_types, texts, strict=True)
        ]
        return join(_alternate(self.types, types))

    def labels_around(self, labels: Ragged) -> Ragged:
        """Return the labels of the tokens of rows with one text. Special tokens have no label."""
        return join(_alternate([np.full(len(part), IGNORED) for part in self.ids], [labels]))


def _alternate(around: Sequence[np.ndarray], texts: Sequence[Ragged]) -> list[Ragged | np.ndarray]:
    pieces: list[Ragged | np.ndarray] = [around[0]]
    for text, after in zip(texts, around[1:], strict=True):
        pieces += [text, after]
    return pieces


def _template(
    json_bytes: bytes, num_texts: int, special: bool
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Return the special ids and their types, and the types of the texts."""
    read_template(json_bytes, 1)  # the engines apply it to every text, if without its tokens
    ids: list[list[int]] = [[]]
    types: list[list[int]] = [[]]
    text_types: list[int] = []
    for piece in read_template(json_bytes, num_texts):
        if piece.text is not None:
            ids.append([])
            types.append([])
            text_types.append(piece.type)
        elif special:
            ids[-1] += piece.ids
            types[-1] += [piece.type] * len(piece.ids)
    largest = max((kind for part in (*types, text_types) for kind in part), default=0)
    if largest > _LARGEST_TYPE:
        raise TokenizerError(
            f"the tokenizer's template has the type_id {largest:,}, expected at most "
            f"{_LARGEST_TYPE}. Correct the post_processor in tokenizer.json."
        )
    return ids, types, text_types
