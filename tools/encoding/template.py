"""The template of a tokenizer: special tokens around texts, as in `[CLS] A [SEP] B [SEP]`.

The tokenizer itself frames two texts of one token each, which shows where its special tokens stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, models

from tokenfeed.pipeline.arithmetic import Ragged, join
from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


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
        inner = tokenizer.tokenizer
        _template(inner, 1, special)  # the engines apply it to every text, if without its tokens
        ids, types, text_types = _template(inner, num_texts, special)
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
    tokenizer: Tokenizer, num_texts: int, special: bool
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Return the special ids and their types, and the types of the texts.

    Raises:
        TokenizerError: The template lacks a text, or has it twice or in another order.
    """
    if tokenizer.post_processor is None:
        empty: list[list[int]] = [[] for _ in range(num_texts + 1)]
        return empty, [part[:] for part in empty], [*range(num_texts)]
    letters = Tokenizer(models.WordLevel({"A": 0, "B": 1}, "A"))
    second = letters.encode("B") if num_texts > 1 else None
    framed = tokenizer.post_process(letters.encode("A"), second, add_special_tokens=True)
    ids: list[list[int]] = [[]]
    types: list[list[int]] = [[]]
    text_types: list[int] = []
    order = ""
    for id_, kind, is_special in zip(
        framed.ids, framed.type_ids, framed.special_tokens_mask, strict=True
    ):
        if not is_special:
            ids.append([])
            types.append([])
            text_types.append(kind)
            order += "AB"[id_] if id_ < num_texts else "?"  # of a second template
        elif special:
            ids[-1].append(id_)
            types[-1].append(kind)
    if order != "AB"[:num_texts]:
        raise TokenizerError(
            f"the tokenizer's template for {num_texts} text(s) has "
            f"{' '.join(order) or 'none of them'} where {' '.join('AB'[:num_texts])} can be "
            "understood: change its post_processor."
        )
    return ids, types, text_types
