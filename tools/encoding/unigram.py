"""Encode many words of a Unigram tokenizer at once, with the arithmetic of `tokenizers`.

The model writes a word as the pieces with the largest sum of scores. `tokenizers` finds them word
by word. Here, numpy takes each step for all words together: find the pieces that begin at each
character, then the best pieces up to each character, then follow them back from the end.

The ids are the same for these reasons. Scores are added in the same order, in 64 bits. Of two equal
sums, the one whose last piece begins earlier stays. Only characters that are pieces themselves are
accepted, so no character is unknown.
"""

import json
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of

MARK = "\u2581"
"""The character that SentencePiece writes for a space."""
_ALPHABET = [MARK, *map(chr, range(0x21, 0x7F))]
_WIDTH = len(_ALPHABET)
_LONGEST_WORD = 64
"""Characters. Longer words are rare, and each character takes a step."""
_MOST_CHARACTERS = 1 << 21
"""Characters of all pieces. A node of the tree takes 380 bytes, and many pieces share it."""


class UnigramWords:
    """The pieces of a model that consist of ASCII letters and signs, as a tree of characters."""

    def __init__(self, pieces: dict[str, tuple[int, float]]) -> None:
        """Build the tree.

        Args:
            pieces: Id and score of each piece. Only the first character may be a mark.
        """
        ids, scores = zip(*pieces.values(), strict=True)
        self._ids, self._scores = np.array(ids, np.uint32), np.array(scores, np.float64)
        known = "".join(pieces.keys() & {*_ALPHABET}).replace(MARK, " ").encode()
        self._is_known = np.zeros(256, bool)
        """Whether each byte is a piece, where a mark is written as a space."""
        self._is_known[[*known]] = True
        self._codes = np.zeros(256, np.int32)
        """The code of each byte, where a mark is written as a space."""
        self._codes[[ord(c) for c in _ALPHABET[1:]]] = np.arange(1, _WIDTH)
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        letters = "".join(pieces).replace(MARK, " ").encode()
        codes, starts = self._codes[np.frombuffer(letters, np.uint8)], offsets_of(lengths)
        nodes = np.zeros(len(pieces), np.int64)
        """The node that each piece has reached."""
        edges: list[np.ndarray] = []
        """For each new node, its parent * _WIDTH + the code of a character."""
        num_nodes = 1
        for depth in range(int(lengths.max())):
            longer = np.flatnonzero(lengths > depth)
            keys = nodes[longer] * _WIDTH + codes[starts[longer] + depth]
            new, place = np.unique(keys, return_inverse=True)
            nodes[longer] = num_nodes + place
            edges.append(new)
            num_nodes += len(new)
        self._next = np.zeros(num_nodes * _WIDTH, np.int32)
        """The node behind a node and a code, or 0."""
        self._next[np.concatenate(edges)] = np.arange(1, num_nodes)
        self._piece_of = np.full(num_nodes, -1, np.int32)
        """The piece that ends at a node, or -1."""
        self._piece_of[nodes] = np.arange(len(pieces))

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self | None:
        """Return the words of a Unigram tokenizer; None if its model is too large or unusual."""
        vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]  # scores as they are used
        alphabet = {*_ALPHABET}
        pieces = {
            text: (number, score)
            for number, (text, score) in enumerate(vocabulary)
            if text and alphabet.issuperset(text) and MARK not in text[1:]
        }
        is_small = sum(map(len, pieces)) <= _MOST_CHARACTERS
        is_finite = all(np.isfinite(score) for _, score in pieces.values())
        return cls(pieces) if MARK in pieces and is_small and is_finite else None

    def can_encode(self, words: list[bytes]) -> np.ndarray:
        """Return which words can be encoded, bool: a space and then other characters."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        starts = np.cumsum(lengths) - lengths
        data = np.frombuffer(b"".join(words), np.uint8)
        strange = np.add.reduceat(~self._is_known[data], starts, dtype=np.int64)
        spaces = np.add.reduceat(data == ord(" "), starts, dtype=np.int64)
        is_word: np.ndarray = (data[starts] == ord(" ")) & (spaces == 1) & (strange == 0)
        is_word &= (lengths > 1) & (lengths <= _LONGEST_WORD)
        return is_word

    def encode(self, words: list[bytes]) -> Ragged:
        """Encode words for which `can_encode` is true; the ids are uint32.

        Arrays have the first characters of all words, then the second ones, and so on. Longer words
        come first, so the words with a character in a row are always the first words:

            words      abc  de  f
            characters a d f | b e | c       rows 0, 1, 2
            borders    before each word (row 0), then behind each character
        """
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        order = np.argsort(-lengths, kind="stable")
        counts = np.bincount(lengths)[::-1].cumsum()[::-1]
        counts[:-1] = counts[1:]
        counts[-1] = 0  # words with a character in each row, and in none behind the last row
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        firsts = offsets_of(counts)
        numbers = (np.arange(len(rows)) - firsts[rows]).astype(np.int32)
        begins = (np.cumsum(lengths) - lengths)[order]
        codes = self._codes[np.frombuffer(b"".join(words), np.uint8)][begins[numbers] + rows]
        found = self._pieces_at(codes, rows, numbers, firsts, counts)
        sums = np.full(len(words) + len(codes), -np.inf)
        sums[: len(words)] = 0
        best = np.zeros((2, len(sums)), np.int32)
        """The last piece of the best path up to each border, and its size."""
        borders = np.append(0, len(words) + firsts)
        cuts = [np.searchsorted(rows, np.arange(len(counts) + 1)).tolist() for rows, _, _ in found]
        for row in range(len(counts)):
            for size, (_, of_word, pieces) in enumerate(found, 1):
                start, stop = cuts[size - 1][row : row + 2]
                if start == stop:
                    continue
                word, piece = of_word[start:stop], pieces[start:stop]
                given = sums[borders[row] + word] + self._scores[piece]
                behind = borders[row + size] + word
                is_better = given > sums[behind]
                behind = behind[is_better]
                sums[behind] = given[is_better]
                best[0, behind], best[1, behind] = piece[is_better], size
        made = self._followed_back(lengths[order], borders, best)
        return made.take(np.argsort(order))

    def _pieces_at(
        self,
        codes: np.ndarray,
        rows: np.ndarray,
        numbers: np.ndarray,
        firsts: np.ndarray,
        counts: np.ndarray,
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return row, word and number of the pieces at all characters, for each size from 1 on."""
        found, size, nodes = [], 1, self._next[codes]
        while len(nodes):
            pieces = self._piece_of[nodes]
            is_piece = np.flatnonzero(pieces >= 0)
            found.append((rows[is_piece], numbers[is_piece], pieces[is_piece]))
            behind = np.minimum(rows + size, len(counts) - 1)
            inside = np.flatnonzero(numbers < counts[behind])
            rows, numbers, nodes = rows[inside], numbers[inside], nodes[inside]
            nodes = self._next[nodes * _WIDTH + codes[firsts[behind[inside]] + numbers]]
            going = np.flatnonzero(nodes)
            rows, numbers, nodes = rows[going], numbers[going], nodes[going]
            size += 1
        return found

    def _followed_back(self, lengths: np.ndarray, borders: np.ndarray, best: np.ndarray) -> Ragged:
        """Return the ids of the best paths, which are followed from the ends of words."""
        left, ends = np.arange(len(lengths)), lengths.copy()
        counts, taken = np.zeros(len(lengths), np.int64), []
        while len(left):
            piece, size = best[:, borders[ends[left]] + left]
            taken.append((left, piece))
            ends[left] -= size
            counts[left] += 1
            left = left[ends[left] > 0]
        ids, ends = np.empty(int(counts.sum()), np.uint32), np.cumsum(counts)
        for behind, (words, pieces) in enumerate(taken, 1):
            ids[ends[words] - behind] = self._ids[pieces]
        return Ragged(ids, counts)
