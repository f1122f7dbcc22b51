"""The template: what stands around the texts of a row, as the tokenizer has it.

One such as `[CLS] A [SEP] B [SEP]` is read from the post-processor of its tokenizer.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.ragged import Ragged, join
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.tools.encoding.post_processor import read_template
from tokenfeed.tools.encoding.tokenizer import TextTokenizer

__all__ = ["Template"]

_LARGEST_TYPE = 255
"""`token_type_ids` is stored as uint8."""


@dataclass(frozen=True, slots=True)
class Template:
    """Ids before, between and after the texts of a row, and the text type of each of them."""

    ids: tuple[np.ndarray, ...]
    """One array more than there are texts, shape (S,) each; all may be empty."""
    types: tuple[np.ndarray, ...]
    """The text type of each of them, in the same shapes: what `token_type_ids` has there."""
    text_types: tuple[int, ...]
    """The type of each text: 0 and 1, unless the template has it otherwise."""
    before_word: bytes = b""
    """Text that a word on its own needs in front of it."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: TextTokenizer, *, num_texts: int, special: bool, end_id: int | None
    ) -> "Template":
        """The template of rows of one or two texts.

        Args:
            tokenizer: What has the template.
            num_texts: 1 or 2.
            special: Whether the tokenizer's template applies.
            end_id: Ends the row, unless the template ends it so already; None for no end.
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
        """Ids of rows, given those of their texts."""
        return join(_alternate(self.ids, texts))

    def types_around(self, *texts: Ragged) -> Ragged:
        """The type of each token of the same rows, uint8."""
        types = [
            Ragged(np.full(len(text.values), kind, np.uint8), text.lengths)
            for kind, text in zip(self.text_types, texts, strict=True)
        ]
        return join(_alternate(self.types, types))

    def labels_around(self, labels: Ragged) -> Ragged:
        """Labels of the tokens of rows of one text; what is around it has none."""
        return join(_alternate([np.full(len(part), IGNORED) for part in self.ids], [labels]))


def _alternate(around: Sequence[np.ndarray], texts: Sequence[Ragged]) -> list[Ragged | np.ndarray]:
    pieces: list[Ragged | np.ndarray] = [around[0]]
    for text, after in zip(texts, around[1:], strict=True):
        pieces += [text, after]
    return pieces


def _template(
    json_bytes: bytes, num_texts: int, special: bool
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Special ids and their types before, between and after the texts; and the texts' types."""
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
