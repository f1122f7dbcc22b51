"""Fill in the middle: documents cut in three, so that a model learns to write the middle.

    PSM    <prefix> PREFIX <suffix> SUFFIX <middle> MIDDLE
    SPM    <prefix> <suffix> SUFFIX <middle> PREFIX MIDDLE

A document is cut between characters, so a model also learns to continue a part of a word. Each part
is encoded on its own. In SPM, prefix and middle are one text, as in Code Llama. The cuts are a
function of the text and a seed, so neither the workers nor a resumed run change them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import xxhash
from tokenizers import Tokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of
from tokenfeed.pipeline.errors import TokenizerError

FIM_ROWS = "fim_rows"
"""The number of cut documents, among the counts of the manifest."""

_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, SmolLM
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Usual names of the tokens before prefix, suffix and middle. The last ones are DeepSeek's."""
_ADDED_SPACES = ("\u2581", "\u0120")
"""The space that some tokenizers put before every text, as tokens show it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FillInMiddle:
    """Decides which documents are cut in three, and the order of their parts."""

    rate: float
    """Share of the documents that are cut."""
    spm_rate: float
    """Share of the cut documents that are SPM."""
    seed: int
    tokens: tuple[int, int, int] = (0, 0, 0)
    """Ids before prefix, suffix and middle; see `with_tokenizer`."""

    def with_tokenizer(self, json_bytes: bytes) -> Self:
        """Return the settings with the ids of the tokenizer.

        Raises:
            TokenizerError: The tokenizer lacks the tokens, or puts a space before every text.
        """
        tokenizer = Tokenizer.from_buffer(json_bytes)
        added = tokenizer.get_added_tokens_decoder()  # other words are text
        vocabulary = {token.content: id_ for id_, token in added.items()}
        names = next((names for names in _TOKENS if vocabulary.keys() >= {*names}), None)
        if names is None:
            raise TokenizerError(
                "`--fim-rate`: the tokenizer has no tokens to fill in the middle, such as "
                f"{', '.join(_TOKENS[0])}. Use one that has, or leave `--fim-rate` out."
            )
        if "".join(tokenizer.encode("\n", add_special_tokens=False).tokens).startswith(
            _ADDED_SPACES
        ):
            raise TokenizerError(
                "`--fim-rate`: the tokenizer puts a space before every text, also before the parts "
                "of a document. Use another tokenizer, or leave `--fim-rate` out."
            )
        prefix, suffix, middle = (vocabulary[name] for name in names)
        return replace(self, tokens=(prefix, suffix, middle))

    def encode(
        self, documents: list[bytes], encode: Callable[[list[bytes]], Ragged]
    ) -> tuple[Ragged, np.ndarray, np.ndarray]:
        """Cut some of R documents, and encode the parts.

        Returns:
            The ids of the rows, the number of ids of each row that encode text, and whether it was
            cut; shape (R,).
        """
        texts: list[bytes] = []
        order: list[int] = []  # numbers of texts, or -3, -2, -1: before prefix, suffix and middle
        sizes: list[int] = []  # entries of each row in `order`
        for document in documents:
            chance = random.Random(xxhash.xxh3_64_intdigest(document, self.seed))
            first = len(texts)
            if chance.random() < self.rate and document:
                is_spm, text = chance.random() < self.spm_rate, document.decode()
                start, stop = sorted(int(chance.random() * (len(text) + 1)) for _ in range(2))
                prefix, middle, suffix = text[:start], text[start:stop], text[stop:]
                parts = [suffix, prefix + middle] if is_spm else [prefix, suffix, middle]
                texts += map(str.encode, parts)
                psm = [-3, first, -2, first + 1, -1, first + 2]
                entries = [-3, -2, first, -1, first + 1] if is_spm else psm
            else:
                texts.append(document)
                entries = [first]
            order += entries
            sizes.append(len(entries))
        ids = encode(texts)
        tokens = np.array(self.tokens, ids.values.dtype)
        pool = Ragged(np.append(ids.values, tokens), np.append(ids.lengths, np.ones(3, np.int64)))
        taken = pool.take(np.array(order, np.int64) % len(pool))
        is_cut = np.array(sizes, np.int64) > 1
        lengths = np.diff(offsets_of(taken.lengths)[offsets_of(np.array(sizes, np.int64))])
        return Ragged(taken.values, lengths), lengths - len(tokens) * is_cut, is_cut
