"""What each character and each token of a rendered conversation is: whose text, and of which kind.

Stop tokens and ends of thinking are searched in the text without the contents, which are blanked:
an answer or an argument of a call may contain their text.
"""

import functools
import re
from collections.abc import Sequence, Set
from itertools import chain
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.kinds import BEGINS, Kind
from tokenfeed.tools.corpus.records import Unusable

_BLANK = "\0"
"""Stands for each character of a content. It is no white space, and in no special token."""
_END_OF_THOUGHT = "</think>"
_TEMPLATE, _TEXT, _THINKING, _CALL = Kind.TEMPLATE, Kind.TEXT, Kind.THINKING, Kind.CALL

Range = tuple[int, int]
"""First character and last character + 1."""


class Part(NamedTuple):
    """A content of a message in the rendered text."""

    start: int
    end: int
    message: int
    """The number of the message; -1 for ids and texts in arguments."""
    kind: Kind
    content: int
    """The number of the content."""


def any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of some tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


COUNTS = ("no_stop", "unmarked", "unproved", "removed_thinking", "removed_text")
"""Names of the counts of a conversation; see `docs/format.md`."""


class Rendered(NamedTuple):
    """A rendered conversation: its text, and what each character is. Places are characters."""

    text: str = ""
    starts: Sequence[int] = (0,)
    """Where each stretch of one kind begins, ascending from 0; it may be empty."""
    kinds: bytes = bytes([_TEMPLATE])
    """The kind of each stretch."""
    messages: Sequence[int] = ()
    """Begin and end of what belongs to each message."""
    spans: Sequence[int] = ()
    """Begin and end of all that belongs to a message, ascending."""
    owners: Sequence[int] = ()
    """The number of the message of each span, from 0; -1 if it is not certain."""
    counts: tuple[int, ...] = (0,) * len(COUNTS)
    """What users should know, by `COUNTS`."""
    contents: Sequence[int] = ()
    """Begin and end of each known content, ascending."""


class TokensOfTexts:
    """The tokens of R rendered conversations."""

    def __init__(
        self, rendered: list[Rendered], texts: bytes, starts: np.ndarray, ends: np.ndarray
    ) -> None:
        """Find the byte of each character.

        Args:
            rendered: The conversations.
            texts: Their texts in UTF-8, joined.
            starts: Where each token begins, in bytes over all conversations, shape (N,).
            ends: Where each token ends, shape (N,).
        """
        self._rendered, self._texts = rendered, texts
        self._starts, self._ends = starts, ends
        is_first = np.ones(len(texts) + 1, bool)
        np.not_equal(np.frombuffer(texts, np.uint8) & 0xC0, 0x80, out=is_first[:-1])
        self._byte_of = np.flatnonzero(is_first)
        self._first = offsets_of(np.array([len(each.text) for each in rendered], np.int64))[:-1]

    def _bytes_of(self, places: list[Sequence[int]]) -> np.ndarray:
        """Return the byte of places in each conversation, shape (P,)."""
        counts = np.fromiter(map(len, places), np.int64, len(places))
        characters = np.fromiter(chain.from_iterable(places), np.int64, int(counts.sum()))
        found: np.ndarray = self._byte_of[characters + np.repeat(self._first, counts)]
        return found

    def kinds(self, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the kinds column, and counts of each conversation.

        A token has the kind of its first character. Tokens that end in characters of another kind
        are counted.

        Args:
            lengths: Tokens of each conversation, shape (R,).
        """
        starts, num_rows = self._starts, len(self._rendered)
        begins = self._bytes_of([each.starts for each in self._rendered])
        values = np.frombuffer(b"".join([each.kinds for each in self._rendered]), np.uint8)
        first_token = np.searchsorted(starts, begins)
        kinds = np.repeat(values, np.diff(np.append(first_token, len(starts))))
        rows = np.repeat(np.arange(num_rows), lengths)
        per_row = np.bincount(rows * 8 + kinds, minlength=8 * num_rows).reshape(-1, 8)
        counts = {kind.label + "_tokens": per_row[:, kind] for kind in Kind}
        before = np.maximum(first_token - 1, 0)
        is_split = (first_token > 0) & (self._ends[before] > begins) if len(starts) else before < 0
        last = kinds.copy()
        last[before[is_split]] = values[is_split]  # of several in one token, the last counts
        counts["split_tokens"] = np.bincount(rows[last != kinds], minlength=num_rows)
        found = np.array([each.counts for each in self._rendered], np.int64)
        counts |= dict(zip(COUNTS, found.T, strict=True))
        messages = self._bytes_of([each.messages for each in self._rendered])
        first, stop = messages[::2], messages[1::2]
        tokens = np.searchsorted(starts, first)
        tokens, stop = tokens[tokens < len(starts)], stop[tokens < len(starts)]
        kinds[tokens[starts[tokens] < stop]] |= BEGINS
        return kinds, counts

    def overlapping(
        self, ids: np.ndarray, special: dict[int, str], unknown: str | None
    ) -> dict[int, str]:
        """Return the numbers of special tokens that have characters of a content, and their texts.

        A token may take the white space around its text, which does not count. The unknown token
        counts only where the text has its name, because the model uses it for other texts.

        Args:
            ids: The ids of all conversations, shape (N,).
            special: The special tokens by id.
            unknown: The unknown token; None without one.
        """
        tokens = np.flatnonzero(np.isin(ids, [*special]))
        contents = self._bytes_of([each.contents for each in self._rendered])
        begins, ends = (np.append(contents[n::2], len(self._texts) + 1) for n in (0, 1))

        def overlap(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
            found: np.ndarray = begins[np.searchsorted(ends, first, "right")] < stop
            return found

        found = {}
        for token in tokens[overlap(self._starts[tokens], self._ends[tokens])].tolist():
            start, end = self._starts[token], self._ends[token]
            word, name = self._texts[start:end].decode(), special[int(ids[token])]
            if name not in word:  # the normalizer changed it
                name = "" if name == unknown else word.strip()
            if not name.strip():
                continue
            lead, _, rest = word.partition(name)
            start, end = start + len(lead.encode()), end - len(rest.encode())
            if overlap(np.array([start]), np.array([end]))[0]:
                found[token] = name
        return found

    def numbers(self, of_messages: list[list[float]]) -> np.ndarray:
        """Return for each token the number of the message that its first character belongs to.

        The number of the template's tokens is 0.

        Args:
            of_messages: The numbers of the messages of each conversation; empty for an empty text.
        """
        found = np.zeros(len(self._starts))
        edges = self._bytes_of([each.spans for each in self._rendered])
        tokens = iter(np.searchsorted(self._starts, edges).tolist())
        for rendered, numbers in zip(self._rendered, of_messages, strict=True):
            for owner, first, stop in zip(rendered.owners, tokens, tokens, strict=False):
                found[first:stop] = numbers[owner]
        return found


def blanked(text: str, parts: list[Part]) -> str:
    """Return a text of the same length in which contents are blank."""
    pieces, at = [], 0
    for part in parts:
        pieces += [text[at : part.start], _BLANK * (part.end - part.start)]
        at = part.end
    return "".join([*pieces, text[at:]])


def first_said(parts: list[Part]) -> list[Part]:
    """Return contents without what a template repeats of the assistant, such as the name of a
    function in the header of the tool's answer."""
    if len({part.content for part in parts}) == len(parts):
        return [*parts]
    firsts = {part.content: part for part in reversed(parts)}
    return [part for part in parts if part.kind < _TEXT or firsts[part.content] is part]


Stretches = tuple[tuple[int, Kind], ...]
"""Where kinds begin in a short text, relative to it."""
_TEXTS = 1 << 12
"""Short texts whose kinds are remembered."""


class Between:
    """The kinds of what a template writes in a message of the assistant, beside its contents.

    Templates repeat the same few texts, so most are looked through once.
    """

    def __init__(self, special: re.Pattern[str]) -> None:
        """Take a pattern of the special tokens. One of them ends what the assistant says."""
        self.special = special
        self.before_content = functools.lru_cache(_TEXTS)(self._before_content)
        self.at_end = functools.lru_cache(_TEXTS)(self._at_end)

    @staticmethod
    def _before_content(text: str, before: Kind, after: Kind) -> Stretches:
        """Return the kinds of what stands before a content.

        It has the kind of the content, except the end of the thinking before it. No thinking
        follows the name of a function.

        Args:
            text: The blank text since the content before, or since the beginning of the message.
            before: The kind of the content before; `TEXT` without one.
            after: The kind of the content.
        """
        if before is not _CALL and (thought := _end_of_thought(text)):
            return (0, _THINKING), (thought, after)
        return ((0, _THINKING if before is _THINKING and after is _TEXT else after),)

    def _at_end(self, text: str, before: Kind) -> Stretches:
        """Return the kinds of the end of a message. The last is a stop token, if one ends it."""
        stop = len(text)
        for match in self.special.finditer(text):
            stop = len(text) if text[match.end() :].strip() else match.start()
        found = [(0, before)]
        if before is not _CALL and (thought := _end_of_thought(text[:stop])):
            found = [(0, _THINKING), (thought, _TEXT if before is _THINKING else before)]
        return (*found, (stop, Kind.STOP)) if stop < len(text) else (*found,)


def laid_out(
    text: str,
    said: list[Range],
    parts: list[Part],
    turns: list[int],
    missing: tuple[int, ...],
    between: Between,
    unlearnt: Set[int] = frozenset(),
) -> Rendered:
    """Return a text with what each part of it is.

    Args:
        text: The rendered conversation.
        said: What the assistant says.
        parts: The contents in the text.
        turns: The numbers of the messages of the assistant.
        missing: The counts that are known, after `no_stop` and `unmarked`.
        between: What the template writes between contents.
        unlearnt: The messages of the assistant that no loss counts. They get the kind `template`.

    Raises:
        Unusable: It is not certain where these are.
    """
    own = [part for part in first_said(parts) if part[3] is not _TEMPLATE]
    blank = text if len(own) == len(parts) else blanked(text, parts)
    if len(turns) != len(said):
        if unlearnt:
            raise Unusable("it is not certain which message has the weight 0")
        turns = [-1] * len(said)
    starts: list[int] = [0]
    kinds: list[int] = [_TEMPLATE]
    messages: list[int] = []
    spans: list[int] = []
    owners: list[int] = []
    no_stop = unmarked = at = 0
    shown = -1
    own.append(Part(len(text) + 1, 0, -1, _TEMPLATE, -1))
    begin, stop, message, kind, _ = own[0]
    for turn, (start, end) in zip([*turns, -1], [*said, (len(text), len(text))], strict=True):
        while begin < start:
            if kind >= _TEXT:
                unmarked += 1
            else:
                starts += begin, stop
                kinds += kind, _TEMPLATE
                spans += begin, stop
                owners.append(message)
                if message != shown:
                    messages += begin, stop
                shown = message
            at += 1
            begin, stop, message, kind, _ = own[at]
        if start == end:
            continue
        place, before, is_learnt = start, _TEXT, turn not in unlearnt
        while begin < end:
            if is_learnt:
                for offset, each in between.before_content(blank[place:begin], before, kind):
                    starts.append(place + offset)
                    kinds.append(each)
                starts.append(begin)
                kinds.append(kind)
            place, before = stop, kind
            at += 1
            begin, stop, message, kind, _ = own[at]
        if is_learnt:
            found = between.at_end(blank[place:end], before)
            for offset, each in found:
                starts.append(place + offset)
                kinds.append(each)
            no_stop += found[-1][1] is not Kind.STOP
        starts.append(end)
        kinds.append(_TEMPLATE)
        messages += start, end
        spans += start, end
        owners.append(turn)
    contents = [place for part in parts for place in part[:2]]
    counts = (no_stop, unmarked, *missing)
    return Rendered(text, starts, bytes(kinds), messages, spans, owners, counts, contents)


def _end_of_thought(blank: str) -> int:
    """Return where the last end of thinking, and the white space behind it, ends; 0 without one."""
    found = blank.rfind(_END_OF_THOUGHT)
    if found < 0:
        return 0
    behind = blank[found + len(_END_OF_THOUGHT) :]
    return len(blank) - len(behind.lstrip())
