"""Where the contents of messages are in a rendered conversation, and what each token of it is.

Contents are found by a second rendering with marks, such as `DEL 3 (`, around each content. If its
text without the marks equals the text rendered without them, the marks are right. Otherwise the
template changes its output by the contents, and their places stay unknown.

A second rendering takes as long as the first one, so most conversations have none. Marks show where
the contents of some conversations are, and so what a template writes between two contents. The text
of another conversation is taken apart from its end: what stands between two contents, the content,
and so on. If all of the text fits, the contents are where they fit. If not, marks find them, and
what stands between them is learnt.

What stands between two contents depends on their messages' roles, and on the empty or unwritten
contents between them. Conversations with thinking or with contents of several parts need marks.

Stop tokens and ends of thinking are searched in the text without the contents, which are blanked:
an answer or an argument of a call may contain their text.
"""

import functools
import re
from collections.abc import Callable, Sequence, Set
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.kinds import BEGINS, Kind
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.encoding.chat_messages import ROLES, Conversation, Message
from tokenfeed.tools.encoding.chat_renderer import to_json

MARKS = ("\x7f", "\U00100000")
"""Characters that can begin a mark: the first that a text lacks. `tojson` writes both as they are,
and texts of ASCII stay short with the first one."""
_MARK = {mark: re.compile(rf"{mark}(\d+)([()])") for mark in MARKS}
_SEEN = 32
"""Characters before the first content that must be known if the text before it has tools."""
_MOST_MISSES = 50
"""Conversations that do not fit, beyond those that do, before no more are tried."""
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


def mark_for(text: str) -> str | None:
    """Return a character for marks that a text lacks; None if it has all."""
    return next((mark for mark in MARKS if mark not in text), None)


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
) -> list[Part] | None:
    """Return the contents in a text; None if the marked text is another one, or marks came apart.

    Args:
        rendered: The text with marks.
        text: The text without marks.
        contents: The message and the kind of each content.
        mark: The character that begins a mark.
    """
    split = _MARK[mark].split(rendered)
    pieces = split[::3]
    if "".join(pieces) != text:
        return None
    parts: list[Part] = []
    start, opened = 0, ""
    places = accumulate(map(len, pieces))
    for number, bracket, at in zip(split[1::3], split[2::3], places, strict=False):
        if bracket == "(" and not opened:
            opened, start = number, at
        elif bracket == ")" and number == opened:
            content = int(number)
            parts.append(Part(start, at, *contents[content], content))
            opened = ""
        else:
            return None
    return None if opened else parts


Write = Callable[[str, int, Kind], str]
"""Takes a content, the number of its message, and its kind. Returns what stands in its place.

The number of ids, and of texts in arguments, is -1.
"""


def replaced(message: Message, number: int, write: Write, *, details: bool) -> Message:
    """Return a message with other contents. White space around thinking is not part of them.

    With `details`, ids of calls and texts in arguments are contents too.
    """
    plain = message.get("content")
    if len(message) == 2 and isinstance(plain, str) and "</think>" not in plain:  # most of them
        return {**message, "content": write(plain, number, ROLES[message["role"]])}

    def content(text: str) -> str:
        before, _, after = text.partition("<think>")
        inner, closing, rest = after.partition("</think>")
        if kind is not Kind.TEXT or before.strip() or not closing:
            return write(text, number, kind)
        thinking, answer = inner.strip(), rest.lstrip()
        spaces = inner.split(thinking) if thinking else [inner, ""]
        marked = write(thinking, number, Kind.THINKING)
        closing += rest[: len(rest) - len(answer)]
        opening = f"{before}<think>{spaces[0]}"
        return f"{opening}{marked}{spaces[1]}{closing}{write(answer, number, kind)}"

    def call(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        new = with_id(given, "id")
        if "function" in new:
            new["function"] = call(new["function"])
        if isinstance(name := new.get("name"), str):
            new["name"] = write(name, number, Kind.CALL)
        if details and "arguments" in new:
            new["arguments"] = each_text(new["arguments"])
        return new

    def each_text(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: each_text(each) for key, each in value.items()}
        if isinstance(value, list):
            return [*map(each_text, value)]
        return write(value, -1, Kind.TEMPLATE) if isinstance(value, str) else value

    def with_id(given: dict[str, Any], key: str) -> dict[str, Any]:
        if details and isinstance(id_ := given.get(key), str):
            return {**given, key: write(id_, -1, Kind.TEMPLATE)}
        return dict(given)

    new, kind = dict(message), ROLES[message["role"]]
    if kind is Kind.TEXT and isinstance(thinking := message.get("reasoning_content"), str):
        new["reasoning_content"] = write(thinking, number, Kind.THINKING)
        if message["thinking"] == thinking:
            new["thinking"] = new["reasoning_content"]
    if isinstance(given := message.get("content"), str):
        new["content"] = content(given)
    elif given is not None:
        new["content"] = [{**part, "text": content(part["text"])} for part in given]
    if kind is Kind.TEXT and isinstance(calls := message.get("tool_calls"), list):
        new["tool_calls"] = [call(given) for given in calls]
    return with_id(new, "tool_call_id")


Content = tuple[str, str, int, Kind]
"""A name, a text that a template may write as it is, the number of its message, and its kind.

The name is the role, or what else the text is in its message: contents with one name are written
alike. Ids and arguments have the message -1, as in `marked`."""


def contents_of(conversation: Conversation) -> list[Content] | None:
    """Return the contents in the order of `replaced`; None if only marks can find them.

    The arguments of a call are one content here, written by `tojson`.
    """
    found: list[Content] = []
    for number, message in enumerate(conversation.messages):
        role, text = message["role"], message.get("content") or ""
        kind = ROLES[role]
        if not isinstance(text, str) or (kind is Kind.TEXT and "</think>" in text):
            return None
        found.append((role, text, number, kind))
        if len(message) == 2 and "content" in message:
            continue
        if "thinking" in message:
            return None
        if kind is Kind.TEXT and (calls := message.get("tool_calls")):
            try:
                _add_calls(calls, number, found)
            except (KeyError, TypeError, RecursionError):
                return None
        if isinstance(id_ := message.get("tool_call_id"), str):
            found.append(("answered", id_, -1, Kind.TEMPLATE))
    return found


def _add_calls(calls: list[Any], number: int, found: list[Content]) -> None:
    """Add the contents of calls.

    Raises:
        KeyError: A call has names or arguments twice.
        TypeError: A value of the arguments is no value of JSON.
    """
    for place, call in enumerate(calls):
        function = call.get("function") or call
        if function is not call and ("name" in call or "arguments" in call):
            raise KeyError
        ids = [given.get("id") for given in ((call,) if function is call else (call, function))]
        found += (("id", each, -1, Kind.TEMPLATE) for each in ids if isinstance(each, str))
        found.append(("next" if place else "call", function["name"], number, Kind.CALL))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            found.append(("written", arguments, -1, Kind.TEMPLATE))
        elif arguments is not None:
            found.append((_ARGUMENTS, to_json(arguments), -1, Kind.TEMPLATE))


_ARGUMENTS = "arguments"
"""The name of the contents in which marks stand around each text."""


class KnownText:
    """What a template writes between contents, in the conversations of one batch.

    A batch begins with nothing known, so its result does not depend on other batches.
    """

    def __init__(self) -> None:
        self._between: dict[tuple[str, str], str] = {}
        """The text before what follows a content, by the names of the two. The name of what follows
        has the names of empty and unwritten contents before it; "" is the beginning, `end` the
        end."""
        self._unwritten: set[str] = set()
        """Names of contents that the template leaves out, such as the ids of calls."""
        self._misses = 0

    @property
    def is_useful(self) -> bool:
        """Whether conversations may fit."""
        return self._misses < _MOST_MISSES

    def fit(self, text: str, contents: list[Content], *, has_tools: bool) -> list[Part] | None:
        """Return the contents in a text; None if the text does not fit."""
        parts = self._fit(text, contents, has_tools=has_tools)
        self._misses = self._misses + 1 if parts is None else max(self._misses - 1, 0)
        return parts

    def _fit(self, text: str, contents: list[Content], *, has_tools: bool) -> list[Part] | None:
        parts: list[Part] = []
        at, follows, between, unwritten = len(text), "end", self._between, self._unwritten
        for name, content, message, kind in reversed(contents):
            if not content or name in unwritten:
                follows = f"{name}-{follows}"
                continue
            piece = between.get((name, follows))
            if piece is None or not text.endswith(piece, 0, at):
                return None
            at -= len(piece)
            if not text.endswith(content, 0, at):
                return None
            end, at, follows = at, at - len(content), name
            parts.append(Part(at, end, message, kind, len(parts)))
        first = between.get(("tools" if has_tools else "", follows))
        if first is None or not (text.endswith(first, 0, at) if has_tools else text[:at] == first):
            return None
        parts.reverse()
        return parts

    def learn(
        self, text: str, contents: list[Content], parts: list[Part], *, has_tools: bool
    ) -> None:
        """Learn what stands between contents that were found by marks.

        Nothing is learnt if the template writes contents in another order, or more than once.
        """
        before, at = "tools" if has_tools else "", 0
        waiting = [*reversed(parts)]
        found: dict[tuple[str, str], str] = {}
        unwritten: set[str] = set()
        skipped = ""
        for name, content, message, kind in contents:
            if not content:
                skipped += f"{name}-"
                continue
            start = waiting[-1].start if waiting else -1
            if name == _ARGUMENTS:
                own = (part.start for part in reversed(waiting) if part.message >= 0)
                start = text.find(content, at, next(own, len(text)))
                end = start + len(content)
                is_here = start >= 0
                while is_here and waiting and start <= waiting[-1].start <= waiting[-1].end <= end:
                    waiting.pop()
            else:
                end = start + len(content)
                is_here = bool(waiting) and waiting[-1][:4] == (start, end, message, kind)
                is_here = is_here and start >= at and text[start:end] == content
                if is_here:
                    waiting.pop()
            if not is_here:
                if message >= 0:
                    return
                unwritten.add(name)
                skipped += f"{name}-"
                continue
            found[before, skipped + name] = text[at:start]
            before, at, skipped = name, end, ""
        if not waiting:
            found[before, f"{skipped}end"] = text[at:]
            (first,) = (key for key in found if key[0] in ("", "tools"))
            if has_tools:
                found[first] = found[first][-_SEEN:]
            self._between |= found
            self._unwritten = self._unwritten - {name for name, *_ in contents} | unwritten


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
"""Short texts whose kinds are remembered: templates repeat the same few."""


@functools.lru_cache(_TEXTS)
def _before_content(text: str, before: Kind, after: Kind) -> Stretches:
    """Return the kinds of what stands before a content in a message of the assistant.

    It has the kind of the content, except the end of the thinking before it. No thinking follows
    the name of a function.

    Args:
        text: The blank text since the content before, or since the beginning of the message.
        before: The kind of the content before; `TEXT` without one.
        after: The kind of the content.
    """
    if before is not _CALL and (thought := _end_of_thought(text)):
        return (0, _THINKING), (thought, after)
    return ((0, _THINKING if before is _THINKING and after is _TEXT else after),)


AtEnd = Callable[[str, Kind], Stretches]


def at_end_of(special: re.Pattern[str]) -> AtEnd:
    """Return a function that finds the kinds of the end of a message of the assistant, from its
    blank text and the kind before it. The last is a stop token, if one ends the message.

    Args:
        special: A pattern of the special tokens. One of them ends what the assistant says.
    """

    @functools.lru_cache(_TEXTS)
    def at_end(text: str, before: Kind) -> Stretches:
        stop = len(text)
        for match in special.finditer(text):
            stop = len(text) if text[match.end() :].strip() else match.start()
        found = [(0, before)]
        if before is not _CALL and (thought := _end_of_thought(text[:stop])):
            found = [(0, _THINKING), (thought, _TEXT if before is _THINKING else before)]
        return (*found, (stop, Kind.STOP)) if stop < len(text) else (*found,)

    return at_end


def laid_out(
    text: str,
    said: list[Range],
    parts: list[Part],
    turns: list[int],
    missing: tuple[int, ...],
    at_end: AtEnd,
    unlearnt: Set[int] = frozenset(),
) -> Rendered:
    """Return a text with what each part of it is.

    Args:
        text: The rendered conversation.
        said: What the assistant says.
        parts: The contents in the text.
        turns: The numbers of the messages of the assistant.
        missing: The counts that are known, after `no_stop` and `unmarked`.
        at_end: See `at_end_of`.
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
                for offset, each in _before_content(blank[place:begin], before, kind):
                    starts.append(place + offset)
                    kinds.append(each)
                starts.append(begin)
                kinds.append(kind)
            place, before = stop, kind
            at += 1
            begin, stop, message, kind, _ = own[at]
        if is_learnt:
            found = at_end(blank[place:end], before)
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
