"""Targets chosen at load time are those of shards made with the same mask, in the same order."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import random_rows, rows_of_ids, write_rows
from torch import Tensor

from tokenfeed import Fixed, Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.kinds import BEGINS, Kind, TargetRule
from tokenfeed.pipeline.format.schema import IGNORED, Rows, task_columns
from tokenfeed.pipeline.planning.policies import Batching

VOCABULARY = 500
POLICIES = [
    Padded(256),
    Padded(48, multiple_of=8),
    Fixed(3),
    Packed(64, 2),
    Packed(24, 2, long_rows="truncate"),
    Packed(32, 2, split=True),
]
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


def batches_of(loader: ShardLoader) -> list[dict[str, Tensor]]:
    with loader:
        return [{name: batch[name] for name in batch} for batch in loader]


def assert_equal_batches(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        for name, tensor in our.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(their[name])), name


def masked_shards(folder: Path, rows: Rows, targets: Any) -> Path:
    """The same rows, with the labels in the shards: the ids where the mask is, else -100."""
    kinds = np.split(rows.per_token["kinds"], np.cumsum(rows.lengths)[:-1])
    mask = np.array([flag for row in kinds for flag in slow_mask(row.tolist(), targets)])
    labels = np.where(mask, rows.ids.astype(np.int16), IGNORED).astype(np.int16)
    made = Rows(rows.lengths, {"input_ids": rows.ids, "labels": labels}, rows.per_row)
    return write_rows(folder, {"train": made}, VOCABULARY, task="tag")


@pytest.mark.parametrize(
    ("targets", "batching"),
    [*zip(CHOICES, cycle(POLICIES), strict=False)],
    ids=range(len(CHOICES)),
)
def test_loader_targets_equal_shards_made_with_that_mask(
    tmp_path: Path, batching: Batching, targets: Any
) -> None:
    """`test_batch.py` has every policy with the targets `assistant`."""
    rows = conversations()
    chat = write_rows(tmp_path / "chat", {"train": rows}, VOCABULARY, task="chat")
    masked = masked_shards(tmp_path / "masked", rows, targets)
    ours = batches_of(ShardLoader(chat, batching=batching, num_workers=0, targets=targets))
    loader = ShardLoader(masked, batching=batching, num_workers=0)
    with loader:
        theirs = []
        for batch in loader:
            labels = batch["labels"].clone().view(-1)
            places = torch.arange(labels.numel()).view(batch["input_ids"].shape)
            offsets = batch.sequence_offsets
            for sequence in range(len(offsets) - 1):
                at = 0
                for length in batch.piece_lengths[offsets[sequence] : offsets[sequence + 1]]:
                    labels[places[sequence, at]] = IGNORED  # the first token has no context
                    at += int(length)
            assert batch.num_targets == int((batch["labels"] != IGNORED).sum())
            tensors = {name: batch[name] for name in batch}
            theirs.append(tensors | {"labels": labels.view(batch["input_ids"].shape)})
    assert_equal_batches(ours, theirs)


def test_order_and_state_do_not_depend_on_targets(tmp_path: Path) -> None:
    chat = write_rows(tmp_path / "chat", {"train": conversations()}, VOCABULARY, task="chat")
    states = []
    for targets in CHOICES[:4]:
        with ShardLoader(
            chat, batching=Padded(128), num_workers=0, targets=targets, rank=0, world_size=2
        ) as loader:
            batches = iter(loader)
            next(batches), next(batches)
            states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    ahead = ShardLoader(
        chat, batching=Padded(128), num_workers=0, rank=0, world_size=2, targets="last"
    )
    ahead.load_state_dict(states[0])
    straight = ShardLoader(
        chat, batching=Padded(128), num_workers=0, rank=0, world_size=2, targets="last"
    )
    assert_equal_batches(batches_of(ahead), batches_of(straight)[2:])


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


def test_targets_of_documents_are_rejected(tmp_path: Path) -> None:
    rows = random_rows(np.array([5, 6]), vocabulary_size=VOCABULARY)
    documents = write_rows(tmp_path / "lm", {"train": rows}, VOCABULARY)
    with pytest.raises(ConfigError, match="`targets`='last': expected no value: only"):
        ShardLoader(documents, batching=Fixed(2), targets="last")
