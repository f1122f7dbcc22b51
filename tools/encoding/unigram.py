"""Encode many words of a Unigram tokenizer at once, with the arithmetic of `tokenizers`.

The model writes a word as the pieces with the largest sum of scores. `tokenizers` finds them word
by word. Here, numpy takes each step for all new words together: find the pieces that end at each
character, then the best pieces up to each character, then follow them back from the end. Words that
begin alike share the work on their common beginning: in new words of source code, less than half of
the characters are left.

The ids are the same for these reasons. Scores are added in the same order, in 64 bits. Of two equal
sums, the one whose last piece begins earlier stays. Only characters that are pieces themselves are
accepted, so no character is unknown.

A word is cut where no piece of the vocabulary joins two characters: ` self.name,` has the parts
` self`, `.`, `name` and `,` if no piece has both a letter and a sign, as in vocabularies that
SentencePiece trained. Every path goes through the cut, so the best path of the word consists of the
best paths of its parts, except for rounding: behind another part, sums are rounded differently. So
a part is unsure if another path is nearly as good, as for `---`, which `--` may begin or end. Words
with an unsure part are encoded whole. If many pieces are like `self.`, words are not cut.
"""

import itertools
import re
from typing import Self

import msgspec
import numpy as np
from tokenizers import Tokenizer

from tokenfeed.pipeline.arithmetic import Ragged, offsets_of, ranges

MARK = "\u2581"
"""The character that SentencePiece writes for a space."""
_ALPHABET = [MARK, *map(chr, range(0x21, 0x7F))]
_WIDTH = len(_ALPHABET)
_LONGEST_PART = 128
"""Characters. Longer parts are rare, and each character takes a step."""
_LONGEST_WORD = 1 << 12
"""Characters. The more pieces a word has, the larger is the rounding error."""
_MOST_CHARACTERS = 1 << 21
"""Characters of all pieces. A node of the tree takes 380 bytes, and many pieces share it."""
_PIECE = re.compile(f"[{MARK}!-~][!-~]*")
"""Matches a piece of ASCII. Only its first character may be a mark."""
_MIXED = re.compile(rf"[^\W_][^\w{MARK}]|[^\w{MARK}][^\W_]")
"""Matches a letter or digit beside a sign."""
_MOST_MIXED = 0.1
"""The largest part of pieces with letters and signs, if words are cut."""


class UnigramWords:
    """The pieces of a model that consist of ASCII letters and signs, as a tree of characters, from
    the last character to the first one."""

    def __init__(self, pieces: dict[str, tuple[int, float]]) -> None:
        """Build the tree.

        Args:
            pieces: Id and score of each piece. Only the first character may be a mark.
        """
        ids, scores = zip(*pieces.values(), strict=True)
        self._ids = np.array([0, *ids], np.uint32)
        self._scores = np.array([0, *scores], np.float64)
        """The id and the score of each piece, by the number of its last node. These nodes have the
        numbers from 1."""
        known = "".join(pieces.keys() & {*_ALPHABET}).replace(MARK, " ").encode()
        self._is_strange = bytes(byte not in known for byte in range(256))
        """Whether a byte is not a piece, for each byte."""
        self._codes = np.zeros(256, np.int32)
        """The code of each byte, where a mark is written as a space."""
        self._codes[[ord(c) for c in _ALPHABET[1:]]] = np.arange(1, _WIDTH)
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        letters = "".join(piece[::-1] for piece in pieces).replace(MARK, " ").encode()
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
        keys = np.concatenate(edges)
        numbers = np.full(num_nodes, -1)
        numbers[0], numbers[nodes] = 0, np.arange(1, len(pieces) + 1)
        numbers[numbers < 0] = np.arange(len(pieces) + 1, num_nodes)
        parents, codes = numbers[keys // (_WIDTH + 1)], keys % (_WIDTH + 1)
        self._next = np.zeros(num_nodes * (_WIDTH + 1), np.int32)
        """The node behind a node and a code, or 0. The code _WIDTH stands for a word's start."""
        self._next[parents * (_WIDTH + 1) + codes] = numbers[1:]
        largest = np.abs(self._scores).max() * _LONGEST_WORD
        self._margin = largest * _LONGEST_WORD * 2.0**-51
        """A larger difference between two sums has the same sign in any word. A sum has one
        rounding error per piece, at most 2^-53 of `largest`, and four sums matter: two in the part
        alone, and two in its word."""
        mixed = sum(bool(_MIXED.search(text)) for text in pieces)
        self.has_parts = mixed < len(pieces) * _MOST_MIXED
        """Whether most words have parts that other words have too."""
        self._is_apart = np.zeros(1 << 16, bool)
        """For two bytes, as one number: whether no piece joins them."""
        signs = np.array([*known.replace(b" ", b"")], np.uint16)
        self._is_apart[signs[:, None] << 8 | signs] = True
        inner = np.delete(np.arange(len(letters)), starts[:-1])
        data = np.frombuffer(letters, np.uint8).astype(np.uint16)
        self._is_apart[data[inner] << 8 | data[inner - 1]] = False

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self | None:
        """Return the words of a Unigram tokenizer; None if its model is too large or unusual."""
        content = msgspec.json.decode(tokenizer.to_str())
        vocabulary = content["model"]["vocab"]  # with scores as they are used
        pieces = {
            text: (number, score)
            for number, (text, score) in enumerate(vocabulary)
            if _PIECE.fullmatch(text)
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
        sizes, begins_with_space = np.diff(words), data[words[:-1]] == ord(" ")
        can_encode: np.ndarray = (sizes > begins_with_space) & (sizes <= _LONGEST_PART)
        can_encode[self._words_of(words, self._strange(data, words))] = False
        return can_encode

    def _strange(self, data: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return the places of bytes that are not pieces. A space may only begin a word."""
        is_strange = data == ord(" ")
        is_strange[words[:-1]] = False
        is_strange |= np.frombuffer(data.tobytes().translate(self._is_strange), bool)
        return np.flatnonzero(is_strange)

    def _words_of(self, words: np.ndarray, places: np.ndarray) -> np.ndarray:
        return np.searchsorted(words, places, "right") - 1

    def cut(self, data: np.ndarray, words: np.ndarray, whole: list[int]) -> np.ndarray:
        """Cut words with a space before them into parts.

        Args:
            data: All words, uint8.
            words: Where each word begins, and the end, shape (W + 1,).
            whole: Places in words that stay whole.

        Returns:
            Where each part begins, and the end. A word stays whole if a part cannot be encoded.
        """
        starts, sizes = words[:-1], np.diff(words)
        is_cut = np.ones(len(data) + 1, bool)
        is_cut[1:-1] = self._is_apart[data[:-1].astype(np.intp) << 8 | data[1:]]
        is_cut[starts] = True
        is_whole = (data[starts] != ord(" ")) | (sizes > _LONGEST_WORD) | is_cut[starts + 1]
        unfit = np.append(self._strange(data, words), whole).astype(np.int64)
        is_whole[self._words_of(words, unfit)] = True
        parts = np.flatnonzero(is_cut)
        is_whole[self._words_of(words, parts[:-1][np.diff(parts) > _LONGEST_PART])] = True
        is_cut[ranges(starts[is_whole] + 1, sizes[is_whole] - 1)] = False
        cuts: np.ndarray = np.flatnonzero(is_cut)
        return cuts

    def encode(self, parts: list[bytes]) -> tuple[Ragged, np.ndarray]:
        """Encode words or parts of words for which `can_encode` is true.

        Returns:
            The ids, uint32, and which are unsure as parts of a word, shape (P,), bool.
        """
        keys = np.array(parts, "S16").view(">u8").reshape(-1, 2).astype(np.uint64)
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        letters = np.frombuffer(b"".join(map(parts.__getitem__, order.tolist())), np.uint8)
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))[order]
        codes, depths, parents, last = self._beginnings(self._codes[letters], lengths)
        pieces, before, is_close = self._best_pieces(codes, depths, parents)
        # Follow the best paths back from the ends of words.
        left, at = np.arange(len(parts)), last
        counts, taken = np.zeros(len(parts), np.int64), []
        is_unsure = np.zeros(len(parts), bool)
        while len(left):
            taken.append((left, pieces[at]))
            is_unsure[left] |= is_close[at]
            counts[left] += 1
            at = before[at]
            going = np.flatnonzero(at >= 0)
            left, at = left[going], at[going]
        ids, ends = np.empty(int(counts.sum()), np.uint32), np.cumsum(counts)
        for behind, (words, found) in enumerate(taken, 1):
            ids[ends[words] - behind] = self._ids[found]
        back = np.argsort(order)
        return Ragged(ids, counts).take(back), is_unsure[back]

    def _beginnings(
        self, codes: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the beginnings of words, because words share the work on common beginnings.

        Shorter beginnings come first:

            words        abc  abd  b
            beginnings   a b | ab | abc abd     numbers 0 to 4
            parents      - - | 0  | 2   2

        A word shares what it has in common with the word before. So words should be sorted. If
        they are not, some beginnings are there twice, and the ids are the same.

        Args:
            codes: The codes of all characters, word by word.
            lengths: Of words, shape (W,).

        Returns:
            For each beginning its last code, its length - 1, and the number of the beginning that
            is one character shorter, or -1. And the number of each whole word, shape (W,).
        """
        starts, former = offsets_of(lengths)[:-1], np.append(0, lengths[:-1])
        places = np.arange(len(codes))
        depths = (places - np.repeat(starts, lengths)).astype(np.uint8)
        before = np.repeat(former, lengths)
        differs = (codes != codes[places - before]) | (depths >= before)
        shared = np.minimum.reduceat(np.where(differs, depths, _LONGEST_PART), starts)
        shared = np.minimum(shared, lengths - 1)
        new = ranges(starts + shared, lengths - shared)
        depths, firsts = depths[new], offsets_of(lengths - shared)
        by_depth = np.argsort(depths, kind="stable")
        numbers = np.empty(len(new), np.int64)
        numbers[by_depth] = np.arange(len(new))
        parents = np.append(-1, numbers[:-1])
        # The parent of a word's first beginning is the last one of this length so far.
        begins = firsts[:-1]
        keys = depths.astype(np.int64) * len(new) + np.arange(len(new))
        parents[begins] = np.searchsorted(keys[by_depth], keys[begins] - len(new)) - 1
        new = new[by_depth]
        return codes[new], depths[by_depth], parents[by_depth], numbers[firsts[1:] - 1]

    def _best_pieces(
        self, codes: np.ndarray, depths: np.ndarray, parents: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the last piece of the best path of each beginning, the beginning before the piece,
        or -1, and whether another path is nearly as good."""
        codes = np.append(codes, _WIDTH).astype(np.int32)  # also of the number -1
        ends, at, found = np.arange(len(parents)), np.arange(len(parents)), []
        nodes = self._next[codes[:-1]]
        while len(nodes):
            at = parents[at]
            is_piece = np.flatnonzero(nodes < len(self._ids))
            found.append((ends[is_piece], at[is_piece], nodes[is_piece]))
            nodes = self._next[nodes * (_WIDTH + 1) + codes[at]]
            going = np.flatnonzero(nodes > 0)
            ends, at, nodes = ends[going], at[going], nodes[going]
        # Sort by the end. Larger pieces come last.
        counts = np.zeros(len(parents), np.int64)
        for each, _, _ in found:
            counts[each] += 1
        groups = offsets_of(counts)
        """Where the pieces that end a beginning are. Every character is a piece."""
        before, pieces = np.empty(groups[-1], np.int64), np.empty(groups[-1], np.int32)
        free = groups[:-1].copy()
        for each, origins, some in found:
            before[free[each]], pieces[free[each]] = origins, some
            free[each] += 1
        given = self._scores[pieces]
        """The score of each candidate, and soon the sum of the best path that ends with it."""
        sums = np.zeros(len(parents) + 1)
        """The sum of the best path of each beginning, and of nothing."""
        rows = offsets_of(np.bincount(depths)).tolist()
        for start, stop in itertools.pairwise(rows):
            inner = groups[start : stop + 1]
            some = slice(inner[0], inner[-1])
            given[some] += sums[before[some]]
            sums[start:stop] = np.maximum.reduceat(given[some], inner[:-1] - inner[0])
        ends = np.repeat(np.arange(len(parents)), counts)
        loss = sums[ends] - given
        best = np.flatnonzero(loss == 0)
        chosen = np.empty(len(parents), np.int64)
        chosen[ends[best]] = best  # the largest piece, which is written last
        near = ends[np.flatnonzero(loss <= self._margin)]
        is_close = np.zeros(len(parents), bool)
        is_close[near[1:][near[1:] == near[:-1]]] = True
        return pieces[chosen], before[chosen], is_close
