"""Conversations: messages become ids and a kind for each token, by a chat template."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
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
    SURROGATE,
    TOO_DEEP,
    UNREAD_KEY,
    Conversation,
    Message,
    conversation_of,
    is_learnt,
    truth,
)
from tokenfeed.tools.encoding.chat_renderer import UNLIKE_SPACE, Exhausted, bounded, to_json
from tokenfeed.tools.encoding.chat_spans import COUNTS, KnownText, Rendered, TokensOfTexts
from tokenfeed.tools.encoding.tasks.base import (
    OF_MESSAGES,
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

    def _records(self, values: Values) -> list[dict[str, Any]]:
        """Return the values of each record, by the task's names of its fields."""
        rows = zip(*(values[own] for own in self.names), strict=True)
        return [dict(zip(self.names, row, strict=True)) for row in rows]

    def texts(self, values: Values) -> list[bytes]:
        """The records as JSON, without missing values; empty for a record that UTF-8 cannot
        express."""
        columns = (
            map(_canonical, values[own]) if own in OF_MESSAGES else values[own]
            for own in self.names
        )
        records = zip(*columns, strict=True)
        return [_json_of([value for value in record if value is not None]) for record in records]

    def unusable(self, values: Values) -> dict[int, str]:
        """Return records that are not a conversation."""
        reasons = {}
        for row, (text, record) in enumerate(
            zip(self.texts(values), self._records(values), strict=True)
        ):
            try:
                for ending in self._endings:
                    self._numbers(conversation_of(record, self.names, ending))
            except Unusable as reason:
                reasons[row] = str(reason)
            if not text:
                reasons.setdefault(row, SURROGATE)
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

    @property
    def _template(self) -> ChatTemplate:
        assert self.chat_template, "the template is not known"
        return self.chat_template

    def check_first(self, values: Values) -> None:
        """Compare the texts of the first records with those of `transformers`, if it is installed.

        Raises:
            TokenizerError: A text differs.
        """
        with bounded() as begin, suppress(Exhausted):
            records = self._records(values)[:_COMPARED]
            for record, ending in itertools.product(records, self._endings):
                begin()
                try:
                    conversation = conversation_of(record, self.names, ending)
                    self._check_special(conversation)
                    self._template.compare(self._template.with_texts(conversation)[0])
                except Exhausted:
                    raise
                except (Unusable, RecursionError):
                    pass

    def _rendered(
        self, record: dict[str, Any], ending: str, known: KnownText
    ) -> tuple[Rendered, dict[str, list[float]], dict[str, int]]:
        """Render a conversation, which ends with the given field. Return the numbers of its
        messages by kept column, and what users should know of it by name, too.

        Raises:
            Unusable: It cannot be used.
        """
        conversation = conversation_of(record, self.names, ending)
        self._check_special(conversation)
        numbers = self._numbers(conversation) if self.keep else {}
        conversation, num_joined = self._template.with_texts(conversation)
        made = self._template.render(conversation, known)
        is_proved = not made.counts[COUNTS.index("unproved")]
        if not (is_proved or self.splits_special):
            self._check_joined(conversation)
            if self._template.forms_special(conversation, made.text):
                raise Unusable(_FORMED)
        if numbers and not (is_proved and -1 not in made.owners):
            raise Unusable("it is not certain which tokens belong to which message")
        notes = _notes(self._template, conversation, made)
        notes["joined_parts"] = num_joined
        given, system = truth(record.get("label")), record.get("system")
        notes["unread_labels"] = given is not None and not isinstance(given, bool)
        is_other = conversation.messages[0].get("content") != system
        notes["unread_systems"] = bool(system) and is_other
        return made, numbers, notes

    def _encoded(self, values: Values, encode: Encode, ending: str) -> Samples:
        """Turn R records into R conversations, which end with the given field. An unusable one
        becomes an empty text.

        Raises:
            TokenizerError: Too many renderings take too long.
        """
        assert self.places, "the tokenizer is not known"
        records, known, exhausted = self._records(values), KnownText(), 0
        rendered, numbers = [Rendered()] * len(records), [dict[str, list[float]]()] * len(records)
        of_rows = {"unread_arguments": np.zeros(len(records), np.int64)}
        unusable: dict[int, str] = {}
        with bounded() as begin:
            for row, record in enumerate(records):
                begin()
                try:
                    rendered[row], numbers[row], notes = self._rendered(record, ending, known)
                except (Unusable, RecursionError) as error:
                    unusable[row] = str(error) if isinstance(error, Unusable) else TOO_DEEP
                    exhausted += isinstance(error, Exhausted)
                    if exhausted > _MOST_EXHAUSTED:
                        raise TokenizerError(
                            f"the chat template does not end in {exhausted} of {row + 1:,} "
                            f"conversations, or writes too much. Use another one."
                        ) from None
                    continue
                for name, number in notes.items():
                    if number and (name in of_rows or len(of_rows) < _MOST_NOTES):
                        of_rows.setdefault(name, np.zeros(len(records), np.int64))[row] = number
        texts = [each.text.encode() for each in rendered]
        ids = encode(texts)
        tokens = TokensOfTexts(rendered, b"".join(texts), *self.places.starts(texts, ids))
        kinds, counts = tokens.kinds(ids.lengths)
        if not self.splits_special:
            added = self.places.added
            names = (each for each in self._template.special_tokens if each in added)
            special, unknown = {added[each]: each for each in names}, self.places.unknown
            found = tokens.overlapping(ids.values, special, unknown)
            for place, name in found.items():
                row = int(np.searchsorted(ids.offsets, place, "right")) - 1
                unusable.setdefault(row, _JOINED.format(name))
        says = sum(counts[f"{kind.label}_tokens"] for kind in Kind if kind >= Kind.TEXT) > 0
        for row in np.flatnonzero(~says & (ids.lengths > 0)).tolist():
            unusable.setdefault(row, _SILENT)
        has_text = ids.lengths > 0
        has_text[[*unusable]] = False
        per_token = {INPUT_IDS: ids, KINDS: Ragged(kinds, ids.lengths)}
        for column in self.keep:
            kept = tokens.numbers([each.get(column.name, []) for each in numbers])
            per_token[column.name] = Ragged(kept.astype(column.dtype), ids.lengths)
        return Samples(per_token, {}, has_text, unusable, counts | of_rows)

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

    def _check_special(self, conversation: Conversation) -> None:
        """Reject text of special tokens: the template writes such text for its own tokens.

        Raises:
            Unusable: Names the message.
        """
        messages, tools = conversation.messages, conversation.tools
        if not self._problem((messages, tools, conversation.arguments)):
            return
        named = [(f"message {number}", message) for number, message in enumerate(messages, 1)]
        parts = [("the list of tools", tools), *named]
        for name, part in (*parts, ("a template argument", conversation.arguments)):
            if problem := self._problem(part):
                raise Unusable(f"{name} {problem}")

    def _check_joined(self, conversation: Conversation) -> None:
        """Reject contents that may form a special token together, if their places are unknown.

        Raises:
            Unusable: A content is a list of parts, or has a part of a special token at its
                beginning or end.
        """
        for number, message in enumerate(conversation.messages, 1):
            content = message.get("content") or ""
            if isinstance(content, list) or self._template.has_half(content):
                raise Unusable(
                    f"message {number} may form a special token with other texts, because its "
                    "place in the rendered text is not certain; see --special-tokens-in-text"
                )

    def _problem(self, part: Any) -> str:
        """Return why a value of JSON cannot be rendered; empty if it can."""
        try:
            json_bytes = msgspec.json.encode(part)
        except UnicodeEncodeError:
            return SURROGATE
        except RecursionError:
            return TOO_DEEP
        if b"\\u001" in json_bytes and UNLIKE_SPACE.search(json_bytes.decode()):
            return "begins or ends a text with a control character (U+001C to U+001F)"
        if self.splits_special:
            return ""
        found = self._template.special.search(json_bytes.decode())
        if found is None:
            return ""
        return f"has the text of the special token {found[0]!r}; see --special-tokens-in-text"


_FORMED = (
    "the template may form a special token of its texts, because their places in the rendered text "
    "are not certain; see --special-tokens-in-text"
)
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
    notes["unread_arguments"] = sum(not template.reads(name) for name in conversation.arguments)
    if conversation.tools and not template.reads_tools:
        notes["unread_tools"] = 1
    for message in conversation.messages:
        if message["role"] == "assistant":
            notes["empty_answers"] += _is_empty(message)
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
            if isinstance(given, dict):
                notes["null_arguments"] += None in given.values()
    return notes


def _is_empty(message: Message) -> bool:
    """Return whether a message has no text but white space, no call and no thinking."""
    content = message.get("content") or ""
    said = [content] if isinstance(content, str) else [part["text"] for part in content]
    return not (any(map(str.strip, said)) or message.get("tool_calls") or message.get("thinking"))


def _canonical(messages: Any) -> Any:
    """Return messages with one order of keys, and without keys that are null. Their hash chooses
    the split, so the same conversations of JSON Lines and of Parquet are in the same split."""
    if not isinstance(messages, list):
        return messages
    return [
        {key: each[key] for key in sorted(each, key=_place) if each[key] is not None}
        if isinstance(each, dict) and ([*each] != _USUAL or None in each.values())
        else each
        for each in messages
    ]


_USUAL = ["role", "content"]


def _place(key: str) -> tuple[bool, bool, str]:
    return key != "role", key != "content", key


def _json_of(record: list[Any]) -> bytes:
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return b""
