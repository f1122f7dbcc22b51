"""Conversations, rendered by a chat template.

A conversation is rendered whole, and encoded once. What the assistant says is found in one of
three ways, the first that applies:

    generation  the template encloses it in {% generation %}
    prompt      what the template adds for `add_generation_prompt` stands before it, and a special
                token after it
    prefix      the conversation up to each message is rendered, and proved to be a prefix

Most conversations need no rendering: they have the layout of an earlier conversation that differs
in contents only. See `ChatTemplate.render`.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import msgspec

from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.encoding.chat_messages import (
    KNOWN_KEYS,
    SLOTS,
    Conversation,
    Message,
    is_learnt,
    replaced,
    replaced_tools,
)
from tokenfeed.tools.encoding.chat_parts import (
    BLANK,
    Part,
    Range,
    Rendered,
    TemplateLayout,
    any_of,
    blanked,
    laid_out,
    marked,
    said_by_prompt,
)
from tokenfeed.tools.encoding.jinja_sandbox import (
    MARK,
    Use,
    Watch,
    compiled,
    generated_by,
    parsed,
    to_json,
)

_MOST_LAYOUTS = 10_000
"""Layouts that are kept."""
_TRIED = 500
"""Conversations before layouts are given up, if most of them had a layout of their own."""
_MOST_ALTERNATIVES = 8
"""Layouts of conversations that differ only in contents."""
_MOST_WORK = 1_000_000_000
"""Characters to render of one conversation up to each message. A message costs `_MESSAGE_COST`."""
_MESSAGE_COST = 500


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

        A line break after a block is dropped, so the lines in front change no text. The end token
        is always one of them: `pretokenize --append` finds stop tokens by it.
        """
        lines = []
        for name, value in self.variables.items():
            if name not in tokens_set_by(self.source) and (name == "eos_token" or self.reads(name)):
                literal = _literal(value)
                given = "" if name.endswith("_token") else f" {name} if {name} is defined else"
                lines.append(f"{{% set {name} ={given} {literal} %}}\n")
        return "".join(lines) + self.source

    def reads(self, name: str) -> bool:
        """Return whether an argument with this name can change the text."""
        is_named = re.search(rf"\b{re.escape(name)}\b", self.source) is not None
        return is_named and name not in ("messages", "tools", "add_generation_prompt")

    @functools.cached_property
    def reads_tools(self) -> bool:
        """Whether the text can depend on the tools of a conversation."""
        return re.search(r"\btools\b", self.source) is not None

    @property
    def tokens(self) -> dict[str, str]:
        """The variables that are texts of tokens, such as `bos_token`."""
        named = ((name, text) for name, text in self.variables.items() if name.endswith("_token"))
        return {name: text for name, text in named if text and isinstance(text, str)}

    @functools.cached_property
    def missing_tokens(self) -> list[str]:
        """Special tokens that the template names, such as `bos_token`, without a value."""
        names = jinja2.meta.find_undeclared_variables(parsed(self.source)) - self.variables.keys()
        return sorted(name for name in names if name.endswith("_token"))

    def unread_keys(self, message: Message) -> list[str]:
        """Return the keys of a message that change nothing."""
        if message.keys() <= KNOWN_KEYS:
            return []
        return [key for key in message if key not in KNOWN_KEYS and not self._names(key)]

    @functools.cached_property
    def _names(self) -> Callable[[str], bool]:
        """Returns whether the template has a word, or writes whole messages."""
        words = {*re.findall(r"\w+", self.source)}
        is_whole = re.search(r"\bm\w*\s*\|\s*tojson", self.source) is not None
        return lambda key: is_whole or key in words

    def with_texts(self, conversation: Conversation) -> tuple[Conversation, int]:
        """Return a conversation in which contents of several parts are texts, and their number.

        A template that joins the parts itself gets them. Another one fails, or writes the list as
        Python does.
        """
        messages = conversation.messages
        listed = {n for n, each in enumerate(messages) if isinstance(each.get("content"), list)}
        if not listed:
            return conversation, 0
        roles = frozenset(messages[n]["role"] for n in listed)
        joins = self._known.joins_parts.get(roles)
        if joins is None:
            with suppress(Unusable):
                text, _ = self._render(conversation)
                joins = not any(str(messages[n]["content"]) in text for n in listed)
                self._known.joins_parts[roles] = joins
        if joins:
            return conversation, 0
        texts = [
            {**each, "content": "".join(part["text"] for part in each["content"])}
            if n in listed
            else each
            for n, each in enumerate(messages)
        ]
        return replace(conversation, messages=texts), len(listed)

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
        the template finds the same in both: see `Watch`. The parts are the same as without earlier
        conversations.

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
                    if any(b"\xf4" in piece for piece in pieces):
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
        messages = conversation.messages
        text, generated = self._render(conversation)
        with _named("the template fails"):
            text.encode()
        found = self._found(conversation, text)
        said: list[Range] | None = None
        if self._has_generation:
            said = [(start, end) for start, end in generated if end > start]
        elif found is not None:
            blank, eos = blanked(text, found.parts), self.variables.get("eos_token")
            said = said_by_prompt(
                blank, found.prompt, found.parts, messages, self.special_tokens, eos
            )
        if said is None:
            said = self._by_prefix(conversation, text)
            found = found and found._replace(uses=None)
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        missing = (1, 0, 0) if found is None else (0, *found.removed)
        parts, shared = (found.parts, found.shared) if found else ([], [])
        unlearnt = frozenset(n for n in turns if not is_learnt(messages[n]))
        rendered = laid_out(text, said, parts, shared, turns, missing, self.special, unlearnt)
        if sum(isinstance(piece, int) for piece in rendered.layout.pieces) < len(shared):
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
        return any_of(self.special_tokens)

    @functools.cached_property
    def _halves(self) -> tuple[set[str], ...]:
        tokens = [(token, cut) for token in self.special_tokens for cut in range(1, len(token))]
        begins, ends = (
            {token[:cut] for token, cut in tokens},
            {token[cut:] for token, cut in tokens},
        )
        return tuple({half for half in halves if len(half) > 1} for halves in (begins, ends))

    def has_half(self, text: str) -> bool:
        """Return whether a text ends with the beginning of a special token, or begins with the
        end of one. One character does not count."""
        (begins, ends), text = self._halves, text.strip()
        most = max(map(len, begins), default=0)
        return any(text[-n:] in begins or text[:n] in ends for n in range(2, most + 1))

    def _render(
        self, conversation: Conversation, *, prompt: bool = False, watch: Watch | None = None
    ) -> tuple[str, list[Range]]:
        """Return the text, and what {% generation %} encloses. A watch notes uses of contents."""
        variables = {"documents": None, **self.variables, **conversation.arguments}
        variables |= {"messages": conversation.messages, "tools": conversation.tools}
        variables |= {"add_generation_prompt": prompt}
        template = watch.template if watch else compiled(self.source)
        with _named("the template fails"):
            return generated_by(template, variables)

    def _found(self, conversation: Conversation, text: str) -> "_Found | None":
        """Find the contents in the text, and count those that are missing.

        Marks stand around a content, or inside its outer white space for templates that trim.
        Objects are in the text as JSON. If their marks change the text, fewer contents are marked.
        In a text that has the characters of marks, nothing is found. The places of contents do not
        depend on earlier conversations: only `shared` and `uses` do.
        """
        if MARK.search(text):
            return None
        known, of_shapes = self._known, self._known.slots
        fewer = [SLOTS]
        if conversation.tools is not None or any(len(m) > 2 for m in conversation.messages):
            fewer += [SLOTS - {"ids"}, frozenset()]
        for inside, slots in product((False, True), fewer):
            is_watched = slots == SLOTS and known.is_worth_watching
            is_shared = is_watched and slots == of_shapes
            found = self._proved(conversation, text, slots, inside=inside, is_watched=is_shared)
            if found and is_watched and not is_shared:
                again = self._proved(conversation, text, of_shapes, inside=inside, is_watched=True)
                if again:
                    return found._replace(shared=again.shared, uses=again.uses)
            if found:
                return found
        return None

    def _proved(
        self,
        conversation: Conversation,
        text: str,
        slots: frozenset[str],
        *,
        inside: bool,
        is_watched: bool,
    ) -> "_Found | None":
        """Find the contents by marks; None if the marks change the text.

        A template without {% generation %} is rendered with its prompt. If it is watched, it is
        also rendered without, because it may read other contents then.
        """
        if (made := marked(conversation, slots, inside=inside)) is None:
            return None
        watch = _watch(self.source) if is_watched else None
        found: tuple[list[Part], str] | None = None
        prompted, uses = text, list[Use]() if watch else None
        for prompt in (False,) if self._has_generation else (True, False):
            again = None
            with suppress(Unusable):
                rendered, _ = self._render(made.conversation, prompt=prompt, watch=watch)
                again = made.parts(rendered, text, whole=not prompt)
                prompted = MARK.sub("", rendered) if prompt else prompted
            noted = watch.end() if watch else None
            uses = None if again is None or noted is None or uses is None else uses + noted
            found = found or again
            if found and uses is None:
                break
        if found is None:
            return None
        parts, added = found
        added = added or self._instead(text, parts, prompted)
        present = {(part.message, part.kind) for part in parts}
        missing = [each for each in {*made.contents} if each not in present and each[1]]
        thinking = sum(kind is Kind.THINKING for _, kind in missing)
        read = {n for n, each in made.objects.items() if each.is_read}
        if watch:
            slots_read = {"tools" if made.contents[n][0] < 0 else "arguments" for n in read}
            self._known.slots -= slots_read
        of_shape = None
        if uses is not None and not read:
            settings = {n: each.settings for n, each in made.objects.items() if each.settings}
            of_shape = _Uses(tuple({repr(use): use for use in uses}.values()), settings)
        return _Found(parts, parts, added, (thinking, len(missing) - thinking), inside, of_shape)

    def _instead(self, text: str, parts: list[Part], prompted: str) -> str:
        """Return the prompt that replaces the end of the text, as in Phi-3.

        Returns an empty text unless a stop token, which follows a content, precedes the prompt: in
        gpt-oss, the prompt replaces this token too.
        """
        same = len(os.path.commonprefix([text, prompted]))  # noqa: RUF071 - of characters
        cut = (m.start() for m in self.special.finditer(prompted) if m.start() < same < m.end())
        same = next(cut, same)
        before = blanked(text, parts)[:same].rstrip()
        stop = max(filter(before.endswith, self.special_tokens), key=len, default="")
        is_stopped = stop and before.removesuffix(stop).rstrip().endswith(BLANK)
        return prompted[same:] if is_stopped else ""

    def _by_prefix(self, conversation: Conversation, text: str) -> list[Range]:
        """Find what the assistant says by rendering the conversation up to each message.

        Raises:
            Unusable: A shorter conversation is not rendered as a prefix of the whole, or there are
                too many.
        """
        messages, said = conversation.messages, []
        turns = sum(message["role"] == "assistant" for message in messages)
        if turns * (len(text) + _MESSAGE_COST * len(messages)) > _MOST_WORK:
            raise Unusable(
                f"has {len(messages):,} messages of {len(text):,} characters: to render the "
                "conversation up to each of them takes too long. Use a template with "
                "{% generation %}"
            )
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            with _named(f"message {turn + 1}: the template fails for what precedes it"):
                before, _ = self._render(conversation.until(turn), prompt=True)
            until = text
            if turn + 1 < len(messages):
                until, _ = self._render(conversation.until(turn + 1))
            if not (text.startswith(until) and until.startswith(before)):
                raise Unusable(
                    f"message {turn + 1}: it is not certain where it begins and ends, because the "
                    "template renders it otherwise in a longer conversation. Use a template with "
                    "{% generation %}"
                )
            stops = self.special.finditer(until, len(before))
            ends = (stop.end() for stop in stops if not until[stop.end() :].strip())
            said.append((len(before), next(ends, len(until))))
        return said


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

    slots: frozenset[str] = SLOTS
    """What may differ between conversations of a shape, beside texts: `SLOTS`, without tools and
    arguments if the template reads them."""
    layouts: dict[bytes, list[tuple[_Uses, TemplateLayout]]] = field(default_factory=dict)
    """Layouts so far, by the conversation without its contents."""
    joins_parts: dict[frozenset[str], bool] = field(default_factory=dict)
    """Whether the template joins the parts of contents, by the roles that have such contents."""
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

    parts: list[Part]
    shared: list[Part]
    """The contents that may differ in other conversations of the layout, numbered as there."""
    prompt: str
    """What the template adds for `add_generation_prompt`; empty if that is not certain."""
    removed: tuple[int, int]
    """Messages whose thinking, and whose text, the template removed."""
    inside: bool
    """Whether a content is without its outer white space."""
    uses: _Uses | None
    """None if the text may depend on contents in other ways."""


def tokens_set_by(source: str) -> dict[str, str]:
    """Return the special tokens that the first lines of a stored template set, by name."""
    lines = re.match(r"(\{% set \w+ =.*%\}\n)*", source)
    assert lines
    tokens = {}
    for name, literal in re.findall(r"\{% set (\w+_token) = (\".*\") %\}\n", lines[0]):
        with suppress(ValueError):  # not written by this program
            tokens[name] = json.loads(literal).encode().decode()
    return tokens


@functools.cache
def _watch(source: str) -> Watch:
    return Watch(source)


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

    tools = replaced_tools(conversation.tools, keep, slots)
    shape: list[Any] = [inside, len(slots), tools, conversation.arguments]
    for message in conversation.messages:
        content = message.get("content")
        if len(message) == 2 and isinstance(content, str) and "</think>" not in content:
            first = next(iter(message))  # most messages: only the order of the keys differs
            shape.append([first, message["role"], keep(content, 0, Kind.TEXT)])
        else:
            shape.append(replaced(message, 0, keep, slots))
    try:
        return msgspec.msgpack.encode(shape), contents
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None, contents


@contextmanager
def _named(problem: str) -> Iterator[None]:
    """Turn what templates raise into a reason for rejecting a record."""
    try:
        yield
    except Unusable:
        raise Unusable(problem) from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise Unusable(f"{problem}: {reason[:200]}") from None
    except (AssertionError, AttributeError, RecursionError, SyntaxError) as error:
        raise Unusable(f"{problem}: {type(error).__name__}") from None


def _literal(value: Any) -> str:
    """Return a value of JSON as Jinja writes it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
