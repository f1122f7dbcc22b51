"""Conversations, rendered by a chat template.

A conversation is rendered whole, and encoded once. What the assistant says is proved in one of two
ways, the first that applies:

    generation  the template encloses it in {% generation %}
    prefix      the conversation up to each message is rendered, and is a prefix of the whole
"""

import functools
import itertools
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from random import SystemRandom
from typing import Any

import xxhash

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.encoding.chat_messages import (
    KNOWN_KEYS,
    Conversation,
    Message,
    is_learnt,
)
from tokenfeed.tools.encoding.chat_renderer import (
    Exhausted,
    Renderer,
    copied,
    rendered_by_transformers,
    renderer,
    unusable,
)
from tokenfeed.tools.encoding.chat_spans import (
    AtEnd,
    KnownText,
    Part,
    Range,
    Rendered,
    at_end_of,
    contents_of,
    laid_out,
    mark_for,
    marked,
    read_marks,
    replaced,
)

_MOST_WORK = 1_000_000_000
"""Characters to render of one conversation up to each message. A message costs `_MESSAGE_COST`."""
_MESSAGE_COST = 500
_UNUSED = [chr(code) for code in (*range(1, 9), *range(14, 27))]
_NONCE = "".join(SystemRandom().choices(_UNUSED, k=14))
_SAID = f"{_NONCE}[", f"{_NONCE}]"
"""What stands around what {% generation %} encloses. No text has it: another process has others."""
_NO_LETTER = re.compile(r"[^\s\w]|[\d_]")
_SHOWN = 40
"""Characters of two texts that differ, in a message."""
_TRAINING = dict(
    re.findall(
        r"(\w+) (\w+)",
        """
62507bcd cohere  70030d47 cohere2  55b25ceb deepseek_r1_distill  56a138c3 deepseekv3
6ebfc3d3 diffusion_gemma  2c2e86be gemma  d9c620dc gemma3  a59a37db glm4moe
b619f5c4 gptoss  462f2b9b idefics3  9a759f31 lfm2  a87b6063 lfm2_v2  9799ad6e llama3
e0e4ebff llava_next  92bba475 muse_glimmer  c87f8761 nemotron_3_5_lightning
f44bce18 nemotron_3_nano  450ca704 nemotron_3_super  dd23cf4b nemotron_3_ultra
82fc89c0 phi3  cd8aff86 phi3_5  2469c950 qwen2_5  d63c0ab8 qwen2_5_vl  c9e0155c qwen3
ea7113e6 qwen3_5_nothink  0ed0a1d8 qwen3_5_think  579b2c2e qwen3_6  b488fed7 qwen3_8
8fb5d937 qwen3_instruct_2507  a6c9c2c4 qwen3_vl  2bcef309 smolvlm
""",
    )
)
"""Templates that prove little, by their checksum: TRL has a variant `NAME_training.jinja`."""


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
        is always one of them, because it is special when the data set is the tokenizer of another.
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
        names = self._renderer.unset - self.variables.keys()
        return sorted(name for name in names if name.endswith("_token"))

    def unread_keys(self, message: Message) -> list[str]:
        """Return the keys of a message that change nothing."""
        if message.keys() <= KNOWN_KEYS:
            return []
        return [key for key in message if key not in KNOWN_KEYS and not self._names(key)]

    @functools.cached_property
    def _names(self) -> Callable[[str], bool]:
        """Returns whether the template names a key in its code, or writes whole messages."""
        code = " ".join(re.findall(r"\{[{%].*?[%}]\}", self.source, re.DOTALL))
        named = {*chain.from_iterable(re.findall(r"""\.\s*(\w+)|["'](\w+)["']""", code))}
        is_whole = re.search(r"\bm\w*\s*(\|\s*(tojson|items)|\.items\()", code) is not None
        return lambda key: is_whole or key in named

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
        joins = self._joins_parts.get(roles)
        if joins is None:
            with suppress(Unusable):
                text = self._text(conversation.copied())
                joins = not any(str(messages[n]["content"]) in text for n in listed)
                self._joins_parts[roles] = joins
        if joins:
            return conversation, 0
        texts = [
            {**each, "content": "".join(part["text"] for part in each["content"])}
            if n in listed
            else each
            for n, each in enumerate(messages)
        ]
        return replace(conversation, messages=texts), len(listed)

    @functools.cached_property
    def _joins_parts(self) -> dict[frozenset[str], bool]:
        """Whether the template joins the parts of contents, by the roles with such contents."""
        return {}

    def check(self) -> None:
        """Compile the template.

        Raises:
            Unusable: It is not valid.
        """
        self._renderer.unset  # noqa: B018 - also compiles

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without what other processes find out for themselves."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def render(self, conversation: Conversation, known: KnownText | None = None) -> Rendered:
        """Render a conversation and find its parts.

        Args:
            conversation: The messages and other variables.
            known: What the template writes between contents of other conversations; it learns from
                this one. None: nothing is known.

        Raises:
            Unusable: The template fails, or it is not certain what the assistant says.
        """
        own = conversation.copied()
        text, said = self._written(own)
        _check_unchanged(own, conversation)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise unusable("the template fails", error) from None
        found = self._contents(own, text, known or KnownText())
        said = self._by_prefix(own, text) if said is None else said
        _check_unchanged(own, conversation)
        parts, removed = found or ([], (0, 0))
        messages = conversation.messages
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        unlearnt = {n for n in turns if not is_learnt(messages[n])}
        missing = (int(found is None), *removed)
        return laid_out(text, said, parts, turns, missing, self._at_end, unlearnt)

    def forms_special(self, conversation: Conversation, text: str) -> bool:
        """Return whether the rendered text has other special tokens than with contents of letters
        alone: the template may remove what separates the parts of a special token.

        Raises:
            Unusable: The template fails with letters.
        """

        def letters(value: str, _message: int, _kind: Kind) -> str:
            return _NO_LETTER.sub("x", value)

        own = conversation.copied()
        messages = [
            replaced(message, number, letters, details=True)
            for number, message in enumerate(own.messages)
        ]
        other = self._text(replace(own, messages=messages))
        return self.special.findall(text) != self.special.findall(other)

    def compare(self, conversation: Conversation) -> None:
        """Compare the text with that of `transformers`, if it is installed.

        Raises:
            TokenizerError: The texts differ.
            Exhausted: The template takes too long.
        """
        if "strftime_now" in self._renderer.unset:
            return  # `transformers` writes the day
        try:
            ours = self._text(conversation.copied())
        except Exhausted:
            raise
        except Unusable:
            return
        theirs = rendered_by_transformers(self.source, self._variables(conversation))
        if theirs is None or theirs == ours:
            return
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
        same = min(len(ours), len(theirs)) if same < 0 else same
        mine, other = (repr(each[max(same - 10, 0) :][:_SHOWN]) for each in (ours, theirs))
        raise TokenizerError(
            f"the chat template: minijinja writes {mine} where transformers writes {other}. Use "
            "another template, or write this part of it in another way."
        )

    @property
    def _renderer(self) -> Renderer:
        return renderer(self.source)

    @functools.cached_property
    def special(self) -> re.Pattern[str]:
        """Matches a special token, the longest first."""
        longest = sorted(map(re.escape, self.special_tokens), key=len, reverse=True)
        return re.compile("|".join(longest) or r"(?!)")

    @functools.cached_property
    def _at_end(self) -> AtEnd:
        return at_end_of(self.special)

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

    @functools.cached_property
    def _has_plain_variables(self) -> bool:
        """Whether a template can change none of the variables."""
        return all(isinstance(each, str | bool | None) for each in self.variables.values())

    def _variables(self, conversation: Conversation, *, prompt: bool = False) -> dict[str, Any]:
        own = self.variables if self._has_plain_variables else copied(self.variables)
        return {
            "documents": None,
            **own,
            **conversation.arguments,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "add_generation_prompt": prompt,
        }

    def _text(self, conversation: Conversation, *, prompt: bool = False) -> str:
        return self._renderer.render(self._variables(conversation, prompt=prompt))

    def _written(self, conversation: Conversation) -> tuple[str, list[Range] | None]:
        """Render a conversation. Return the text and what {% generation %} encloses; None without
        the tag.

        Raises:
            Unusable: The template fails, or it is not certain what the tag encloses.
        """
        if not self._renderer.has_generation:
            return self._text(conversation), None
        rendered = self._renderer.render(self._variables(conversation), *_SAID)
        first, *rest = rendered.split(_NONCE)
        pieces = [first, *(piece[1:] for piece in rest)]
        text, places = "".join(pieces), [*accumulate(map(len, pieces))][:-1]
        is_certain = "".join(piece[0] for piece in rest) == "[]" * (len(rest) // 2)
        if not self._renderer.writes_in_order:
            is_certain &= text == self._text(conversation)
        if not is_certain:
            raise Unusable(
                "it is not certain what {% generation %} encloses. Move the tag out of other tags "
                "{% generation %}, and out of macros, {% set %} and {% filter %}"
            )
        pairs = zip(places[::2], places[1::2], strict=True)
        return text, [(start, end) for start, end in pairs if end > start]

    def _contents(
        self, conversation: Conversation, text: str, known: KnownText
    ) -> tuple[list[Part], Range] | None:
        """Find the contents in the text. Count the messages whose thinking, and whose text, is
        missing."""
        contents = contents_of(conversation) if known.is_useful else None
        has_tools = bool(conversation.tools)
        if contents and (parts := known.fit(text, contents, has_tools=has_tools)):
            return parts, (0, 0)
        found = self._marked(conversation, text)
        if contents and found:
            known.learn(text, contents, found[0], has_tools=has_tools)
        return found

    def _marked(self, conversation: Conversation, text: str) -> tuple[list[Part], Range] | None:
        """Find what `_contents` returns by marks.

        Marks stand around a content, or inside its outer white space for templates that trim. If
        the marks change the text, fewer contents are marked. In a text that has all characters of
        marks, nothing is found.
        """
        if (mark := mark_for(text)) is None:
            return None
        has_spaces = has_details = True
        for inside, details in itertools.product((False, True), (True, False)):
            if (inside and not has_spaces) or not (details or has_details):
                continue
            made = marked(conversation, mark, inside=inside, details=details)
            has_spaces, has_details = made.has_spaces, made.has_details
            with suppress(Unusable):
                rendered = self._renderer.render(self._variables(made.conversation))
                if (parts := read_marks(rendered, text, made.contents, mark)) is not None:
                    return parts, made.removed(parts)
        return None

    def _by_prefix(self, conversation: Conversation, text: str) -> list[Range]:
        """Find what the assistant says by rendering the conversation up to each message.

        Raises:
            Unusable: A shorter conversation is not rendered as a prefix of the whole, or there are
                too many.
        """
        messages, said = conversation.messages, []
        self._check_work(conversation, text, of_turn=2)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            until, before = text, self._before(conversation, turn)
            if turn + 1 < len(messages):
                until = self._text(conversation.until(turn + 1))
            if before is None or not (text.startswith(until) and until.startswith(before)):
                self._check_work(conversation, text, of_turn=5)
                before, until = self._by_another(conversation, turn, before, text)
            if not until:
                raise Unusable(
                    f"message {turn + 1}: it is not certain where it begins and ends, because the "
                    f"template renders it otherwise in a longer conversation. {self._remedy}"
                )
            before += self._header(conversation, turn, before, text)
            if not until.startswith(before):
                raise Unusable(
                    f"message {turn + 1}: it is not certain where it begins, because the template "
                    f"writes no generation prompt before it. {self._remedy}"
                )
            stops = self.special.finditer(until, len(before))
            ends = (stop.end() for stop in stops if not until[stop.end() :].strip())
            end = next(ends, None)
            if end is None:  # as in GLM, where the role of the next message ends this one
                stop = self.special.match(text, len(until))
                end = stop.end() if stop else len(until)
            said.append((len(before), end))
        return said

    def _before(self, conversation: Conversation, turn: int) -> str | None:
        """Return the messages before a message, with the generation prompt; None if the message is
        the first one and the template refuses a conversation without messages.

        Raises:
            Unusable: The template fails.
        """
        try:
            return self._text(conversation.until(turn), prompt=True)
        except Exhausted:
            raise
        except Unusable as reason:
            if turn:
                raise Unusable(f"message {turn + 1}: before it, {reason}") from None
            return None

    def _header(self, conversation: Conversation, turn: int, before: str, text: str) -> str:
        """Return what the template writes between the messages before a message of the assistant
        and any content, if it has no generation prompt there; a mark if that is not certain. White
        space belongs to the content.
        """
        content = conversation.messages[turn].get("content")
        said = content.strip() if isinstance(content, str) else ""
        if said and text[len(before) :].lstrip().startswith(said):
            return ""
        mark, messages = mark_for(text) or "", conversation.messages[:turn]
        answered = replace(
            conversation, messages=[*messages, {"role": "assistant", "content": mark}]
        )
        with suppress(Unusable):
            if mark and self._text(conversation.until(turn)) == before:
                header, *others = self._text(answered).removeprefix(before).split(mark)
                if len(others) > 1:  # it has the content, too
                    return mark
                return header if others and header.strip() else ""
        return ""

    def _by_another(
        self, conversation: Conversation, turn: int, prompt: str | None, text: str
    ) -> tuple[str, str]:
        """Return the text before a message and the text up to its end; empty if they are not
        certain. For templates that write an earlier message otherwise, such as without thinking.

        Another answer takes the place of the message. The text before it must end as the generation
        prompt does. The text behind it begins with what ends the answer as the last message; the
        rest is what follows. The conversation must begin with this text, and end with this rest.

        Args:
            conversation: The whole conversation.
            turn: The number of the message.
            prompt: The messages before it, with the generation prompt. None: the template refuses
                them, so the generation prompt behind the other answer is used.
            text: The rendered conversation.
        """
        messages, mark = [*conversation.messages], mark_for(text)
        if mark is None or turn + 1 == len(messages):
            return "", ""
        messages[turn] = {"role": "assistant", "content": mark}
        changed = replace(conversation, messages=messages)
        try:
            alone, whole = self._text(changed.until(turn + 1)), self._text(changed)
            if prompt is None:
                asked, prompt = alone, self._text(changed.until(turn + 1), prompt=True)
            else:
                asked = self._text(conversation.until(turn))
        except Unusable:
            return "", ""
        if alone.count(mark) != 1 or whole.count(mark) != 1 or not prompt.startswith(asked):
            return "", ""
        header, end = prompt.removeprefix(asked), alone.partition(mark)[2]
        before, _, behind = whole.partition(mark)
        rest = behind.removeprefix(end)
        is_before = header and before.endswith(header) and text.startswith(before)
        is_behind = rest and behind.startswith(end) and text.endswith(rest, len(before))
        return (before, text.removesuffix(rest)) if is_before and is_behind else ("", "")

    def _check_work(self, conversation: Conversation, text: str, *, of_turn: int) -> None:
        """Compare the renderings of a conversation, so many for each turn, with the most.

        Raises:
            Unusable: There are too many.
        """
        messages = conversation.messages
        turns = sum(message["role"] == "assistant" for message in messages)
        if of_turn * turns * (len(text) + _MESSAGE_COST * len(messages)) > 2 * _MOST_WORK:
            raise Unusable(
                f"has {len(messages):,} messages of {len(text):,} characters: to render the "
                f"conversation up to each of them takes too long. {self._remedy}"
            )

    @functools.cached_property
    def _remedy(self) -> str:
        """The template to use instead."""
        name = _TRAINING.get(xxhash.xxh3_64_hexdigest(self.source.strip().encode())[:8])
        of_trl = f": {name}_training.jinja of TRL" if name else ""
        return f"Use a template with {{% generation %}}{of_trl}"


def _check_unchanged(own: Conversation, conversation: Conversation) -> None:
    if own != conversation:
        raise Unusable("the template fails: it must not change messages, tools or arguments")


def tokens_set_by(source: str) -> dict[str, str]:
    """Return the special tokens that the first lines of a stored template set, by name."""
    lines = re.match(r"(\{% set \w+ =.*%\}\n)*", source)
    assert lines
    tokens = {}
    for name, literal in re.findall(r"\{% set (\w+_token) = (\".*\") %\}\n", lines[0]):
        with suppress(ValueError):  # not written by this program
            tokens[name] = json.loads(literal).encode().decode()
    return tokens


def _literal(value: Any) -> str:
    """Return a value of JSON as Jinja writes it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
