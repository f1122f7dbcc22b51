"""Find where the contents of messages are in a rendered conversation.

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
"""

import re
from itertools import accumulate
from typing import Any, NamedTuple

from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.tools.encoding.chat_messages import ROLES, Conversation, replaced
from tokenfeed.tools.encoding.chat_parts import Part, Range
from tokenfeed.tools.encoding.chat_renderer import to_json

MARKS = ("\x7f", "\U00100000")
"""Characters that can begin a mark: the first that a text lacks. `tojson` writes both as they are,
and texts of ASCII stay short with the first one."""
_BEGIN, _END = "[", "]"
_MARK = {mark: re.compile(rf"{mark}(?:(\d+)([()])|([\[\]]))") for mark in MARKS}
_SEEN = 32
"""Characters before the first content that must be known if the text before it has tools."""
_MOST_MISSES = 50
"""Conversations that do not fit, beyond those that do, before no more are tried."""


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
        if len(message) == 2:
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
                is_here = is_here and not (waiting and waiting[-1].start < end)
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
