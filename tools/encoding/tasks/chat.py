"""Conversations: messages become ids and a kind for each token, by a chat template."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

from tokenfeed.pipeline.arithmetic import Ragged, join
from tokenfeed.pipeline.errors import ConfigError, TokenizerError
from tokenfeed.pipeline.format.kinds import REJECTED, Kind
from tokenfeed.pipeline.format.schema import INPUT_IDS, KINDS
from tokenfeed.tools.corpus.records import FieldKind, Fields, Unusable
from tokenfeed.tools.encoding.chat import ChatTemplate
from tokenfeed.tools.encoding.chat_messages import (
    UNREAD_KEY,
    Conversation,
    asks,
    continued,
    is_learnt,
    read_messages,
)
from tokenfeed.tools.encoding.chat_renderer import UNLIKE_SPACE, Exhausted, bounded, to_json
from tokenfeed.tools.encoding.chat_spans import COUNTS, KnownText, Rendered, TokensOfTexts
from tokenfeed.tools.encoding.tasks.base import (
    SHOWN,
    Encode,
    Samples,
    TaskEncoder,
    Values,
    not_of_type,
)
from tokenfeed.tools.encoding.template import Template
from tokenfeed.tools.encoding.tokenizer import TokenPlaces


@dataclass(frozen=True, kw_only=True)
class ChatEncoder(TaskEncoder):
    """Conversations, rendered as texts by a template. Each token gets a kind."""

    option = "chat"
    record = (
        "a conversation: messages, or a prompt and its completion, or a chosen and a rejected one"
    )
    kinds: ClassVar = {
        "messages": FieldKind.JSON,
        "prompt": FieldKind.JSON,
        "completion": FieldKind.JSON,
        "chosen": FieldKind.JSON,  # follows the prompt in the conversation to prefer
        "rejected": FieldKind.JSON,
        "tools": FieldKind.OPTIONAL_JSON,
        "template_arguments": FieldKind.OPTIONAL_JSON,
        "system": FieldKind.OPTIONAL_JSON,  # a text, the first message unless there is one
        "input": FieldKind.OPTIONAL_JSON,  # a text that follows the prompt after a line break
        "label": FieldKind.OPTIONAL_JSON,  # false for an answer that must not be learnt
    }
    optional = (*kinds,)
    layouts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"},
        {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        {"chosen": "chosen", "rejected": "rejected"},
        {"messages": "messages"},
        {"messages": "conversations"},
        {"prompt": "prompt", "completion": "completion"},
        {"prompt": "instruction", "completion": "output", "input": "input"},
    )
    """Usual names of fields, the first choice first. Pairs are first: they may also have the
    conversation of the chosen answer."""
    extras: ClassVar[dict[str, Any]] = {
        "tools": "tools",
        "template_arguments": "chat_template_kwargs",
        "system": "system",
        "label": "label",
    }
    """Usual names of fields that a record of any layout may have."""
    keeps = True
    risk = (
        ". If the chat template was the reason, because it takes too much memory or does not end, "
        "use another one"
    )
    checks_in_encode = True
    chat_template: ChatTemplate | None = None
    """None until the tokenizer is known."""
    splits_special: bool = False
    """Whether special-token text in a message becomes its id. Otherwise the record is rejected."""
    places: TokenPlaces | None = None

    def __post_init__(self) -> None:
        has = {own: own in self.names for own in self.kinds}
        others = [own for own in ("prompt", "completion", "chosen", "rejected") if has[own]]
        if has["messages"] and others:
            raise ConfigError(
                f"`--field` messages and {others[0]}: expected messages alone, or prompt=NAME for "
                "what precedes the answers."
            )
        if has["chosen"] != has["rejected"]:
            raise ConfigError("`--field`: expected both chosen and rejected, or none of them.")
        if has["chosen"] and has["completion"]:
            raise ConfigError("`--field`: expected completion, or chosen and rejected.")
        if has["prompt"] != has["completion"] and not has["chosen"]:
            raise ConfigError("`--field`: expected both prompt and completion, or none of them.")
        if not others:
            object.__setattr__(self, "names", {"messages": "messages"} | self.names)
        super().__post_init__()

    @classmethod
    def usual_fields(cls) -> Fields:
        """Return the fields of all layouts. A record has some of them."""
        names = chain.from_iterable(layout.values() for layout in (*cls.layouts, cls.extras))
        return dict.fromkeys(names, FieldKind.OPTIONAL_JSON)

    def found(self, can_read: Callable[[Fields], bool]) -> Self:
        """Return the task with the names of the first layout that can be read.

        If no layout can be read, the task stays as it is.

        Args:
            can_read: Returns whether some of the first records of the corpus have some fields.
        """
        layouts = (replace(self, names=dict(layout)) for layout in self.layouts)
        found = next((task for task in layouts if can_read(task.fields)), self)
        extras = dict(self.extras)
        if "chosen" in found.names:
            del extras["label"]
        return replace(found, names=found.names | extras)

    def _name_field(self, missing: str) -> str:
        """Return the options that name the fields of a conversation."""
        return (
            " Name the fields: `--field messages=NAME`, `--field prompt=NAME completion=NAME` or "
            "`--field prompt=NAME chosen=NAME rejected=NAME`."
        )

    @property
    def _endings(self) -> tuple[str, ...]:
        """Fields that end the conversations of a record: one conversation, or a pair."""
        return ("chosen", "rejected") if "chosen" in self.names else ("completion",)

    def with_tokenizer(self, json_bytes: bytes) -> Self:
        """Return the task with the bytes of each token."""
        return replace(self, places=TokenPlaces(json_bytes))

    def texts(self, values: Values) -> list[bytes]:
        """The records as JSON, without missing values; empty for a record that UTF-8 cannot
        express."""
        records = zip(*(values[own] for own in self.names), strict=True)
        return [_json_of([value for value in record if value is not None]) for record in records]

    def unusable(self, values: Values) -> dict[int, str]:
        """Return records that are not a conversation."""
        reasons = {}
        for row, text in enumerate(self.texts(values)):
            try:
                for ending in self._endings:
                    self._numbers(self._conversation(values, row, ending))
            except Unusable as reason:
                reasons[row] = str(reason)
            if not text:
                reasons.setdefault(row, _SURROGATE)
        return reasons

    def encode(self, values: Values, encode: Encode, template: Template) -> Samples:
        """Turn R records into R rows. A pair is one row: the chosen conversation is first."""
        samples = [self._encoded(values, encode, ending) for ending in self._endings]
        if len(samples) == 1:
            return samples[0]
        chosen, rejected = samples
        nothing = np.zeros(len(chosen.has_text), np.int64)
        kinds = rejected.per_token[KINDS]
        rejected.per_token[KINDS] = Ragged(kinds.values | REJECTED, kinds.lengths)
        return Samples(
            {name: join([each.per_token[name] for each in samples]) for name in chosen.per_token},
            {},
            chosen.has_text & rejected.has_text,
            {row: f"rejected: {reason}" for row, reason in rejected.unusable.items()}
            | {row: f"chosen: {reason}" for row, reason in chosen.unusable.items()},
            {
                name: chosen.counts.get(name, nothing) + rejected.counts.get(name, nothing)
                for name in chosen.counts | rejected.counts
            },
        )

    def check_first(self, values: Values) -> None:
        """Compare the texts of the first records with those of `transformers`, if it is installed.

        Raises:
            TokenizerError: A text differs.
        """
        assert self.chat_template
        with bounded() as begin:
            self._compare(values, begin)

    def _compare(self, values: Values, begin: Callable[[], None]) -> None:
        assert self.chat_template
        for row in range(min(_COMPARED, len(next(iter(values.values()), [])))):
            for ending in self._endings:
                begin()
                try:
                    conversation = self._conversation(values, row, ending)
                    self._check_special(conversation)
                    self.chat_template.compare(self.chat_template.with_texts(conversation)[0])
                except Exhausted:
                    return
                except (Unusable, RecursionError):
                    pass

    def _rendered(
        self, values: Values, ending: str, begin: Callable[[], None]
    ) -> tuple[list[Rendered], list[dict[str, list[float]]], dict[int, str], dict[str, np.ndarray]]:
        """Render R conversations, which end with the given field. An unusable one becomes an
        empty text. Return the texts, the numbers of their messages, the reasons, and counts by
        name.

        Raises:
            TokenizerError: Too many renderings take too long.
        """
        assert self.chat_template, "the template is not known"
        rendered: list[Rendered] = []
        numbers: list[dict[str, list[float]]] = []
        num_rows = len(next(iter(values.values())))
        of_rows = {"unread_arguments": np.zeros(num_rows, np.int64)}
        unusable: dict[int, str] = {}
        reads = functools.cache(self.chat_template.reads)
        known = KnownText()
        exhausted = 0
        for row in range(num_rows):
            rendered.append(Rendered())
            numbers.append({})
            begin()
            try:
                conversation = self._conversation(values, row, ending)
                self._check_special(conversation)
                of_messages = self._numbers(conversation) if self.keep else {}
                conversation, num_joined = self.chat_template.with_texts(conversation)
                made = self.chat_template.render(conversation, known)
                is_proved = not made.counts[COUNTS.index("unproved")]
                if not (is_proved or self.splits_special):
                    self._check_joined(conversation)
                if of_messages and not (is_proved and -1 not in made.owners):
                    raise Unusable("it is not certain which tokens belong to which message")
                rendered[-1], numbers[-1] = made, of_messages
                notes = _notes(self.chat_template, conversation, made)
                notes["unread_arguments"] = sum(not reads(name) for name in conversation.arguments)
                notes["joined_parts"] = num_joined
                given = _truth(values["label"][row]) if "label" in values else None
                notes["unread_labels"] = given is not None and not isinstance(given, bool)
                system = values["system"][row] if "system" in values else None
                is_other = conversation.messages[0].get("content") != system
                notes["unread_systems"] = bool(system) and is_other
                for name, number in notes.items():
                    if number and (name in of_rows or len(of_rows) < _MOST_NOTES):
                        of_rows.setdefault(name, np.zeros(num_rows, np.int64))[row] = number
            except Unusable as reason:
                unusable[row] = str(reason)
                exhausted += isinstance(reason, Exhausted)
                if exhausted > _MOST_EXHAUSTED:
                    raise TokenizerError(
                        f"the chat template does not end in {exhausted} of {row + 1:,} "
                        f"conversations, or writes too much. Use another one."
                    ) from None
            except RecursionError:
                unusable[row] = "is nested too deeply"
        return rendered, numbers, unusable, of_rows

    def _encoded(self, values: Values, encode: Encode, ending: str) -> Samples:
        """Turn R records into R conversations, which end with the given field."""
        assert self.places, "the tokenizer is not known"
        assert self.chat_template, "the template is not known"
        with bounded() as begin:
            rendered, numbers, unusable, of_rows = self._rendered(values, ending, begin)
        texts = [each.text.encode() for each in rendered]
        ids = encode(texts)
        tokens = TokensOfTexts(rendered, b"".join(texts), *self.places.starts(texts, ids))
        kinds, counts = tokens.kinds(ids.lengths)
        if not self.splits_special:
            added = self.places.added
            names = (each for each in self.chat_template.special_tokens if each in added)
            special, unknown = {added[each]: each for each in names}, self.places.unknown
            found = tokens.overlapping(ids.values, special, unknown)
            for place, name in found.items():
                row = int(np.searchsorted(ids.offsets, place, "right")) - 1
                unusable.setdefault(row, _JOINED.format(name))
        says = sum(counts[f"{kind.label}_tokens"] for kind in Kind if kind >= Kind.TEXT) > 0
        for row in np.flatnonzero(~says & (ids.lengths > 0)).tolist():
            unusable.setdefault(row, _SILENT)
        counts |= of_rows
        has_text = ids.lengths > 0
        has_text[[*unusable]] = False
        per_token = {INPUT_IDS: ids, KINDS: Ragged(kinds, ids.lengths)}
        for column in self.keep:
            kept = tokens.numbers([each.get(column.name, []) for each in numbers])
            per_token[column.name] = Ragged(kept.astype(column.dtype), ids.lengths)
        return Samples(per_token, {}, has_text, unusable, counts)

    def _numbers(self, conversation: Conversation) -> dict[str, list[float]]:
        """Return the kept numbers of each message, by column. Only those of the assistant need one.

        Raises:
            Unusable: Names the message.
        """
        found: dict[str, list[float]] = {}
        for column in self.keep:
            numbers = found[column.name] = []
            for place, message in enumerate(conversation.messages, 1):
                missing = None if message["role"] == "assistant" else 0
                value = message.get(column.name, missing)
                if not isinstance(value, int | float) or not math.isfinite(value):
                    shown = "no number" if value is None else repr(value)[:SHOWN]
                    raise Unusable(f"message {place} has {shown} in `{column.name}`")
                if reason := not_of_type(np.array([value], np.float64), column):
                    raise Unusable(f"message {place}: `{column.name}` {reason}")
                numbers.append(float(value))
        return found

    def _conversation(self, values: Values, row: int, ending: str) -> Conversation:
        """Return a record as a conversation.

        Raises:
            Unusable: Names the field and the message.
        """
        messages: list[Any] = []
        prompt_is_text = False
        for own, role in (("messages", None), ("prompt", "user"), (ending, "assistant")):
            if own not in values:
                continue
            name, value = self.names[own], values[own][row]
            is_text = isinstance(value, str)
            more_text = values["input"][row] if own == "prompt" and "input" in values else None
            if more_text:
                if not (is_text and isinstance(more_text, str)):
                    raise Unusable(f"field `{name}` or `{self.names['input']}` is not a text")
                value = f"{value}\n{more_text}" if value else more_text
            if role and is_text:
                value = [{"role": role, "content": value}]
            elif role and isinstance(value, dict):  # one message
                value = [value]
            elif role and not isinstance(value, list):
                shown = type(value).__name__
                raise Unusable(f"field `{name}` is {shown}, expected a text or a list of messages")
            try:
                more = read_messages(value)
                if is_text and role == "assistant" and not messages:
                    raise Unusable("is a text without a prompt, expected a list of messages")
                # What follows a prompt may be a whole conversation, which has the prompt.
                is_whole = prompt_is_text and more[0]["role"] != "assistant"
                if is_whole and not any(asks(messages[0]["content"], each) for each in more):
                    raise Unusable("begins with another message, but none is the prompt")
            except Unusable as reason:
                raise Unusable(f"field `{name}` {reason}") from None
            messages = more if is_whole or not messages else continued(messages, more)
            prompt_is_text = role == "user" and is_text
        optional = {
            own: values[own][row] if own in values else None
            for own in ("label", "system", "tools", "template_arguments")
        }
        if _truth(optional["label"]) is False:
            name = self.names["label"]
            raise Unusable(f"field `{name}` is false: an answer that must not be learnt")
        if (system := optional["system"]) is not None and not isinstance(system, str):
            raise Unusable(
                f"field `{self.names['system']}` is {type(system).__name__}, expected a text"
            )
        if system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        tools = self._parsed("tools", optional["tools"], list, "a list")
        arguments = self._parsed(
            "template_arguments", optional["template_arguments"], dict, "an object"
        )
        for tool in tools or ():
            if not isinstance(tool, dict):  # transformers takes functions, too
                name, kind = self.names["tools"], type(tool).__name__
                raise Unusable(f"field `{name}` has a tool that is {kind}, expected an object")
        return Conversation(messages, tools or None, arguments or {})

    def _parsed(self, own: str, value: Any, kind: type, expected: str) -> Any:
        """Return a value that may be written as a text of JSON; None if it is empty."""
        try:
            is_json = isinstance(value, str) and bool(value.strip())
            parsed = json.loads(value) if is_json else value or None
        except (ValueError, RecursionError):
            raise Unusable(f"field `{self.names[own]}` is a text that is not JSON") from None
        if parsed is not None and not isinstance(parsed, kind):
            shown = type(parsed).__name__
            raise Unusable(f"field `{self.names[own]}` is {shown}, expected {expected}")
        return parsed or None

    def _check_special(self, conversation: Conversation) -> None:
        """Reject text of special tokens: the template writes such text for its own tokens.

        Raises:
            Unusable: Names the message.
        """
        messages, tools, arguments = (
            conversation.messages,
            conversation.tools,
            conversation.arguments,
        )
        if not self._problem((messages, tools, arguments)):
            return
        named = [(f"message {number}", message) for number, message in enumerate(messages, 1)]
        parts = [("the list of tools", tools), *named, ("a template argument", arguments)]
        for name, part in parts:
            if problem := self._problem(part):
                raise Unusable(f"{name} {problem}")

    def _check_joined(self, conversation: Conversation) -> None:
        """Reject contents that may form a special token together, if their places are unknown.

        Raises:
            Unusable: A content is a list of parts, or has a part of a special token at its
                beginning or end.
        """
        assert self.chat_template
        for number, message in enumerate(conversation.messages, 1):
            content = message.get("content") or ""
            if isinstance(content, list) or self.chat_template.has_half(content):
                raise Unusable(
                    f"message {number} may form a special token with other texts, because its "
                    "place in the rendered text is not certain; see --special-tokens-in-text"
                )

    def _problem(self, part: Any) -> str:
        """Return why a value of JSON cannot be rendered; empty if it can."""
        assert self.chat_template
        try:
            json_bytes = msgspec.json.encode(part)
        except UnicodeEncodeError:
            return _SURROGATE
        except RecursionError:
            return "is nested too deeply"
        if b"\\u001" in json_bytes and UNLIKE_SPACE.search(json_bytes.decode()):
            return "begins or ends a text with a control character (U+001C to U+001F)"
        if self.splits_special:
            return ""
        found = self.chat_template.special.search(json_bytes.decode())
        if found is None:
            return ""
        return f"has the text of the special token {found[0]!r}; see --special-tokens-in-text"


_SURROGATE = "has a lone surrogate: no UTF-8 can express it"

_JOINED = "has texts that form the special token {!r} together; see --special-tokens-in-text"

_SILENT = "has nothing to learn: the assistant says nothing, or only messages of weight 0"

_COMPARED = 100
"""Records that `transformers` renders too."""

_MOST_EXHAUSTED = 3
"""Renderings of a batch that may take too long. Each takes seconds."""

_MOST_NOTES = 100
"""Different counts, most of them of keys of messages."""


def _notes(
    template: ChatTemplate, conversation: Conversation, rendered: Rendered
) -> dict[str, int]:
    """Count what a template does not write as users may expect."""
    notes: dict[str, int] = Counter()
    if conversation.tools and not template.reads_tools:
        notes["unread_tools"] = 1
    for message in conversation.messages:
        if len(message) == 2 and "content" in message:
            continue
        for key in template.unread_keys(message):
            notes[UNREAD_KEY + key[:SHOWN]] += 1
        weight = message.get("weight", 1)
        notes["zero_weights"] += not is_learnt(message)
        notes["weights"] += is_learnt(message) and weight != 1
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            given = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(given, str) and given:
                notes["text_arguments"] += to_json(given) in rendered.text
    return notes


def _truth(value: Any) -> Any:
    """Return true or false for a text of either, because CSV has only texts."""
    text = value.strip().lower() if isinstance(value, str) else ""
    return {"true": True, "false": False}.get(text, value)


def _json_of(record: list[Any]) -> bytes:
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return b""
