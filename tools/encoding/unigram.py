"""Encode many words of a Unigram tokenizer at once, with the arithmetic of `tokenizers`.

The model writes a word as the pieces with the largest sum of scores. `tokenizers` finds them word
by word. Here, numpy takes each step for all new words together: find the pieces that begin at each
character, then the best pieces up to each character, then follow them back from the end.

The ids are the same for these reasons. Scores are added in the same order, in 64 bits. Of two equal
sums, the one whose last piece begins earlier stays. Only characters that are pieces themselves are
accepted, so no character is unknown.

A word is cut where no piece of the vocabulary joins two characters: ` self.name,` has the parts
` self`, `.`, `name` and `,` if no piece has both a letter and a sign, as in vocabularies that
SentencePiece trained. Every path goes through the cut, so the best path of the word consists of the
best paths of its parts, except for rounding: behind another part, sums are rounded differently. So
a part is unsure if another path is nearly as good, as for `---`, which `--` may begin or end. Words
with an unsure part are encoded whole.
"""

import itertools
import json
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of

MARK = "\u2581"
"""The character that SentencePiece writes for a space."""
_ALPHABET = [MARK, *map(chr, range(0x21, 0x7F))]
_WIDTH = len(_ALPHABET)
_LONGEST_PART = 64
"""Characters. Longer parts are rare, and each character takes a step."""
_LONGEST_WORD = 1 << 12
"""Characters. The more pieces a word has, the larger is the rounding error."""
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
        self._is_strange = np.ones(256, bool)
        """Whether a byte is a space, or not a piece."""
        self._is_strange[[*known.replace(b" ", b"")]] = False
        self._codes = np.zeros(256, np.int32)
        """The code of each byte, where a mark is written as a space."""
        self._codes[[ord(c) for c in _ALPHABET[1:]]] = np.arange(1, _WIDTH)
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        letters = "".join(pieces).replace(MARK, " ").encode()
        codes, starts = self._codes[np.frombuffer(letters, np.uint8)], offsets_of(lengths)
        nodes = np.zeros(len(pieces), np.int64)
        """The node that each piece has reached."""
        edges: list[np.ndarray] = []
        """For each new node, its parent * (_WIDTH + 1) + the code of a character."""
        num_nodes = 1
        for depth in range(int(lengths.max())):
            longer = np.flatnonzero(lengths > depth)
            keys = nodes[longer] * (_WIDTH + 1) + codes[starts[longer] + depth]
            new, place = np.unique(keys, return_inverse=True)
            nodes[longer] = num_nodes + place
            edges.append(new)
            num_nodes += len(new)
        self._next = np.zeros(num_nodes * (_WIDTH + 1), np.int32)
        """The node behind a node and a code, or 0. The code _WIDTH stands for the end of a word."""
        self._next[np.concatenate(edges)] = np.arange(1, num_nodes)
        self._piece_of = np.full(num_nodes, -1, np.int32)
        """The piece that ends at a node, or -1."""
        self._piece_of[nodes] = np.arange(len(pieces))
        largest = np.abs(self._scores).max() * _LONGEST_WORD
        self._margin = largest * _LONGEST_WORD * 2.0**-51
        """A larger difference between two sums has the same sign in any word. A sum has one
        rounding error per piece, at most 2^-53 of `largest`, and four sums matter: two in the part
        alone, and two in its word."""
        self._joins = np.ones(1 << 16, bool)
        """For two bytes, as one number: whether they must stay together."""
        signs = np.array([*known.replace(b" ", b"")], np.uint16)
        self._joins[signs[:, None] << 8 | signs] = False
        inner = np.delete(np.arange(len(letters)), starts[:-1])
        data = np.frombuffer(letters, np.uint8).astype(np.uint16)
        self._joins[data[inner - 1] << 8 | data[inner]] = True

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
        has_sums = all(abs(score) < 1e200 for _, score in pieces.values())  # that are finite
        return cls(pieces) if MARK in pieces and is_small and has_sums else None

    def can_encode(self, data: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return which words can be encoded, bool: a space or none, and then pieces of ASCII.

        Args:
            data: All words, uint8.
            words: Where each word begins, and the end, shape (W + 1,).
        """
        starts, sizes = words[:-1], np.diff(words)
        begins_with_space = data[starts] == ord(" ")
        is_strange = self._is_strange[data]
        is_strange[starts[begins_with_space]] = False
        can_encode: np.ndarray = (sizes > begins_with_space) & (sizes <= _LONGEST_PART)
        can_encode[np.searchsorted(words, np.flatnonzero(is_strange), "right") - 1] = False
        return can_encode

    def cut(self, data: np.ndarray, words: np.ndarray, whole: list[int]) -> np.ndarray:
        """Cut words with a space before them into parts.

        Args:
            data: All words, uint8.
            words: Where each word begins, and the end, shape (W + 1,).
            whole: Places in words that stay whole.

        Returns:
            Where each part begins, and the end. A word stays whole if a part cannot be encoded.
        """
        is_cut = np.append(True, ~self._joins[data[:-1].astype(np.uint16) << 8 | data[1:]])
        is_cut[words[:-1]] = True
        parts = np.flatnonzero(np.append(is_cut, True))
        unfit = np.append(parts[:-1][~self.can_encode(data, parts)], whole).astype(np.int64)
        is_whole = (data[words[:-1]] != ord(" ")) | (np.diff(words) > _LONGEST_WORD)
        is_whole[np.searchsorted(words, unfit, "right") - 1] = True
        firsts = np.searchsorted(parts, words)
        is_kept = np.append(np.repeat(~is_whole, np.diff(firsts)), True)
        is_kept[firsts] = True
        cuts: np.ndarray = parts[is_kept]
        return cuts

    def encode(self, parts: list[bytes]) -> tuple[Ragged, np.ndarray]:
        """Encode words or parts of words for which `can_encode` is true.

        Returns:
            The ids, uint32, and which are unsure as parts of a word, shape (P,), bool.
        """
        # Arrays have the first characters of all words, then the second ones, and so on. Longer
        # words come first, so the words with a character in a row are always the first words:
        #
        #     words      abc  de  f
        #     characters a d f | b e | c       rows 0, 1, 2
        #     borders    before each word, then behind each character
        num_words = len(parts)
        lengths = np.fromiter(map(len, parts), np.int64, num_words)
        order = np.argsort(-lengths, kind="stable")
        starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
        counts = num_words - np.searchsorted(lengths[::-1], np.arange(1, lengths[0] + 1))
        firsts = offsets_of(counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(rows)) - firsts[rows]
        codes = self._codes[np.frombuffer(b"".join(parts), np.uint8)][starts[numbers] + rows]
        border_before = np.where(rows > 0, num_words + firsts[rows - 1], 0) + numbers
        behind = firsts[rows + 1] + numbers  # the next character of the word
        behind[lengths[numbers] == rows + 1] = len(rows)
        origins, ends, pieces, sizes = self._candidates(codes, behind)
        before = border_before[origins]
        given = self._scores[pieces]
        """The score of each candidate, and soon the sum of the best path that ends with it."""
        sums = np.zeros(num_words + len(codes))
        """The sum of the best path up to each border."""
        groups = offsets_of(np.bincount(ends))
        """Where the candidates that end with each character begin. Every character is a piece."""
        for start, stop in itertools.pairwise(firsts.tolist()):
            inner = groups[start : stop + 1]
            some = slice(inner[0], inner[-1])
            given[some] += sums[before[some]]
            largest = np.maximum.reduceat(given[some], inner[:-1] - inner[0])
            sums[num_words + start : num_words + stop] = largest
        loss = sums[num_words + ends] - given
        best = np.flatnonzero(loss == 0)[::-1]
        chosen = np.empty(len(codes), np.int64)
        chosen[ends[best]] = best  # the largest piece, which is written last
        is_close = np.bincount(ends[loss <= self._margin]) > 1
        made, is_unsure = self._followed_back(
            lengths, firsts, pieces[chosen], sizes[chosen], is_close
        )
        back = np.argsort(order)
        return made.take(back), is_unsure[back]

    def _candidates(
        self, codes: np.ndarray, behind: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return first and last character, number and size of each piece in the words.

        They are sorted by the last character. Larger pieces come first.

        Args:
            codes: The code of each character, shape (N,).
            behind: The next character of the word, or N.
        """
        codes = np.append(codes, _WIDTH)
        origins, behind, found = np.arange(len(behind), dtype=np.int32), behind.astype(np.int32), []
        ends, nodes = origins, self._next[codes[:-1]]
        while len(nodes):
            pieces = self._piece_of[nodes]
            is_piece = np.flatnonzero(pieces >= 0)
            found.append((origins[is_piece], ends[is_piece], pieces[is_piece]))
            following = behind[ends]
            nodes = self._next[nodes * (_WIDTH + 1) + codes[following]]
            going = np.flatnonzero(nodes)
            origins, ends, nodes = origins[going], following[going], nodes[going]
        num_pieces = [len(pieces) for *_, pieces in found[::-1]]
        sizes = np.repeat(np.arange(len(found), 0, -1), num_pieces)
        columns = [*map(np.concatenate, zip(*found[::-1], strict=True)), sizes]
        order = np.argsort(columns[1], kind="stable")
        origins, ends, pieces, sizes = (column[order] for column in columns)
        return origins, ends, pieces, sizes

    def _followed_back(
        self,
        lengths: np.ndarray,
        firsts: np.ndarray,
        pieces: np.ndarray,
        sizes: np.ndarray,
        is_close: np.ndarray,
    ) -> tuple[Ragged, np.ndarray]:
        """Return the ids of the best paths, and which are unsure.

        Paths are followed from the ends of words. The arrays have the last piece behind each
        character, its size, and whether another piece is nearly as good.
        """
        left, ends = np.arange(len(lengths)), lengths.copy()
        counts, taken = np.zeros(len(lengths), np.int64), []
        is_unsure = np.zeros(len(lengths), bool)
        while len(left):
            places = firsts[ends[left] - 1] + left
            taken.append((left, pieces[places]))
            is_unsure[left] |= is_close[places]
            ends[left] -= sizes[places]
            counts[left] += 1
            left = left[ends[left] > 0]
        ids, ends = np.empty(int(counts.sum()), np.uint32), np.cumsum(counts)
        for behind, (words, found) in enumerate(taken, 1):
            ids[ends[words] - behind] = self._ids[found]
        return Ragged(ids, counts), is_unsure
