"""Find the contents of a conversation in its text, without a second rendering.

Marks show where the contents of some conversations are, and so what a template writes between two
contents. The text of another conversation is taken apart from its end: what stands between two
contents, the content, and so on. If all of the text fits, the contents are where they fit. If not,
marks find them, and what stands between them is learnt.

What stands between two contents depends on their messages' roles, and on the empty or unwritten
contents between them. Conversations with thinking or with contents of several parts need marks.
"""

from json.encoder import encode_basestring
from typing import Any, NamedTuple

from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.tools.encoding.chat_messages import ROLES, Conversation
from tokenfeed.tools.encoding.chat_parts import Part, Range
from tokenfeed.tools.encoding.chat_renderer import to_json

_DETAIL = (-1, Kind.TEMPLATE)
"""The message and the kind of ids of calls and of texts in arguments."""
_SEEN = 32
"""Characters before the first content that must be known if the text before it has tools."""
_MOST_MISSES = 50
"""Conversations that do not fit, beyond those that do, before no more are tried."""


class Content(NamedTuple):
    """A text that a template may write as it is."""

    name: str
    """What the text is in its message, and the role: contents with one name are written alike."""
    text: str
    message: int
    kind: Kind
    inner: tuple[Range, ...] | None = None
    """The places of texts in arguments, which are the contents then; None: the text itself."""


def contents_of(conversation: Conversation) -> list[Content] | None:
    """Return the contents in the order of `replaced`; None if only marks can find them."""
    found: list[Content] = []
    for number, message in enumerate(conversation.messages):
        role, text = message["role"], message.get("content") or ""
        kind = ROLES[role]
        if not isinstance(text, str) or (kind is Kind.TEXT and "</think>" in text):
            return None
        found.append(Content(role, text, number, kind))
        if len(message) == 2:
            continue
        if "thinking" in message:
            return None
        if kind is Kind.TEXT and (calls := message.get("tool_calls")):
            try:
                _add_calls(calls, number, found)
            except (KeyError, TypeError):
                return None
        if isinstance(id_ := message.get("tool_call_id"), str):
            found.append(Content("answered", id_, *_DETAIL))
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
        found += (Content("id", each, *_DETAIL) for each in ids if isinstance(each, str))
        found.append(Content("next" if place else "call", function["name"], number, Kind.CALL))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            found.append(Content("written", arguments, *_DETAIL))
        elif arguments is not None:
            pieces: list[str] = []
            places: list[Range] = []
            _write(arguments, pieces, places, 0)
            found.append(Content("arguments", "".join(pieces), *_DETAIL, tuple(places)))


def _write(value: Any, pieces: list[str], places: list[Range], at: int) -> int:
    """Write a value as JSON, as `tojson` does, note the places of its texts, and return its end."""

    def add(piece: str) -> None:
        nonlocal at
        pieces.append(piece)
        at += len(piece)

    if isinstance(value, str):
        text = encode_basestring(value)
        if value:
            places.append((at + 1, at + len(text) - 1))
        add(text)
    elif isinstance(value, dict):
        add("{")
        for number, (key, each) in enumerate(value.items()):
            add(f"{', ' if number else ''}{encode_basestring(key)}: ")
            at = _write(each, pieces, places, at)
        add("}")
    elif isinstance(value, list):
        add("[")
        for number, each in enumerate(value):
            if number:
                add(", ")
            at = _write(each, pieces, places, at)
        add("]")
    else:
        add(to_json(value))
    return at


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
        for name, content, message, kind, inner in reversed(contents):
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
            if inner is None:
                parts.append(Part(at, end, message, kind, len(parts)))
            else:
                for a, b in reversed(inner):
                    parts.append(Part(at + a, at + b, message, kind, len(parts)))
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
        left, before, at = iter([*parts, None]), "tools" if has_tools else "", 0
        part = next(left)
        found: dict[tuple[str, str], str] = {}
        unwritten: set[str] = set()
        skipped = ""
        for name, content, message, kind, inner in contents:
            if not content:
                skipped += f"{name}-"
                continue
            if inner:
                start = (part.start if part else 0) - inner[0][0]
            elif inner is not None:
                start = text.find(content, at, part.start if part else len(text))
            else:
                start = part.start if part else -1
            end = start + len(content)
            expected = [(start + a, start + b) for a, b in ((0, len(content)),) if inner is None]
            expected += [(start + a, start + b) for a, b in inner or ()]
            is_here = start >= at and text[start:end] == content
            taken = 0
            while is_here and taken < len(expected):
                is_here = part is not None and part[:4] == (*expected[taken], message, kind)
                part, taken = (next(left), taken + 1) if is_here else (part, taken)
            if not is_here:
                if taken or message >= 0:
                    return
                unwritten.add(name)
                skipped += f"{name}-"
                continue
            found[before, skipped + name] = text[at:start]
            before, at, skipped = name, end, ""
        if part is None:
            found[before, f"{skipped}end"] = text[at:]
            (first,) = (key for key in found if key[0] in ("", "tools"))
            if has_tools:
                found[first] = found[first][-_SEEN:]
            self._between |= found
            self._unwritten = self._unwritten - {each.name for each in contents} | unwritten
