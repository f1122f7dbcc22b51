"""The ids of words that were encoded before, found for all words of a batch at once."""

import itertools
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of, ranges

Encode = Callable[[list[bytes]], Ragged]
"""Encodes UTF-8 texts or words."""
_WORD_BYTES = 120
"""What a word takes beside its letters."""


class WordCache:
    """The ids of words, by the bytes of each word. A word has the same ids wherever it stands."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """About the memory that the words take."""
        self._numbers: dict[bytes, int] = {}
        self._ids, self._offsets = np.empty(0, np.uint32), np.zeros(1, np.int64)
        """All ids, and where those of each number begin."""

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, data: np.ndarray, cuts: np.ndarray, encode_new: Encode) -> np.ndarray:
        """Return the number of each word, shape (W,).

        Args:
            data: All words, uint8.
            cuts: Where each word begins, and the end, shape (W + 1,).
            encode_new: Encodes distinct words that were never found before.
        """
        buffers = [None, pa.py_buffer(cuts.astype(np.int32)), pa.py_buffer(data)]
        found = pa.Array.from_buffers(pa.binary(), len(cuts) - 1, buffers).dictionary_encode()
        words = found.dictionary.to_pylist()
        known = map(self._numbers.get, words, itertools.repeat(-1))
        numbers = np.fromiter(known, np.int64, len(words))
        is_new = numbers < 0
        if is_new.any():
            new = [*itertools.compress(words, is_new)]
            made = encode_new(new)
            first = len(self._numbers)
            self._numbers.update(zip(new, itertools.count(first), strict=False))
            numbers[is_new] = np.arange(first, first + len(new))
            self._ids = np.concatenate([self._ids, made.values.astype(np.uint32)])
            self._offsets = np.append(self._offsets, self._offsets[-1] + np.cumsum(made.lengths))
            self.num_bytes += sum(map(len, new)) + _WORD_BYTES * len(new)
        # `to_numpy` would import pandas.
        indexes = np.frombuffer(found.indices.buffers()[1] or b"", np.int32)
        of_words: np.ndarray = numbers[indexes]
        return of_words

    def ids(self, numbers: np.ndarray, ends: np.ndarray) -> Ragged:
        """Return the ids of rows of words.

        Args:
            numbers: The number of each word, shape (W,).
            ends: The end of each row in `numbers`, shape (R,).
        """
        starts = self._offsets[numbers]
        lengths = self._offsets[numbers + 1] - starts
        # Most words have one or two ids: then, an index per id is faster than `take`.
        return Ragged(
            self._ids[ranges(starts, lengths)], np.diff(offsets_of(lengths)[ends], prepend=0)
        )
