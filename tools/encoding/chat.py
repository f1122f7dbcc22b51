"""Conversations: rendered by a chat template, and where each part is in the rendered text.

A conversation is rendered once, whole, and encoded once. What the assistant says is found in one of
three ways, the first that applies:

    generation  the template encloses it in {% generation %}
    prompt      what the template adds for `add_generation_prompt` stands before it, and a special
                token after it
    prefix      the conversation up to each message is rendered, and proved to be a prefix

The contents of messages are found by rendering once more with marks, characters for private use,
around each. If that text without the marks equals the text rendered without them, the marks are
right. Otherwise the template changes its output by the contents, and the parts of other roles stay
unknown.
"""

import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.tools.corpus.records import Unusable

__all__ = ["ChatTemplate", "Conversation", "Rendered", "read_messages"]

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
    """What a template gets."""

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
    except (TypeError, ValueError):
        raise Unusable(f"has {name} with a function call that is not JSON") from None
    calls = call if isinstance(call, list) else [call]
    functions = [{"type": "function", "function": each} for each in calls]
    return {"role": "assistant", "tool_calls": functions, **others}


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} of transformers: notes where the enclosed text begins and ends."""

    tags = {"generation"}  # noqa: RUF012 - jinja's

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.found: list[tuple[int, int]] = []
        self.length = 0
        """Characters that were rendered so far."""

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text: str = caller()
        self.found.append((self.length, self.length + len(text)))
        return text


_OF_DICT = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, faster at `message.role`: a plain dict has no attributes but those of dict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICT:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class _Dict:
    """`dict` in templates: only what builds one."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` in templates: without names that reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@functools.cache
def _compiled(source: str) -> jinja2.Template:
    """Compile a template in the sandbox and with the settings of transformers.

    `strftime_now` is missing: a data set must not depend on the day it was made.
    """
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
    return environment.from_string(source)


_FIRST_MARKS, _MARKS = (0xF0000, 0x100000), 0xFFFE
"""Two planes of characters for private use, in case a conversation has such characters."""
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


class _Said(NamedTuple):
    """What the assistant says in one message, its stop token included."""

    start: int
    end: int


@dataclass(slots=True)
class Rendered:
    """A rendered conversation, and what its characters are."""

    text: str
    starts: list[int]
    """Where each stretch of characters of one kind begins, ascending from 0."""
    kinds: list[int]
    """The kind of each stretch."""
    messages: list[tuple[int, int]]
    """Begin and end of what belongs to each message."""
    counts: dict[str, int]
    """What users should know, by name: see `docs/format.md`."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of all that belongs to a message, ascending."""
    owners: list[int] = field(default_factory=list)
    """The number of the message of each span, from 0; -1 if it is not certain."""


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
            _compiled(self.source)

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation and find its parts.

        Raises:
            Unusable: The template fails, or it is not certain what the assistant says.
        """
        text, generated = self._render(conversation, conversation.messages)
        found = self._found(conversation, text)
        parts = None if found is None else found[0]
        said: list[_Said] | None
        if self._has_generation:
            said = [_Said(start, end) for start, end in generated if end > start]
        else:
            said = self._by_prompt(conversation, text, parts) if parts is not None else None
            said = self._by_prefix(conversation, text) if said is None else said
        turns = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        rendered = self._described(text, said, parts or [], turns)
        rendered.counts["unproved"] = int(found is None)
        if found is not None:
            rendered.counts |= found[1]
        return rendered

    @functools.cached_property
    def _has_generation(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    @functools.cached_property
    def special(self) -> re.Pattern[str]:
        """Matches a special token."""
        return _any_of(self.special_tokens)

    @functools.cached_property
    def _prompts(self) -> dict[str, str]:
        """What the template adds for `add_generation_prompt`, by the arguments."""
        return {}

    def _render(
        self, conversation: Conversation, messages: list[Message], *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and what {% generation %} encloses."""
        template = _compiled(self.source)
        tracker: Any = template.environment.extensions[_Generation.identifier]
        tracker.found, tracker.length = [], 0
        variables = {**self.variables, **conversation.arguments}
        variables |= {"tools": conversation.tools, "documents": variables.get("documents")}
        pieces = []
        with _named("the template fails"):
            for piece in template.generate(
                variables, messages=messages, add_generation_prompt=prompt
            ):
                pieces.append(piece)
                tracker.length += len(piece)
        return "".join(pieces), tracker.found

    def _found(
        self, conversation: Conversation, text: str
    ) -> tuple[list[_Part], dict[str, int]] | None:
        """Find the contents in the text, and count those that are missing.

        Marks stand around a content, or inside its outer white space for templates that trim.
        """
        first = next((first for first in _FIRST_MARKS if not _marks(first).search(text)), None)
        if first is None:
            return None
        for inside in (False, True):
            marked, fields = _marked(conversation.messages, first, inside=inside)
            if 2 * len(fields) > _MARKS:
                return None
            try:
                with_marks, _ = self._render(conversation, marked)
            except Unusable:
                continue
            if (parts := _parts(with_marks, first, text, fields)) is None:
                continue
            present = {part[2:] for part in parts}
            missing = [each for each in {*fields} if each not in present]
            thinking = sum(each.kind is Kind.THINKING for each in missing)
            counts = {"removed_thinking": thinking, "removed_text": len(missing) - thinking}
            return parts, counts
        return None

    def _by_prompt(
        self, conversation: Conversation, text: str, parts: list[_Part]
    ) -> list[_Said] | None:
        """Find what the assistant says between the generation prompt and a special token.

        Returns None unless every prompt in the text belongs to one message of the assistant, in
        their order.
        """
        key = repr((conversation.arguments, conversation.tools is None))
        for again in (False, True):
            if again or key not in self._prompts:
                with_prompt, _ = self._render(conversation, conversation.messages, prompt=True)
                is_added = with_prompt.startswith(text)
                self._prompts[key] = with_prompt[len(text) :] if is_added else ""
            if said := self._after(self._prompts[key], conversation.messages, text, parts):
                return said
        return None

    def _after(
        self, prompt: str, messages: list[Message], text: str, parts: list[_Part]
    ) -> list[_Said] | None:
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        heads = [*_outside(text, prompt, parts)] if prompt else []
        if len(heads) != len(turns):
            return None
        stops = _any_of(tuple(t for t in self.special_tokens if t not in prompt))
        said, at = [], 0
        limits = [*(head - len(prompt) for head in heads[1:]), len(text)]
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
            if not (ends := [*stops.finditer(text, last, until)]):
                return None
            eos = self.variables.get("eos_token")
            end = next((match for match in ends if match[0] == eos), ends[0])
            said.append(_Said(head, end.end()))
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

    def _described(
        self, text: str, said: list[_Said], parts: list[_Part], turns: list[int]
    ) -> Rendered:
        """Return the kinds of all characters. `turns` numbers the messages of the assistant."""
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

        def others(until: int) -> Iterator[_Part]:
            nonlocal at
            while at < len(parts) and parts[at].start < until:
                at += 1
                yield parts[at - 1]

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
        counts = {"no_stop": no_stop, "unmarked": unmarked}
        return Rendered(text, starts, kinds, messages, counts, spans, owners)

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


@functools.cache
def _marks(first: int) -> re.Pattern[str]:
    """Return a pattern of the marks from a character on."""
    return re.compile(f"[{chr(first)}-{chr(first + _MARKS - 1)}]")


def _marked(
    messages: list[Message], first: int, *, inside: bool
) -> tuple[list[Message], list[_Field]]:
    """Return the messages with marks around their contents, and what each pair of marks is."""
    fields: list[_Field] = []

    def mark(text: str, message: int, kind: Kind) -> str:
        begin, end = 0, len(text)
        if inside:
            begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if begin >= end:
            return text
        opening = first + min(2 * len(fields), _MARKS - 2)
        fields.append(_Field(message, kind))
        return f"{text[:begin]}{chr(opening)}{text[begin:end]}{chr(opening + 1)}{text[end:]}"

    def content(text: str, message: int, kind: Kind) -> str:
        if kind is not Kind.TEXT or not (match := _THOUGHT.fullmatch(text)):
            return mark(text, message, kind)
        opening, thinking, closing, rest = match.groups()
        thinking = mark(thinking, message, Kind.THINKING)
        return f"{opening}{thinking}{closing}{mark(rest, message, kind)}"

    marked = []
    for number, message in enumerate(messages):
        made, kind = dict(message), _ROLES[message["role"]]
        if kind is Kind.TEXT and isinstance(thinking := message.get("reasoning_content"), str):
            made["thinking"] = made["reasoning_content"] = mark(thinking, number, Kind.THINKING)
        if isinstance(given := message.get("content"), str):
            made["content"] = content(given, number, kind)
        elif given is not None:
            made["content"] = [
                {**part, "text": content(part["text"], number, kind)} for part in given
            ]
        if kind is Kind.TEXT and isinstance(calls := message.get("tool_calls"), list):
            made["tool_calls"] = [
                _renamed(call, lambda name: mark(name, number, Kind.CALL))  # noqa: B023
                for call in calls
            ]
        marked.append(made)
    return marked, fields


def _renamed(call: Any, rename: Any) -> Any:
    """Return a tool call with another name of its function."""
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _renamed(function, rename)}
    name = call.get("name")
    return {**call, "name": rename(name)} if isinstance(name, str) else call


def _parts(marked: str, first: int, text: str, fields: list[_Field]) -> list[_Part] | None:
    """Find the marked contents; None if the marks changed the text, or came apart."""
    pattern = _marks(first)
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
        parts.append(_Part(at, end, *fields[opening // 2]))
        at = end + len(pieces[nth + 2])
    return parts


def _literal(value: Any) -> str:
    """Return a value of JSON as Jinja writes it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
