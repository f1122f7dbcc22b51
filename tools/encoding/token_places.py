"""Find the byte at which each token begins in its text.

Each token of a byte-level tokenizer has a known number of bytes, so the sums of these numbers are
the positions. If the sum is not the length of the text, if the normalizer changes the text, and for
other tokenizers, the reference returns the positions.
"""

import unicodedata
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of
from tokenfeed.tools.encoding.tokenizer import TextTokenizer


class TokenPlaces:
    """The first bytes of tokens, for one tokenizer."""

    def __init__(self, json_bytes: bytes) -> None:
        """Read the vocabulary of a tokenizer.json. The reference is loaded when it is needed."""
        self._json_bytes = json_bytes
        content = msgspec.json.decode(json_bytes)
        self._lengths = _byte_lengths(content) if _is_byte_level(content) else None
        added = content.get("added_tokens") or []
        self.added = {token["content"]: int(token["id"]) for token in added}
        """The ids of added tokens, such as special tokens."""
        self.unknown = _unknown(content["model"])
        """The token that stands for text outside the vocabulary; None without one."""
        self._normalizer: str | None = (content.get("normalizer") or {}).get("type")

    @cached_property
    def _reference(self) -> Tokenizer:
        loaded = TextTokenizer.load(self._json_bytes, origin="the tokenizer", splits_special=True)
        return loaded.tokenizer

    def starts(self, texts: list[bytes], ids: Ragged) -> tuple[np.ndarray, np.ndarray]:
        """Return where each token begins and ends, counted over all texts, shape (N,) each.

        Args:
            texts: R texts.
            ids: The ids of the texts, without special tokens around a text.
        """
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        text_offsets, rows = offsets_of(sizes), ids.offsets
        if self._lengths is None:
            starts, wrong = np.zeros(len(ids.values), np.int64), np.arange(len(texts))
        else:
            bounds = offsets_of(self._lengths[ids.values])
            starts = bounds[:-1] + np.repeat(text_offsets[:-1] - bounds[rows[:-1]], ids.lengths)
            is_wrong = bounds[rows[1:]] - bounds[rows[:-1]] != sizes
            is_wrong |= np.fromiter(map(self._is_changed, texts), np.bool_, len(texts))
            wrong = np.flatnonzero(is_wrong)
        for row, places in zip(wrong, self._by_reference(texts, ids, wrong), strict=True):
            starts[rows[row] : rows[row + 1]] = places + text_offsets[row]
        ends = np.append(starts[1:], 0)
        has_tokens = ids.lengths > 0
        ends[rows[1:][has_tokens] - 1] = text_offsets[1:][has_tokens]
        return starts, ends

    def _is_changed(self, text: bytes) -> bool:
        """Return whether the normalizer changes a text. The number of bytes may stay the same."""
        if self._normalizer is None:
            return False
        if self._normalizer in ("NFC", "NFD", "NFKC", "NFKD"):
            form: Any = self._normalizer
            return not (text.isascii() or unicodedata.is_normalized(form, text.decode()))
        decoded = text.decode()
        return bool(self._reference.normalizer.normalize_str(decoded) != decoded)

    def _by_reference(
        self, texts: list[bytes], ids: Ragged, chosen: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yield where the tokens of the chosen texts begin."""
        if not len(chosen):
            return
        decoded = [texts[row].decode() for row in chosen]
        encodings = self._reference.encode_batch(decoded, add_special_tokens=False)
        for row, text, encoding in zip(chosen, decoded, encodings, strict=True):
            assert len(encoding.ids) == ids.lengths[row], "the engines differ"
            yield byte_places(text, np.array([start for start, _ in encoding.offsets], np.int64))


def byte_places(text: str, characters: np.ndarray) -> np.ndarray:
    """Return the bytes at which characters of a text begin, given their numbers."""
    if text.isascii():
        return characters
    encoded = np.frombuffer(text.encode(), np.uint8)
    begins = np.append(np.flatnonzero((encoded & 0xC0) != 0x80), len(encoded))
    places: np.ndarray = begins[characters]
    return places


def _is_byte_level(content: dict[str, Any]) -> bool:
    """Return whether each character of the vocabulary represents one byte."""
    step = content.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    is_byte_level = any(each.get("type") == "ByteLevel" for each in steps)
    return is_byte_level and isinstance(content["model"].get("vocab"), dict)


def _unknown(model: dict[str, Any]) -> str | None:
    if (place := model.get("unk_id")) is not None:
        return str(model["vocab"][place][0])
    return model.get("unk_token")


def _byte_lengths(content: dict[str, Any]) -> np.ndarray:
    vocabulary: dict[str, int] = content["model"]["vocab"]
    sizes = {id_: len(token) for token, id_ in vocabulary.items()}
    added = content.get("added_tokens") or []
    sizes |= {token["id"]: len(token["content"].encode()) for token in added}
    lengths = np.zeros(max(sizes, default=-1) + 1, np.int64)
    lengths[[*sizes]] = [*sizes.values()]
    return lengths
