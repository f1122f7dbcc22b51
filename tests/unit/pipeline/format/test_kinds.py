"""Targets chosen at load time: which tokens of a conversation have a loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import rows_of_ids, write_rows

from tokenfeed import Fixed, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import BEGINS, Kind, TargetRule
from tokenfeed.pipeline.format.schema import Rows, task_columns

VOCABULARY = 500
CHAT = task_columns("chat")


def odd_kinds(kinds: np.ndarray) -> np.ndarray:
    """A user's own choice."""
    chosen: np.ndarray = (kinds & 1) == 1
    return chosen


def user_bytes(kinds: np.ndarray) -> np.ndarray:
    return kinds


CHOICES: list[Any] = [
    "assistant",
    "last",
    {"text", "call"},
    {"user"},
    "thinking,stop",
    "all",
    odd_kinds,
]


def conversations(seed: int = 0, count: int = 60) -> Rows:
    """Rows of messages of random kinds, some without any of the assistant."""
    rng = np.random.default_rng(seed)
    rows, lengths = [], []
    for _ in range(count):
        messages = [
            np.full(rng.integers(1, 9), rng.choice(8), np.uint8) for _ in range(rng.integers(1, 7))
        ]
        for message in messages:
            message[0] |= BEGINS if message[0] else 0
        rows.append(np.concatenate(messages))
        lengths.append(len(rows[-1]))
    ids = np.arange(sum(lengths)) % VOCABULARY
    made = rows_of_ids(ids, np.array(lengths), VOCABULARY)
    made.per_token["kinds"] = np.concatenate(rows)
    return made


def slow_mask(kinds: list[int], targets: Any) -> list[bool]:
    """The definition, token by token, of one row."""
    says = [bool(kind & 4) for kind in kinds]
    if targets == "assistant":
        return says
    if targets == "all":
        return [True for _ in kinds]
    if targets == "last":
        begins = [at for at, kind in enumerate(kinds) if kind & 4 and kind & 0x80]
        return [bool(begins) and at >= begins[-1] and is_said for at, is_said in enumerate(says)]
    if callable(targets):
        return list(map(bool, targets(np.array(kinds, np.uint8))))
    named = targets.split(",") if isinstance(targets, str) else targets
    names = {*named} | ({"stop"} if {"text", "call"} & {*named} else set())
    return [Kind(kind & 7).label in names for kind in kinds]


@given(st.integers(0, 1000), st.sampled_from(CHOICES[:5] + CHOICES[6:]))
def test_mask_is_that_of_each_row_alone(seed: int, targets: Any) -> None:
    rows = conversations(seed, count=5)
    rule = TargetRule.from_setting(targets, CHAT)
    assert rule
    kinds = np.split(rows.per_token["kinds"], np.cumsum(rows.lengths)[:-1])
    expected = [flag for row in kinds for flag in slow_mask(row.tolist(), targets)]
    assert rule.mask(rows.per_token["kinds"], rows.lengths).tolist() == expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("asistant", "a set of template, system, user, tool, text, thinking, call, stop"),
        (set(), "expected assistant, last, all"),
        ({"text", "texts"}, "expected assistant, last, all"),
        (user_bytes, "returned uint8 of shape"),
    ],
)
def test_unknown_targets_are_rejected(
    tmp_path: Path, targets: str | Callable[..., Any], expected: str
) -> None:
    chat = write_rows(tmp_path / "chat", {"train": conversations()}, VOCABULARY, task="chat")
    with pytest.raises(ConfigError, match=expected):
        next(iter(ShardLoader(chat, batching=Fixed(4), num_workers=0, targets=targets)))
