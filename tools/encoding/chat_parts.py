"""The parts of a rendered conversation: whose text it is, and where the assistant speaks.

Contents of messages are found by a second rendering with marks, such as `DEL 3 (`, around each
content. If its text without the marks equals the text rendered without them, the marks are
right. Otherwise the template changes its output by the contents, and the parts of other roles stay
unknown.

Stop tokens and ends of thinking are searched in the text without the contents, which are blanked:
an answer or an argument of a call may contain their text.
"""

import re
from collections.abc import Set
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.kinds import BEGINS, Kind
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.encoding.chat_messages import Conversation, replaced

MARKS = ("\x7f", "\U00100000")
"""Characters that can begin a mark: the first that a text lacks. `tojson` writes both as they are,
and texts of ASCII stay short with the first one."""
_BEGIN, _END = "[", "]"
_MARK = {mark: re.compile(rf"{mark}(?:(\d+)([()])|([\[\]]))") for mark in MARKS}
_BLANK = "\0"
"""Stands for each character of a content. It is no white space, and in no special token."""
_END_OF_THOUGHT = "</think>"
_TEMPLATE, _TEXT, _THINKING = Kind.TEMPLATE, Kind.TEXT, Kind.THINKING

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


class Marked(NamedTuple):
    """A conversation with marks around its contents."""

    conversation: Conversation
    contents: list[tuple[int, Kind]]
    """The message and the kind of each content."""
    has_spaces: bool
    """Whether a content has outer white space, so that marks can stand inside of it."""
    has_details: bool
    """Whether ids of calls or texts in arguments are contents."""

    def removed(self, parts: list[Part]) -> tuple[int, int]:
        """Return the number of messages whose thinking, and whose text, is in no part."""
        if len({part.content for part in parts}) == len(self.contents):
            return 0, 0
        present = {(part.message, part.kind) for part in parts}
        missing = [each for each in {*self.contents} if each not in present and each[1]]
        thinking = sum(kind is Kind.THINKING for _, kind in missing)
        return thinking, len(missing) - thinking


def generation_marks(mark: str) -> tuple[str, str]:
    """Return what stands around what {% generation %} encloses."""
    return mark + _BEGIN, mark + _END


def marked(conversation: Conversation, mark_: str, *, inside: bool, details: bool) -> Marked:
    """Return a conversation with marks.

    Args:
        conversation: The conversation.
        mark_: The character that begins a mark.
        inside: Whether marks stand inside the outer white space of a content.
        details: Whether ids of calls and texts in arguments are contents too.
    """
    contents: list[tuple[int, Kind]] = []
    same: dict[str, str] = {}  # an id that occurs twice has one mark
    has_spaces = False

    def mark(value: str, message: int, kind: Kind) -> str:
        nonlocal has_spaces
        if message < 0 and value in same:
            return same[value]
        content = value.strip()
        has_spaces |= content != value
        before, after = "", ""
        if not inside:
            content = value
        elif content != value:
            before, _, after = value.partition(content) if content else (value, "", "")
        if not content:
            return value
        number = len(contents)
        contents.append((message, kind))
        text = f"{before}{mark_}{number}({content}{mark_}{number}){after}"
        if message < 0:
            same[value] = text
        return text

    messages = [
        replaced(message, number, mark, details=details)
        for number, message in enumerate(conversation.messages)
    ]
    changed = Conversation(messages, conversation.tools, conversation.arguments)
    return Marked(changed, contents, has_spaces, bool(same))


def read_marks(
    rendered: str, text: str, contents: list[tuple[int, Kind]], mark: str
) -> tuple[list[Part], list[Range]] | None:
    """Return the contents in a text, and what {% generation %} encloses.

    Returns None if the marked text is another text, or if marks came apart.

    Args:
        rendered: The text with marks.
        text: The text without marks.
        contents: The message and the kind of each content.
        mark: The character that begins a mark.
    """
    split = _MARK[mark].split(rendered)
    pieces = split[::4]
    if "".join(pieces) != text:
        return None
    parts: list[Part] = []
    said: list[Range] = []
    start, begun, opened = 0, -1, ""
    places = accumulate(map(len, pieces))
    for number, bracket, tag, at in zip(
        split[1::4], split[2::4], split[3::4], places, strict=False
    ):
        if bracket == "(" and not opened:
            opened, start = number, at
        elif bracket == ")" and number == opened:
            content = int(number)
            parts.append(Part(start, at, *contents[content], content))
            opened = ""
        elif tag == _BEGIN and begun < 0:
            begun = at
        elif tag == _END and begun >= 0:
            said.append((begun, at))
            begun = -1
        else:
            return None
    return None if opened or begun >= 0 else (parts, said)


def any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of some tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


COUNTS = ("no_stop", "unmarked", "unproved", "removed_thinking", "removed_text")
"""Names of the counts of a conversation; see `docs/format.md`."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation: its text, and what each character is. Places are characters."""

    text: str = ""
    starts: tuple[int, ...] = (0,)
    """Where each stretch of one kind begins, ascending from 0; it may be empty."""
    kinds: tuple[int, ...] = (Kind.TEMPLATE,)
    """The kind of each stretch."""
    messages: tuple[Range, ...] = ()
    """What belongs to each message."""
    spans: tuple[Range, ...] = ()
    """All that belongs to a message, ascending."""
    owners: tuple[int, ...] = ()
    """The number of the message of each span, from 0; -1 if it is not certain."""
    counts: tuple[int, ...] = (0,) * len(COUNTS)
    """What users should know, by `COUNTS`."""
    contents: tuple[Range, ...] = ()
    """The known contents, ascending."""


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

    def _bytes_of(self, places: list[tuple[int, ...]] | list[tuple[Range, ...]]) -> np.ndarray:
        """Return the byte of places in each conversation, shape (P,) or (P, 2)."""
        counts = [len(each) for each in places]
        characters = np.array([*chain.from_iterable(places)], np.int64)
        firsts = np.repeat(self._first, counts)
        found: np.ndarray = self._byte_of[
            characters + firsts.reshape(-1, *(1,) * (characters.ndim - 1))
        ]
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
        values = np.frombuffer(b"".join(bytes(each.kinds) for each in self._rendered), np.uint8)
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
        messages = self._bytes_of([each.messages for each in self._rendered]).reshape(-1, 2)
        first, stop = messages.T
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
        contents = self._bytes_of([each.contents for each in self._rendered]).reshape(-1, 2)
        begins, ends = contents[:, 0], np.append(contents[:, 1], len(self._texts) + 1)
        begins = np.append(begins, len(self._texts) + 1)

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
        edges = self._bytes_of([each.spans for each in self._rendered]).reshape(-1, 2)
        tokens = iter(np.searchsorted(self._starts, edges).tolist())
        for rendered, numbers in zip(self._rendered, of_messages, strict=True):
            for owner, (first, stop) in zip(rendered.owners, tokens, strict=False):
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


def laid_out(
    text: str,
    said: list[Range],
    parts: list[Part],
    turns: list[int],
    missing: tuple[int, ...],
    special: re.Pattern[str],
    unlearnt: Set[int] = frozenset(),
) -> Rendered:
    """Return a text with what each part of it is.

    Args:
        text: The rendered conversation.
        said: What the assistant says.
        parts: The contents in the text.
        turns: The numbers of the messages of the assistant.
        missing: The counts that are known, after `no_stop` and `unmarked`.
        special: Matches a special token.
        unlearnt: The messages of the assistant that no loss counts. They get the kind `template`.

    Raises:
        Unusable: It is not certain where these are.
    """
    own = [part for part in first_said(parts) if part[3] is not _TEMPLATE]
    blank = text if len(own) == len(parts) else blanked(text, parts)
    has_thoughts = _END_OF_THOUGHT in blank
    spans: list[Range] = []
    owners: list[int] = []
    if len(turns) != len(said):
        if unlearnt:
            raise Unusable("it is not certain which message has the weight 0")
        turns = [-1] * len(said)
    begins: list[tuple[int, Kind]] = [(0, _TEMPLATE)]
    messages: list[Range] = []
    no_stop = unmarked = at = 0
    shown = -1
    own.append(Part(len(text) + 1, 0, -1, _TEMPLATE, -1))
    for turn, (start, end) in zip([*turns, -1], [*said, (len(text), len(text))], strict=True):
        while own[at][0] < start:
            begin, stop, message, kind, _ = own[at]
            at += 1
            if kind >= _TEXT:
                unmarked += 1
                continue
            begins += (begin, kind), (stop, _TEMPLATE)
            spans.append((begin, stop))
            owners.append(message)
            if message != shown:
                messages.append((begin, stop))
            shown = message
        if start == end:
            continue
        first = at
        while own[at][0] < end:
            at += 1
        if turn not in unlearnt:
            found = _kinds_of(blank, own[first:at], (start, end), special, has_thoughts)
            no_stop += found[-1][1] is not Kind.STOP
            begins += found
            begins.append((end, _TEMPLATE))
        messages.append((start, end))
        spans.append((start, end))
        owners.append(turn)
    starts, kinds = zip(*begins, strict=True)
    return Rendered(
        text=text,
        starts=starts,
        kinds=kinds,
        messages=tuple(messages),
        spans=tuple(spans),
        owners=tuple(owners),
        counts=(no_stop, unmarked, *missing),
        contents=tuple([part[:2] for part in parts]),
    )


def _kinds_of(
    blank: str, own: list[Part], said: Range, special: re.Pattern[str], has_thoughts: bool
) -> list[tuple[int, Kind]]:
    """Return where kinds begin in an assistant message. The last is a stop token, if one ends it.

    What the template writes before a content has the kind of the content, except the end of the
    thinking before it. No thinking follows the name of a function.
    """
    begins = []
    (at, end), kind = said, _TEXT
    for part in own:
        begins.append((at, _THINKING if kind is _THINKING else part.kind))
        thought = _end_of_thought(blank, at, part.start) if has_thoughts else 0
        if thought and kind is not Kind.CALL:
            begins.append((at, _THINKING))
            at = thought
        elif kind is _THINKING and part.kind is _TEXT:
            at = part.start
        begins.append((at, part.kind))
        at, kind = part.end, part.kind
    match = None
    for match in special.finditer(blank, at, end):  # noqa: B007 - the last one
        pass
    has_stop = match is not None and not blank[match.end() : end].strip()
    stop = match.start() if match and has_stop else end
    thought = _end_of_thought(blank, at, stop) if has_thoughts else 0
    if thought and kind is not Kind.CALL:
        begins.append((at, _THINKING))
        at = thought
        kind = _TEXT if kind is _THINKING else kind
    begins.append((at, kind))
    if has_stop:
        begins.append((stop, Kind.STOP))
    return begins


def _end_of_thought(blank: str, start: int, stop: int) -> int:
    """Return where the last end of thinking, and the white space behind it, ends; 0 without one."""
    found = blank.rfind(_END_OF_THOUGHT, start, stop)
    if found < 0:
        return 0
    behind = blank[found + len(_END_OF_THOUGHT) : stop]
    return stop - len(behind.lstrip())
