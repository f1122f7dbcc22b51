"""Kinds: the role of each token in a conversation, and which tokens a loss counts.

A shard of conversations has one byte per token. Bits 0 to 2 are the kind, bit 7 marks the first
token of a message, bit 6 marks the tokens of a rejected conversation, and the other bits are 0. The
loader turns kinds into targets, so the same shards serve every choice. Torch-free.
"""

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

import numpy as np

from tokenfeed.pipeline.arithmetic import offsets_of
from tokenfeed.pipeline.checks import refusal
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.schema import KINDS, Column


class Kind(enum.IntEnum):
    """The kind of a token of a conversation. Kinds of tokens of the assistant have bit 2 set."""

    TEMPLATE = 0
    """Written by the template: headers, separators, lists of tools."""
    SYSTEM = 1
    USER = 2
    TOOL = 3
    """The result of a tool."""
    TEXT = 4
    THINKING = 5
    CALL = 6
    """A call of a tool."""
    STOP = 7
    """The token by which the assistant ends its message, and what the template counts with it."""

    __hash__ = int.__hash__  # that of Enum is written in Python

    @property
    def label(self) -> str:
        """The name in options and messages."""
        return self.name.lower()


BEGINS = np.uint8(0x80)
"""Bit of the first token of a message."""
REJECTED = np.uint8(0x40)
"""Bit of each token of the rejected conversation, which follows the chosen one in its row."""
_ASSISTANT = np.uint8(4)
_OF_MESSAGES = (Kind.TEXT, Kind.CALL)
"""Kinds that bring the stop token with them: a model that never learns to stop is no use."""

Targets = str | Collection[str] | Callable[[np.ndarray], np.ndarray]
"""Which tokens of a conversation are targets.

    "assistant"       everything the assistant says, with its stop tokens
    "last"            the same, but only in the last message of the assistant that has tokens
    "all"             every token; the kinds are not read
    {"text", "call"}  tokens of these kinds, also written "text,call". "text" and "call" include
                      the stop tokens.
    a function        takes the kinds of many tokens (uint8) and returns a bool for each

Of a pair, only the chosen conversation has targets, except for "all" and functions.
"""


def kinds_of(values: np.ndarray) -> np.ndarray:
    """Return the kind of each token, without the other bits."""
    kinds: np.ndarray = values & np.uint8(7)
    return kinds


@dataclass(frozen=True, slots=True)
class TargetRule:
    """Decides which tokens of conversations are targets."""

    given: str | frozenset[str] | Callable[[np.ndarray], np.ndarray]

    @classmethod
    def from_setting(cls, targets: Targets | None, columns: tuple[Column, ...]) -> Self | None:
        """Return the rule of a loader's `targets`; None if all tokens are targets.

        Args:
            targets: The setting. None means "assistant" for conversations, and no rule otherwise.
            columns: The columns of the data set.

        Raises:
            ConfigError: The setting is unknown, or the data set has no conversations.
        """
        if not any(column.name == KINDS for column in columns):
            if targets is None:
                return None
            raise refusal(
                "targets", targets, "no value: only data sets of `--task chat` have a choice"
            )
        if targets is None or targets == "assistant":
            return cls("assistant")
        if targets == "all":
            return None
        if targets == "last":
            return cls("last")
        if callable(targets):
            return cls(targets)
        names = targets.split(",") if isinstance(targets, str) else list(targets)
        known = [kind.label for kind in Kind]
        if not names or not set(names) <= set(known):
            expected = f"assistant, last, all, a function, or a set of {', '.join(known)}"
            raise refusal("targets", targets, expected)
        return cls(frozenset(names))

    def mask(self, kinds: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return which tokens are targets, shape (N,), bool.

        Args:
            kinds: The column of whole rows, shape (N,), uint8.
            lengths: Tokens of each row, shape (R,).

        Raises:
            ConfigError: The user's function returned something else than a bool per token.
        """
        if self.given == "assistant":
            return _says(kinds)
        if self.given == "last":
            return _last(kinds, lengths)
        if isinstance(self.given, frozenset):
            wanted = np.array([kind.label in self.given for kind in Kind])
            wanted[Kind.STOP] |= wanted[list(_OF_MESSAGES)].any()
            mask: np.ndarray = wanted[kinds_of(kinds)] & ((kinds & REJECTED) == 0)
            return mask
        assert callable(self.given)
        found = np.asarray(self.given(kinds))
        if found.dtype != np.bool_ or found.shape != kinds.shape:
            raise ConfigError(
                f"`targets`: the function returned {found.dtype} of shape {found.shape}, expected "
                f"bool of shape {kinds.shape}: whether each token is a target."
            )
        return found


def _says(kinds: np.ndarray) -> np.ndarray:
    """Return what the assistant says in chosen conversations."""
    says: np.ndarray = (kinds & (_ASSISTANT | REJECTED)) == _ASSISTANT
    return says


def _last(kinds: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the tokens of each row's last message of the assistant."""
    is_assistant = _says(kinds)
    begins = np.flatnonzero(is_assistant & ((kinds & BEGINS) != 0))
    offsets = offsets_of(lengths)
    at = np.searchsorted(begins, offsets[1:]) - 1
    last = np.append(begins, len(kinds))[at]  # a row without a message has that of a row before
    mask: np.ndarray = is_assistant & (np.arange(len(kinds)) >= np.repeat(last, lengths))
    return mask
