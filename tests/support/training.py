"""What tests of training share: a corpus small enough to be learnt in seconds, runs of it, and what
they leave."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from support.data_sets import random_rows, write_rows
from tokenfeed.pipeline.format.schema import IGNORED, Task, task_columns
from tokenfeed.tools.train_settings import read_command
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints, part_of
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.micro_batch import Head, HeadKind, MicroBatch
from tokenfeed.trainer.distributed.world import State
from tokenfeed.trainer.loop.run import train
from tokenfeed.trainer.models.gpt import SIZES, ModelSize, Transformer
from tokenfeed.trainer.report.run_files import Report
from tokenfeed.trainer.stall import Cause, StallMeter
from tokenfeed.trainer.tasks.registry import TASKS

VOCABULARY = 64

Ids = tuple[np.ndarray, np.ndarray]

LONGEST = 24
"""Tokens of the longest labelled row."""
_NAMES: dict[Task, tuple[str, ...]] = {
    "classify": ("joy", "fear"),
    "tag": ("O", "B-A", "I-A", "B-B", "I-B"),
}


RUNS: dict[str, dict[str, Any]] = {
    f"{task} {batching}": {"shards": task, "batching": batching}
    for task in TASKS
    for batching in ("packed", "padded")
    if not (TASKS[task].kind == "row" and batching == "packed")  # one label a row is not packed
} | {
    "pairs padded": {"shards": "pairs", "batching": "padded"},
}
"""Settings of all that is learnt, each way; `shards` is in the folder of `write_every_task`."""


def write_every_task(folder: Path) -> Path:
    """A data set of each task, and one of pairs of texts."""
    for task in TASKS:
        write_labelled(folder / task, task, count=150)
    write_labelled(folder / "pairs", "classify", count=150, pairs=True)
    return folder


def write_labelled(folder: Path, name: Task, count: int = 40, *, pairs: bool = False) -> Path:
    """Random rows of a task, for training, validation and test."""
    rng = np.random.default_rng(1)
    splits = {
        split: random_rows(
            rng.integers(2, LONGEST + 1, rows).astype(np.int64),
            name,
            pairs=pairs,
            vocabulary_size=VOCABULARY,
        )
        for split, rows in (("train", count), ("validation", 12), ("test", 9))
    }
    return write_rows(
        folder,
        splits,
        VOCABULARY,
        task=name,
        columns=task_columns(name, pairs=pairs),
        label_names=_NAMES.get(name, ()),
        tokenizer=word_tokenizer(),
    )


def word_tokenizer() -> bytes:
    """A tokenizer.json whose ids 2 k and 2 k + 1 are a word in lower and in upper case."""
    words = [f"{letter}{number}" for number in range(VOCABULARY // 2) for letter in "wW"]
    vocabulary = {word: id for id, word in enumerate(words)}
    return Tokenizer(WordLevel(vocabulary, unk_token=words[0])).to_str().encode()


def counting_rows(num_rows: int) -> Ids:
    """Rows that count upwards from a random start, so that each token tells the next."""
    rng = np.random.default_rng(num_rows)
    lengths = rng.integers(4, 40, num_rows)
    starts = rng.integers(0, VOCABULARY, num_rows)
    nth = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (np.repeat(starts, lengths) + nth) % VOCABULARY, lengths


def write_counting(
    write_dataset: Callable[..., Path],
    folder: Path,
    *,
    rows: int = 2000,
    validation_rows: int = 24,
) -> Path:
    """A data set of counting rows, by the fixture that writes data sets."""
    splits = {"train": counting_rows(rows)}
    if validation_rows:
        splits["validation"] = counting_rows(validation_rows)
    return write_dataset(folder, splits, VOCABULARY)


def make_head(vocabulary_size: int = VOCABULARY, *, kind: HeadKind = "vocabulary") -> Head:
    outputs = vocabulary_size if kind == "vocabulary" else 5
    return Head(kind=kind, outputs=outputs, vocabulary_size=vocabulary_size)


def make_transformer(name: str = "tiny", vocabulary_size: int = VOCABULARY) -> Transformer:
    """A decoder."""
    return Transformer(SIZES[name], make_head(vocabulary_size))


def one_document_a_row(ids_BT: torch.Tensor, labels_BT: torch.Tensor | None = None) -> MicroBatch:
    """Full rows, read forwards."""
    bare = MicroBatch.of_ids(ids_BT, causal=True)
    if labels_BT is None:
        return bare
    targets_BT = torch.nn.functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    return dataclasses.replace(bare, targets=targets_BT)


def small_model(head: Head) -> Transformer:
    """A model of one's own, as --model names it: quicker than the smallest that is built in."""
    return Transformer(ModelSize(layers=2, width=64, heads=2), head)


def one_layer_model(head: Head) -> Transformer:
    """The same with one layer: to simulate or to compile a step takes half of the time."""
    return Transformer(ModelSize(layers=1, width=64, heads=2), head)


def convolving_model(head: Head) -> Transformer:
    """The same with a convolution. A test names this function by text."""
    model = small_model(head)
    model.convolution = torch.nn.Conv1d(1, 1, 1)
    return model


PAUSE_SECONDS = 0.05


class _Pausing(Transformer):
    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        time.sleep(PAUSE_SECONDS)
        return super().forward(micro_batch)


def pausing_model(head: Head) -> Transformer:
    """A model of one's own whose forward pass takes at least `PAUSE_SECONDS`."""
    return _Pausing(ModelSize(layers=1, width=64, heads=2), head)


class _Lost(Transformer):
    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        logits = super().forward(micro_batch)
        return logits if self.training else logits * torch.nan


def lost_model(head: Head) -> Transformer:
    """The same, and its predictions are NaN when it is evaluated."""
    return _Lost(ModelSize(layers=2, width=64, heads=2), head)


def double_model(head: Head) -> Transformer:
    """The same in double precision: what is left of a difference is no rounding."""
    return small_model(head).double()


def dropping_model(head: Head) -> Transformer:
    """The same with dropout, so that it draws random numbers in every step."""
    return Transformer(ModelSize(layers=2, width=64, heads=2), head, dropout=0.1)


def dropping_double_model(head: Head) -> Transformer:
    """The one with dropout in double precision."""
    return dropping_model(head).double()


def make_config(
    shards: Path | str | dict[str, float], run_dir: Path, **changes: Any
) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": "support.training:small_model",
        "steps": 8,
        "sequence_length": 32,
        "micro_batch_tokens": 128,
        "step_tokens": 256,
        "warmup_steps": 2,
        "eval_every": 4,
        "eval_tokens": 1 << 20,  # the whole split, also where the command would choose fewer
        "save_every": 4,
        "log_every": 1,
        "device": "cpu",
    }
    named = shards if isinstance(shards, dict) else str(shards)
    return TrainConfig(shards=named, run_dir=run_dir, **settings | changes)


def parsed(*words: object) -> TrainConfig:
    """The settings of the words of a command line of `train`."""
    with mock.patch.object(sys, "argv", ["train", *map(str, words)]):
        return read_command().command.settings()


def run(config: TrainConfig, stop_after: int | None = None) -> Report:
    """Train; `stop_after` so many steps of this session, as a signal would."""
    steps = 0

    def count_step() -> bool:  # should_save is asked once a step
        nonlocal steps
        steps += 1
        return False

    return train(config, lambda: stop_after is not None and steps >= stop_after, count_step)


def go_on_from(whole: Path, step: int, config: TrainConfig) -> Report:
    """Train the rest of a run in another folder, from a checkpoint of the whole run, as if that run
    had been killed after this step."""
    saved = f"checkpoints/step-{step:08d}"
    shutil.copytree(whole / saved, config.run_dir / saved)
    shutil.copy(whole / "metrics.jsonl", config.run_dir)
    return run(dataclasses.replace(config, resume=True))


def follow_brackets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Cause | None]:
    """Says in which bracket of a stall meter the loop is; None within a step."""
    entered: list[Cause] = []
    bracket = StallMeter.cause

    @contextlib.contextmanager
    def follow(meter: StallMeter, name: Cause) -> Iterator[None]:
        with bracket(meter, name):
            entered.append(name)
            try:
                yield
            finally:
                entered.pop()

    monkeypatch.setattr(StallMeter, "cause", follow)
    return lambda: entered[-1] if entered else None


def read_metrics(run_dir: Path, key: str) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    values = [(line["step"], line[key]) for line in lines if key in line]
    assert len(dict(values)) == len(values), "a step was written twice"
    return dict(values)


def load_weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return part_of(load_state(run_dir, step), "model.")


def load_state(run_dir: Path, step: int) -> State:
    """All that a checkpoint holds."""
    return Checkpoints.of_run(run_dir).open(step).read()


def assert_same_run(one: Path, other: Path, last_step: int) -> None:
    for key in ("loss", "validation_loss", "tokens", "learning_rate", "gradient_norm"):
        assert read_metrics(one, key) == read_metrics(other, key)
    weights, others = load_weights(one, last_step), load_weights(other, last_step)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def failing_model(head: Head) -> Transformer:
    """The same, whose fifth forward pass in training is not finite."""
    model, calls = small_model(head), itertools.count(1)

    def spoil(_: object, given: tuple[MicroBatch], hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD * torch.nan if model.training and next(calls) == 5 else hidden_BTD

    model.norm.register_forward_hook(spoil)
    return model


def frozen_model(head: Head) -> Transformer:
    """The same with a layer and the embedding that are not trained."""
    model = small_model(head)
    for part in (model.embedding, model.blocks[0]):
        part.requires_grad_(False)
    return model


OVERFLOWS = {3, 4, 5, 10, 60, 120, 121}
"""Backward passes of `overflowing_model` whose gradients are infinite, counted from 1."""
SEEN: list[MicroBatch] = []
"""Micro-batches that `overflowing_model` was trained on, in order, since a test cleared this."""


def overflowing_model(head: Head) -> Transformer:
    """The model of one layer, whose gradients overflow in some backward passes; of several ranks,
    on rank 1 only."""
    model = one_layer_model(head)

    def note(_: object, given: tuple[MicroBatch]) -> None:
        if model.training:
            SEEN.append(given[0])

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        is_here = os.environ.get("RANK", "1") == "1"
        return gradient * torch.inf if len(SEEN) in OVERFLOWS and is_here else gradient

    def watch(_: object, given: object, hidden_BTD: torch.Tensor) -> None:
        if hidden_BTD.requires_grad:
            hidden_BTD.register_hook(spoil)

    model.register_forward_pre_hook(note)
    model.norm.register_forward_hook(watch)
    return model


def overflowing_for_25(head: Head) -> Transformer:
    """The model of one layer, whose gradients overflow in the first 25 backward passes."""
    model, calls = one_layer_model(head), itertools.count(1)
    model.norm.weight.register_hook(
        lambda gradient: gradient * torch.inf if next(calls) <= 25 else gradient
    )
    return model


def overflowing_for_ever(head: Head) -> Transformer:
    """The model of one layer, whose gradients always overflow."""
    model = one_layer_model(head)
    model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    return model


def fading_model(head: Head) -> Transformer:
    """A model in double precision with a layer that only the first four micro-batches use."""
    model, calls = small_model(head), itertools.count(1)
    model.early = torch.nn.Linear(64, 64, bias=False)

    def add(_: object, given: object, hidden_BTD: torch.Tensor) -> torch.Tensor:
        own = 4 // int(os.environ.get("WORLD_SIZE", "1"))
        used = model.training and next(calls) <= own
        return hidden_BTD + model.early(hidden_BTD) if used else hidden_BTD

    model.norm.register_forward_hook(add)
    return model.double()
