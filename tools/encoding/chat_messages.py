"""Conversations: the fields of a record become messages in the layout that templates read."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from tokenfeed.pipeline.format.kinds import Kind
from tokenfeed.tools.corpus.records import Unusable
from tokenfeed.tools.encoding.chat_renderer import copied

Message = dict[str, Any]

ROLES: dict[str, Kind] = {
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
KNOWN_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", "weight", *_THINKING))
"""Keys of messages that are read, whatever the template names."""
SURROGATE, TOO_DEEP = "has a lone surrogate: no UTF-8 can express it", "is nested too deeply"
UNREAD_KEY = "unread_key "
"""Begins the count of a key of messages that is not read."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The variables that a chat template receives."""

    messages: list[Message]
    tools: list[Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the template, such as `enable_thinking`."""

    def copied(self) -> "Conversation":
        """Return a copy that templates may read and change; see `chat_renderer.copied`."""
        return Conversation(copied(self.messages), copied(self.tools), copied(self.arguments))

    def until(self, stop: int) -> "Conversation":
        """Return the conversation with its first messages only."""
        return replace(self, messages=self.messages[:stop])


def conversation_of(record: dict[str, Any], names: dict[str, str], ending: str) -> Conversation:
    """Return a record as a conversation.

    Args:
        record: The values of the record by field of `--task chat`: `messages`, or `prompt` and what
            follows it, and perhaps `input`, `label`, `system`, `tools`, `template_arguments`.
        names: The user's name of each field, for errors.
        ending: The field with what follows the prompt.

    Raises:
        Unusable: Names the field and the message.
    """
    messages: list[Message] = []
    prompt_is_text = False
    for own, role in (("messages", None), ("prompt", "user"), (ending, "assistant")):
        if own not in record:
            continue
        name, value = names[own], record[own]
        is_text = isinstance(value, str)
        if more_text := record.get("input") if own == "prompt" else None:
            if not (is_text and isinstance(more_text, str)):
                raise Unusable(f"field `{name}` or `{names['input']}` is not a text")
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
            if is_whole and not any(_asks(messages[0]["content"], each) for each in more):
                raise Unusable("begins with another message, but none is the prompt")
        except Unusable as reason:
            raise Unusable(f"field `{name}` {reason}") from None
        messages = more if is_whole or not messages else _continued(messages, more)
        prompt_is_text = role == "user" and is_text
    if truth(record.get("label")) is False:
        raise Unusable(f"field `{names['label']}` is false: an answer that must not be learnt")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise Unusable(f"field `{names['system']}` is {type(system).__name__}, expected a text")
    if system and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    tools = _parsed(record, "tools", names, list, "a list")
    arguments = _parsed(record, "template_arguments", names, dict, "an object")
    for tool in tools or ():
        if not isinstance(tool, dict):  # transformers takes functions, too
            name, kind = names["tools"], type(tool).__name__
            raise Unusable(f"field `{name}` has a tool that is {kind}, expected an object")
    return Conversation(messages, tools or None, arguments or {})


def truth(value: Any) -> Any:
    """Return true or false for a text of either, because CSV has only texts."""
    text = value.strip().lower() if isinstance(value, str) else ""
    return {"true": True, "false": False}.get(text, value)


def _parsed(
    record: dict[str, Any], own: str, names: dict[str, str], kind: type, expected: str
) -> Any:
    """Return a value that may be written as a text of JSON; None if it is empty."""
    value = record.get(own)
    try:
        parsed = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError):
        raise Unusable(f"field `{names[own]}` is a text that is not JSON") from None
    if parsed is not None and not isinstance(parsed, kind):
        shown = type(parsed).__name__
        raise Unusable(f"field `{names[own]}` is {shown}, expected {expected}")
    return parsed


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
    if isinstance(value, dict):
        value = _listed(value)
    if not isinstance(value, list) or not value:
        shown = "an empty list" if value == [] else type(value).__name__
        raise Unusable(f"is {shown}, expected a list of messages")
    return [_message(raw, f"message {number}") for number, raw in enumerate(value, 1)]


def _listed(value: dict[str, Any]) -> Any:
    """Return messages that `datasets` stored as a Sequence: an object of lists of one length."""
    lists = [*value.values()]
    if not all(isinstance(each, list) and len(each) == len(lists[0]) for each in lists):
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*lists, strict=True)]


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _asks(prompt: str, message: Message) -> bool:
    """Return whether a message of the user has the text of a prompt."""
    return message["role"] == "user" and _text(message).strip() == prompt.strip()


def _continued(messages: list[Message], more: list[Message]) -> list[Message]:
    """Return a conversation that begins with `messages` and continues with `more`.

    If `more` does not begin with the assistant, it may repeat all messages or the last of them. Or
    it is the whole conversation: it has a system message before the messages, or another answer to
    the first of them.
    """
    old, new = (
        [(each["role"], _text(each), each.get("tool_calls")) for each in part]
        for part in (messages, more)
    )
    size = len(old)
    if new[0][0] == "assistant":
        return more if new[:size] == old else messages + more
    if old[:1] == new[:1] or any(new[k : k + size] == old for k in range(1, len(new))):
        return more
    first = next(n for n in range(size + 1) if old[n:] == new[: size - n])
    return messages[:first] + more


def _message(raw: Any, name: str) -> Message:
    if not isinstance(raw, dict):
        raise Unusable(f"has {name} that is {type(raw).__name__}, expected role and content")
    message = raw
    if len(raw) == 2 and isinstance(raw.get("content"), str):  # most of them
        role = raw.get("role")
        if isinstance(role, str) and role in ROLES:
            return message
    if None in raw.values():  # as in transformers
        message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _from_share_gpt(message, name)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        expected = "system, user, assistant or tool"
        raise Unusable(f"has {name} with the role {role!r:.40}, expected {expected}")
    if "function_call" in message:  # the older layout of OpenAI
        message = _with_tool_call(message, name)
    calls = message.get("tool_calls") or []
    if not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise Unusable(f"has {name} with tool_calls that are not a list of objects with a name")
    key = next((key for key in _THINKING if key in message), None)
    if key and message[key] is not False:  # a flag of some data sets, which no template writes
        if not isinstance(thinking := message[key], str):
            kind = type(thinking).__name__
            raise Unusable(f"has {name} whose {key} is {kind}, expected text")
        # The order is that of transformers: templates may write a message as JSON.
        message = {"thinking": thinking, **message, "reasoning_content": thinking}
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise Unusable(f"has {name} with a part that is not text")
    elif not isinstance(content, str):
        if content is not None:
            raise Unusable(f"has {name} whose content is {type(content).__name__}, expected text")
        if not message.get("tool_calls") and message.get("thinking", False) is False:
            raise Unusable(f"has {name} ({role}) without content")
    return message


def _is_call(call: Any) -> bool:
    """Return whether a value is a call of a function, in the layout of OpenAI or without it."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


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


def _with_tool_call(message: Message, name: str) -> Message:
    call = message["function_call"]
    if not isinstance(call, dict) or message.get("tool_calls"):
        raise Unusable(f"has {name} with a function_call that is not one object")
    others = {key: given for key, given in message.items() if key != "function_call"}
    return {**others, "tool_calls": [{"type": "function", "function": call}]}


def is_learnt(message: Message) -> bool:
    """Return whether a loss may count a message: it has no `weight` of 0."""
    if "weight" not in message:
        return True
    weight = message["weight"]
    return not (isinstance(weight, int | float) and weight == 0)
