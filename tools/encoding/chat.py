"""Conversations: rendered by a chat template, and where each part is in the rendered text.

A conversation is rendered whole, and encoded once. What the assistant says is found in one of
three ways, the first that applies:

    generation  the template encloses it in {% generation %}
    prompt      what the template adds for `add_generation_prompt` stands before it, and a special
                token after it
    prefix      the conversation up to each message is rendered, and proved to be a prefix

The contents of messages are found by rendering once more with marks, characters for private use,
around each. If that text without the marks equals the text rendered without them, the marks are
right. Otherwise the template changes its output by the contents, and the parts of other roles stay
unknown.

Most conversations need no rendering: they have the layout of an earlier conversation. See
`ChatTemplate.render`.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise, product
from typing import Any, NamedTuple

import jinja2
import msgspec
import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.format.kinds import BEGINS, Kind
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.encoding.jinja_sandbox import (
    MARKS,
    MarkedObject,
    Use,
    Watch,
    compiled,
    generated_by,
    marks_from,
    to_json,
)

Message = dict[str, Any]

_ROLES: dict[str, Kind] = {
    "system": Kind.SYSTEM,
    "developer": Kind.SYSTEM,
    "user": Kind.USER,
    "assistant": Kind.TEXT,
    "tool": Kind.TOOL,
    "function": Kind.TOOL,
    "ipython": Kind.TOOL,
    "environment": Kind.TOOL,
}
_SHARE_GPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
"""Roles that have another name in the ShareGPT layout."""
_THINKING = ("reasoning_content", "thinking", "reasoning")
"""Names that records have for thinking. Templates read the first two."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The variables that a chat template receives."""

    messages: list[Message]
    tools: list[Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the template, such as `enable_thinking`."""


def read_messages(value: Any) -> list[Message]:
    """Return messages in the layout that templates read.

    Raises:
        Unusable: Names the first message that is wrong, and why.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unusable("is a text, expected a list of messages") from None
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else type(value).__name__
        raise Unusable(f"is {shown}, expected a list of messages")
    return [_message(raw, f"message {number}") for number, raw in enumerate(value, 1)]


def _message(raw: Any, name: str) -> Message:
    if not isinstance(raw, dict):
        raise Unusable(f"has {name} that is {type(raw).__name__}, expected role and content")
    message = raw
    if None in raw.values():
        message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _from_share_gpt(message, name)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        expected = "system, user, assistant or tool"
        raise Unusable(f"has {name} with the role {role!r:.40}, expected {expected}")
    for key in _THINKING:
        if isinstance(thinking := message.get(key), str):
            message = {"thinking": thinking, **message, "reasoning_content": thinking}
            break
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise Unusable(f"has {name} with a part that is not text")
    elif not isinstance(content, str):
        if content is not None:
            raise Unusable(f"has {name} whose content is {type(content).__name__}, expected text")
        if not message.get("tool_calls") and "thinking" not in message:
            raise Unusable(f"has {name} ({role}) without content")
    return message


def _from_share_gpt(raw: Message, name: str) -> Message:
    role, value = raw["from"], raw.get("value")
    others = {key: given for key, given in raw.items() if key not in ("from", "value")}
    if role != "function_call":
        role = _SHARE_GPT.get(role, role) if isinstance(role, str) else role
        content = {} if value is None else {"content": value}
        return {"role": role, **content, **others}
    try:
        call = json.loads(value or "")
    except (TypeError, ValueError, RecursionError):
        raise Unusable(f"has {name} with a function call that is not JSON") from None
    calls = call if isinstance(call, list) else [call]
    functions = [{"type": "function", "function": each} for each in calls]
    return {"role": "assistant", "tool_calls": functions, **others}


_FIRST_MARKS = (0xF0000, 0x100000)
"""Two planes of characters for private use, in case a conversation has such characters."""
_PRIVATE = re.compile(rb"\xf3[\xb0-\xbf]|\xf4")
"""Matches such characters in UTF-8."""
_MOST_LAYOUTS = 10_000
"""Layouts that are kept."""
_TRIED = 500
"""Conversations before layouts are given up, if most of them had a layout of their own."""
_MOST_ALTERNATIVES = 8
"""Layouts of conversations that differ only in contents."""
_THOUGHT = re.compile(r"(\s*<think>)(.*?)(</think>)(.*)", re.DOTALL)
_END_OF_THOUGHT = re.compile(r".*</think>\s*", re.DOTALL)


class _Field(NamedTuple):
    """A content of a message, as it was marked."""

    message: int
    kind: Kind


class _Part(NamedTuple):
    """A content of a message in the rendered text."""

    start: int
    end: int
    message: int
    kind: Kind
    content: int
    """The number of the content."""


class _Said(NamedTuple):
    """What the assistant says in one message, its stop token included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The meaning of each piece of a rendered conversation. Conversations may share a layout."""

    pieces: tuple[bytes | int, ...]
    """Texts of the template in UTF-8, and numbers of contents."""
    starts: np.ndarray
    """The piece with which each stretch of one kind begins, ascending from 0, shape (K,)."""
    kinds: np.ndarray
    """The kind of each stretch, shape (K,), uint8."""
    messages: np.ndarray
    """First piece and last piece + 1 of what belongs to each message, shape (M, 2)."""
    spans: np.ndarray
    """First piece and last piece + 1 of all that belongs to a message, ascending, shape (S, 2)."""
    owners: tuple[int, ...]
    """The number of the message of each span, from 0; -1 if it is not certain."""
    counts: tuple[int, ...]
    """What users should know, by `COUNTS`."""


COUNTS = ("no_stop", "unmarked", "unproved", "removed_thinking", "removed_text")
"""Names of the counts of a layout; see `docs/format.md`."""


_NO_PIECES = np.empty((0, 2), np.int64)
EMPTY = Layout(
    (), np.zeros(1, np.int64), np.zeros(1, np.uint8), _NO_PIECES, _NO_PIECES, (), (0,) * 5
)
"""The layout of an empty text."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    layout: Layout
    pieces: list[bytes]
    """The text in UTF-8."""


class TokensOfPieces:
    """The tokens of R rendered conversations, and the pieces in which they begin."""

    def __init__(self, rendered: list[Rendered], starts: np.ndarray, ends: np.ndarray) -> None:
        """Find the byte at which each piece begins.

        Args:
            rendered: The conversations.
            starts: Where each token begins, in bytes over all conversations, shape (N,).
            ends: Where each token ends, shape (N,).
        """
        self._layouts = [each.layout for each in rendered]
        self._starts, self._ends = starts, ends
        sizes = [len(piece) for each in rendered for piece in each.pieces]
        self._places = offsets_of(np.array(sizes, np.int64))
        self._first_piece = offsets_of(np.array([len(each.pieces) for each in rendered], np.int64))

    def _bytes_of(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the byte at which pieces begin, given their numbers in each conversation."""
        firsts = np.repeat(self._first_piece[:-1], [len(each) for each in pieces])
        numbers = np.concatenate(pieces)
        places: np.ndarray = self._places[numbers + firsts.reshape(-1, *(1,) * (numbers.ndim - 1))]
        return places

    def kinds(self, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the kinds column, and counts of each conversation.

        A token has the kind of its first character. Tokens that end in characters of another kind
        are counted.

        Args:
            lengths: Tokens of each conversation, shape (R,).
        """
        starts, num_rows = self._starts, len(self._layouts)
        begins = self._bytes_of([each.starts for each in self._layouts])
        values = np.concatenate([each.kinds for each in self._layouts])
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
        found = np.array([each.counts for each in self._layouts], np.int64)
        counts |= dict(zip(COUNTS, found.T, strict=True))
        first, stop = self._bytes_of([each.messages for each in self._layouts]).T
        tokens = np.searchsorted(starts, first)
        tokens, stop = tokens[tokens < len(starts)], stop[tokens < len(starts)]
        kinds[tokens[starts[tokens] < stop]] |= BEGINS
        return kinds, counts

    def numbers(self, of_messages: list[list[float]]) -> np.ndarray:
        """Return for each token the number of the message that its first character belongs to.

        The number of the template's tokens is 0.

        Args:
            of_messages: The numbers of the messages of each conversation; empty for an empty text.
        """
        found = np.zeros(len(self._starts))
        edges = self._bytes_of([each.spans for each in self._layouts])
        tokens = iter(np.searchsorted(self._starts, edges).tolist())
        for layout, numbers in zip(self._layouts, of_messages, strict=True):
            for owner, (first, stop) in zip(layout.owners, tokens, strict=False):
                found[first:stop] = numbers[owner]
        return found


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template and its tokenizer's special tokens."""

    source: str
    special_tokens: tuple[str, ...]
    """The special tokens of the tokenizer. One of them ends what the assistant says."""
    variables: dict[str, Any]
    """Variables for every conversation: `bos_token`, `eos_token` and those that a user gives."""

    @property
    def with_variables(self) -> str:
        """The template with the values of the variables that it names, for other programs.

        A line break after a block is dropped, so the lines in front change no text.
        """
        lines = []
        for name, value in self.variables.items():
            if re.search(rf"\b{re.escape(name)}\b", self.source):
                literal = _literal(value)
                given = "" if name.endswith("_token") else f" {name} if {name} is defined else"
                lines.append(f"{{% set {name} ={given} {literal} %}}\n")
        return "".join(lines) + self.source

    def check(self) -> None:
        """Compile the template.

        Raises:
            Unusable: It is not valid.
        """
        with _named("is not valid"):
            compiled(self.source)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without what other processes find out for themselves."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation and find its parts.

        A conversation has the layout of an earlier conversation that differs in contents only, if
        the template finds the same in both: see `Watch`.

        Raises:
            Unusable: The template fails, or it is not certain what the assistant says.
        """
        known, shapes = self._known, []
        for inside in (False, True):
            shape, contents = _shape(conversation, known.slots, inside=inside)
            if shape is None:
                return self._render_first(conversation)[0]
            for uses, layout in known.layouts.get(shape, ()):
                texts = uses.texts(contents)
                if all(use.is_same(texts) for use in uses.of_texts):
                    pieces = [texts[p].encode() if isinstance(p, int) else p for p in layout.pieces]
                    if _PRIVATE.search(b"".join(pieces)):
                        return self._render_first(conversation)[0]
                    known.again += 1
                    return Rendered(layout, pieces)
            shapes.append(shape)
        known.new += 1
        rendered, found = self._render_first(conversation)
        if found is not None and found.uses is not None:
            if len(known.layouts) > _MOST_LAYOUTS:
                known.layouts.clear()
            alternatives = known.layouts.setdefault(shapes[found.inside], [])
            if len(alternatives) < _MOST_ALTERNATIVES:
                alternatives.append((found.uses, rendered.layout))
        return rendered

    def _render_first(self, conversation: Conversation) -> "tuple[Rendered, _Found | None]":
        """Render a conversation, and return it with its contents, if they are certain."""
        text, generated = self._render(conversation, conversation.messages)
        found = self._found(conversation, text)
        parts = [] if found is None else found.parts
        said: list[_Said] | None
        if self._has_generation:
            said = [_Said(start, end) for start, end in generated if end > start]
        else:
            own = [part for part in parts if part.kind is not Kind.TEMPLATE]
            said = self._by_prompt(conversation, text, own) if found is not None else None
            if said is None:
                said = self._by_prefix(conversation, text)
                found = found and found._replace(uses=None)
        turns = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        missing = (1, 0, 0) if found is None else (0, *found.removed)
        rendered = self._laid_out(text, said, parts, turns, missing)
        if sum(isinstance(piece, int) for piece in rendered.layout.pieces) < len(parts):
            found = found and found._replace(uses=None)
        return rendered, found

    @functools.cached_property
    def _known(self) -> "_Known":
        return _Known()

    @functools.cached_property
    def _has_generation(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    @functools.cached_property
    def special(self) -> re.Pattern[str]:
        """Matches a special token."""
        return _any_of(self.special_tokens)

    def _render(
        self, conversation: Conversation, messages: list[Message], *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and what {% generation %} encloses."""
        with _named("the template fails"):
            return generated_by(
                compiled(self.source), self._variables(conversation, messages, prompt=prompt)
            )

    def _variables(
        self, conversation: Conversation, messages: list[Message], *, prompt: bool = False
    ) -> dict[str, Any]:
        variables = {**self.variables, **conversation.arguments}
        variables |= {"tools": conversation.tools, "documents": variables.get("documents")}
        return variables | {"messages": messages, "add_generation_prompt": prompt}

    def _found(self, conversation: Conversation, text: str) -> "_Found | None":
        """Find the contents in the text, and count those that are missing.

        Marks stand around a content, or inside its outer white space for templates that trim.
        Objects are in the text as JSON. If their marks change the text, fewer contents are marked.
        """
        first = next((first for first in _FIRST_MARKS if not marks_from(first).search(text)), None)
        if first is None:
            return None
        known, slots = self._known, self._known.slots
        fewer = [slots, slots - {"ids"}, frozenset[str]()]
        if conversation.tools is None and all(len(m) == 2 for m in conversation.messages):
            fewer = [slots]
        for inside, known.slots in product((False, True), dict.fromkeys(fewer)):
            has_all = known.slots is slots
            if found := self._proved(conversation, text, first, inside=inside):
                return found if has_all else found._replace(uses=None)
        known.slots = slots
        return None

    def _proved(
        self, conversation: Conversation, text: str, first: int, *, inside: bool
    ) -> "_Found | None":
        """Find the contents by marks from `first` on; None if the marks change the text."""
        known = self._known
        marked, fields, objects = _marked(conversation, first, known.slots, inside=inside)
        if 2 * len(fields) > MARKS:
            return None
        variables = self._variables(marked, marked.messages)
        watch = _watch(self.source, first) if known.is_worth_watching else None
        try:
            with _named("the template fails"):
                if watch:
                    with_marks = watch.render(variables)
                else:
                    with_marks, _ = generated_by(compiled(self.source), variables)
        except Unusable:
            return None
        if (parts := _parts(with_marks, first, text, fields)) is None:
            return None
        present = {(part.message, part.kind) for part in parts}
        missing = [each for each in {*fields} if each not in present and each.kind]
        thinking = sum(each.kind is Kind.THINKING for each in missing)
        read = {number for number, marked in objects.items() if marked.is_read}
        known.slots -= {"tools" if fields[number].message < 0 else "arguments" for number in read}
        uses = None
        if watch and watch.is_complete and not read:
            of_texts = tuple({repr(use): use for use in watch.uses}.values())
            settings = {n: marked.settings for n, marked in objects.items() if marked.settings}
            uses = _Uses(of_texts, settings)
        return _Found(parts, (thinking, len(missing) - thinking), inside, uses)

    def _by_prompt(
        self, conversation: Conversation, text: str, parts: list[_Part]
    ) -> list[_Said] | None:
        """Find what the assistant says between the generation prompt and a special token.

        Returns None unless every prompt in the text belongs to one message of the assistant, in
        their order. Templates of models that think end the prompt with `<think>`, and may write it
        only before the last message. So if there are too few prompts, the text before counts.
        """
        prompts = self._known.prompts
        key = repr((conversation.arguments, conversation.tools is None))
        for again in (False, True):
            if again or key not in prompts:
                with_prompt, _ = self._render(conversation, conversation.messages, prompt=True)
                is_added = with_prompt.startswith(text)
                prompts[key] = with_prompt[len(text) :] if is_added else ""
            prompt = prompts[key]
            for end in dict.fromkeys((len(prompt), len(prompt.partition("<think>")[0]))):
                said = end and self._after(prompt, end, conversation.messages, text, parts)
                if said:
                    return said
        return None

    def _after(
        self, prompt: str, end: int, messages: list[Message], text: str, parts: list[_Part]
    ) -> list[_Said] | None:
        """Find messages after the first `end` characters of the prompt, or all of it."""
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        heads = [*_outside(text, prompt[:end], parts)]
        if len(heads) != len(turns):
            return None
        limits = [*(head - end for head in heads[1:]), len(text)]
        rest, whole = len(prompt) - end, {*_outside(text, prompt, parts)}
        heads = [head + rest if head + rest in whole else head for head in heads]
        stops = _any_of(tuple(t for t in self.special_tokens if t not in prompt))
        said, at = [], 0
        for turn, head, limit in zip(turns, heads, limits, strict=False):
            last, until = head, limit
            while at < len(parts) and parts[at].start < limit:
                part = parts[at]
                if part.message == turn and part.start >= head:
                    last = part.end
                elif part.start >= head:
                    if part.message < turn:
                        return None
                    until = part.start
                    break
                elif messages[part.message]["role"] == "assistant":
                    return None
                at += 1
            ends = [*stops.finditer(text, last, until)]
            if not ends and until < len(text):
                return None
            eos = self.variables.get("eos_token")
            stop = next((match.end() for match in ends if match[0] == eos), 0)
            said.append(_Said(head, stop or (ends[0].end() if ends else len(text))))
        of_assistant = (part for part in parts if messages[part.message]["role"] == "assistant")
        if not all(any(s <= part.start < e for s, e in said) for part in of_assistant):
            return None
        return said

    def _by_prefix(self, conversation: Conversation, text: str) -> list[_Said]:
        """Find what the assistant says by rendering the conversation up to each message.

        Raises:
            Unusable: A shorter conversation is not rendered as a prefix of the whole.
        """
        messages, said = conversation.messages, []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            with _named(f"message {turn + 1}: the template fails for what precedes it"):
                before, _ = self._render(conversation, messages[:turn], prompt=True)
            until = text
            if turn + 1 < len(messages):
                until, _ = self._render(conversation, messages[: turn + 1])
            if not (text.startswith(until) and until.startswith(before)):
                raise Unusable(
                    f"message {turn + 1}: it is not certain where it begins and ends, because the "
                    "template renders it otherwise in a longer conversation. Use a template with "
                    "{% generation %}"
                )
            stops = self.special.finditer(until, len(before))
            ends = (stop.end() for stop in stops if not until[stop.end() :].strip())
            said.append(_Said(len(before), next(ends, len(until))))
        return said

    def _laid_out(
        self,
        text: str,
        said: list[_Said],
        parts: list[_Part],
        turns: list[int],
        missing: tuple[int, ...],
    ) -> Rendered:
        """Return a text with its layout. `turns` numbers the messages of the assistant."""
        spans: list[tuple[int, int]] = []
        owners: list[int] = []
        turns = turns if len(turns) == len(said) else [-1] * len(said)
        starts, kinds, messages = [0], [int(Kind.TEMPLATE)], []
        no_stop = unmarked = at = 0

        def begin(start: int, kind: Kind) -> None:
            if start == starts[-1]:
                kinds[-1] = int(kind)
            elif kinds[-1] != kind:
                starts.append(start)
                kinds.append(int(kind))

        own = [part for part in parts if part.kind is not Kind.TEMPLATE]

        def others(until: int) -> Iterator[_Part]:
            nonlocal at
            while at < len(own) and own[at].start < until:
                at += 1
                yield own[at - 1]

        shown = -1
        for turn, (start, end) in zip(
            [*turns, -1], [*said, _Said(len(text), len(text))], strict=True
        ):
            for part in others(start):
                if part.kind >= Kind.TEXT:
                    unmarked += 1
                    continue
                begin(part.start, part.kind)
                begin(part.end, Kind.TEMPLATE)
                spans.append((part.start, part.end))
                owners.append(part.message)
                if part.message != shown:
                    messages.append((part.start, part.end))
                shown = part.message
            if start == end:
                continue
            stop = self._stop(text, [*others(end)], start, end, begin)
            no_stop += not stop
            begin(end, Kind.TEMPLATE)
            messages.append((start, end))
            spans.append((start, end))
            owners.append(turn)
        edges = {0, len(text), *starts, *chain(*messages), *chain(*spans)}
        edges |= {edge for part in parts for edge in part[:2]}
        places = sorted(edges)
        number = {place: nth for nth, place in enumerate(places)}
        whole = (part for part in parts if number[part.end] == number[part.start] + 1)
        content_at = {number[part.start]: part.content for part in whole}
        pieces = [text[start:end].encode() for start, end in pairwise(places)]

        def pieces_at(ranges: list[tuple[int, int]]) -> np.ndarray:
            found = [number[place] for place in chain(*ranges)]
            return np.array(found, np.int64).reshape(-1, 2)

        layout = Layout(
            tuple(content_at.get(nth, piece) for nth, piece in enumerate(pieces)),
            np.array([number[start] for start in starts], np.int64),
            np.array(kinds, np.uint8),
            pieces_at(messages),
            pieces_at(spans),
            tuple(owners),
            (no_stop, unmarked, *missing),
        )
        return Rendered(layout, pieces)

    def _stop(self, text: str, own: list[_Part], start: int, end: int, begin: Any) -> bool:
        """Begin the stretches of what the assistant says; return whether a stop token ends it.

        What the template writes before a content has the kind of the content, except the end of
        the thinking before it.
        """
        at, kind = start, Kind.TEXT
        for part in own:
            begin(at, Kind.THINKING if kind is Kind.THINKING else part.kind)
            if match := _END_OF_THOUGHT.match(text, at, part.start):
                begin(at, Kind.THINKING)
                at = match.end()
            elif kind is Kind.THINKING and part.kind is Kind.TEXT:
                at = part.start
            begin(at, part.kind)
            at, kind = part.end, part.kind
        matches = [*self.special.finditer(text, at, end)]
        has_stop = bool(matches) and not text[matches[-1].end() : end].strip()
        stop = matches[-1].start() if has_stop else end
        if match := _END_OF_THOUGHT.match(text, at, stop):
            begin(at, Kind.THINKING)
            at = match.end()
            kind = Kind.TEXT if kind is Kind.THINKING else kind
        begin(at, kind)
        if has_stop:
            begin(stop, Kind.STOP)
        return has_stop


@contextmanager
def _named(problem: str) -> Iterator[None]:
    """Turn what templates raise into a reason for rejecting a record."""
    try:
        yield
    except Unusable:
        raise Unusable(problem) from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Unusable(f"{problem}: {reason[:200]}") from None
    except (AttributeError, RecursionError, OverflowError) as error:
        raise Unusable(f"{problem}: {type(error).__name__}") from None


@functools.cache
def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of some tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _outside(text: str, prompt: str, parts: list[_Part]) -> Iterator[int]:
    """Yield where each `prompt` ends that has no character in a content."""
    at = nth = 0
    while (start := text.find(prompt, at)) >= 0:
        end = start + len(prompt)
        while nth < len(parts) and parts[nth].end <= start:
            nth += 1
        if nth < len(parts) and parts[nth].start < end:
            at = start + 1
            continue
        yield end
        at = end


class _Uses(NamedTuple):
    """What a template asked of contents."""

    of_texts: tuple[Use, ...]
    settings: dict[int, tuple[Any, ...]]
    """How the template wrote objects as JSON, by the number of the content."""

    def texts(self, contents: list[Any]) -> list[str]:
        """Return contents as texts. An object that the template did not write stays an object."""
        if not self.settings:
            return contents
        return [
            to_json(content, *self.settings[number]) if number in self.settings else content
            for number, content in enumerate(contents)
        ]


@dataclass(slots=True)
class _Known:
    """What a process knows of a template."""

    slots: frozenset[str] = frozenset(("ids", "tools", "arguments"))
    """What is a content, beside texts and the names of functions: ids of calls; tools and arguments
    of calls, unless the template reads them."""
    layouts: dict[bytes, list[tuple[_Uses, Layout]]] = field(default_factory=dict)
    """Layouts so far, by the conversation without its contents."""
    prompts: dict[str, str] = field(default_factory=dict)
    """What the template adds for `add_generation_prompt`, by the arguments."""
    again: int = 0
    """Number of conversations with a known layout."""
    new: int = 0
    """Number of the other conversations."""

    @property
    def is_worth_watching(self) -> bool:
        """Whether layouts are used again. A watched template takes twice the time."""
        return self.new < _TRIED or self.again > self.new


class _Found(NamedTuple):
    """The contents in a rendered text."""

    parts: list[_Part]
    removed: tuple[int, int]
    """Messages whose thinking, and whose text, the template removed."""
    inside: bool
    """Whether a content is without its outer white space."""
    uses: _Uses | None
    """None if the text may depend on contents in other ways."""


@functools.cache
def _watch(source: str, first: int) -> Watch:
    return Watch(source, first)


Write = Callable[[Any, int, Kind], Any]
"""Takes a content, the number of its message, and its kind. Returns what stands in its place.

The number of tools and of ids is -1.
"""


def _replaced_tools(
    tools: list[Any] | None, write: Write, slots: frozenset[str]
) -> list[Any] | None:
    """Return the tools as other contents, if all are objects."""
    if tools and "tools" in slots and all(tool and isinstance(tool, dict) for tool in tools):
        return [write(tool, -1, Kind.TEMPLATE) for tool in tools]
    return tools


def _replaced(message: Message, number: int, write: Write, slots: frozenset[str]) -> Message:
    """Return a message with other contents."""

    def content(text: str) -> str:
        if kind is not Kind.TEXT or not (match := _THOUGHT.fullmatch(text)):
            return str(write(text, number, kind))
        opening, thinking, closing, rest = match.groups()
        thinking = write(thinking, number, Kind.THINKING)
        return f"{opening}{thinking}{closing}{write(rest, number, kind)}"

    def call(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        new = with_id(given, "id")
        if "function" in new:
            new["function"] = call(new["function"])
        if isinstance(name := new.get("name"), str):
            new["name"] = write(name, number, Kind.CALL)
        arguments = new.get("arguments")
        if "arguments" in slots and arguments and isinstance(arguments, str | dict):
            new["arguments"] = write(arguments, number, Kind.TEMPLATE)
        return new

    def with_id(given: dict[str, Any], key: str) -> dict[str, Any]:
        if "ids" in slots and isinstance(id_ := given.get(key), str):
            return {**given, key: write(id_, -1, Kind.TEMPLATE)}
        return dict(given)

    new, kind = dict(message), _ROLES[message["role"]]
    if kind is Kind.TEXT and isinstance(thinking := message.get("reasoning_content"), str):
        new["thinking"] = new["reasoning_content"] = write(thinking, number, Kind.THINKING)
    if isinstance(given := message.get("content"), str):
        new["content"] = content(given)
    elif given is not None:
        new["content"] = [{**part, "text": content(part["text"])} for part in given]
    if kind is Kind.TEXT and isinstance(calls := message.get("tool_calls"), list):
        new["tool_calls"] = [call(given) for given in calls]
    return with_id(new, "tool_call_id")


def _marked(
    conversation: Conversation, first: int, slots: frozenset[str], *, inside: bool
) -> tuple[Conversation, list[_Field], dict[int, MarkedObject]]:
    """Return a conversation with marks around its contents, what each pair of marks is, and the
    marked objects by the number of their pair.
    """
    fields: list[_Field] = []
    objects: dict[int, MarkedObject] = {}
    ids: dict[str, str] = {}

    def mark(value: Any, message: int, kind: Kind) -> Any:
        is_text = isinstance(value, str)
        if is_text and message < 0 and value in ids:
            return ids[value]
        begin, end = 0, len(value)
        if inside and is_text:
            begin, end = len(value) - len(value.lstrip()), len(value.rstrip())
        if begin >= end:
            return value
        code = first + min(2 * len(fields), MARKS - 2)
        opening, closing = chr(code), chr(code + 1)
        fields.append(_Field(message, kind))
        if not is_text:
            objects[len(fields) - 1] = made = MarkedObject(value, (opening, closing))
            return made
        text = f"{value[:begin]}{opening}{value[begin:end]}{closing}{value[end:]}"
        if message < 0:
            ids[value] = text
        return text

    tools = _replaced_tools(conversation.tools, mark, slots)
    messages = [_replaced(m, n, mark, slots) for n, m in enumerate(conversation.messages)]
    return Conversation(messages, tools, conversation.arguments), fields, objects


_OBJECT = {"?": "?"}
"""Stands for an object in a shape. If objects are contents, the shape has no other objects at the
place of an object, except empty ones."""


def _shape(
    conversation: Conversation, slots: frozenset[str], *, inside: bool
) -> tuple[bytes | None, list[Any]]:
    """Return a conversation without its contents, and the contents that are not empty.

    If `inside`, the outer white space of the contents stays in the conversation.
    """
    contents: list[Any] = []
    ids: dict[str, str] = {}

    def keep(value: Any, message: int, kind: Kind) -> Any:
        if not isinstance(value, str):
            contents.append(value)
            return _OBJECT
        if message < 0 and value in ids:
            return ids[value]
        content = value.strip() if inside else value
        if not content:
            return value
        contents.append(content)
        if message < 0:
            ids[value] = value.replace(content, f"?{len(contents)}")
            return ids[value]
        return "?" if content == value else value.replace(content, "?")

    tools = _replaced_tools(conversation.tools, keep, slots)
    shape: list[Any] = [inside, tools, conversation.arguments]
    for message in conversation.messages:
        content = message.get("content")
        if len(message) == 2 and isinstance(content, str) and "</think>" not in content:
            shape.append([message["role"], keep(content, 0, Kind.TEXT)])  # most messages
        else:
            shape.append(_replaced(message, 0, keep, slots))
    try:
        return msgspec.msgpack.encode(shape), contents
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None, contents


def _parts(marked: str, first: int, text: str, fields: list[_Field]) -> list[_Part] | None:
    """Find the marked contents; None if the marks changed the text, or came apart."""
    pattern = marks_from(first)
    pieces = pattern.split(marked)
    if "".join(pieces) != text:
        return None
    marks = [ord(mark) - first for mark in pattern.findall(marked)]
    parts, at = [], len(pieces[0])
    for nth in range(0, len(marks), 2):
        opening, closing = marks[nth], marks[nth + 1] if nth + 1 < len(marks) else -1
        if opening % 2 or closing != opening + 1:
            return None
        end = at + len(pieces[nth + 1])
        parts.append(_Part(at, end, *fields[opening // 2], opening // 2))
        at = end + len(pieces[nth + 2])
    return parts


def _literal(value: Any) -> str:
    """Return a value of JSON as Jinja writes it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
