"""One loop, made faster one change at a time, up to `train`.

Every rung trains the same model on the rows of situation (b), saves to the disk of situation (e)
each 400 rows, and keeps all changes of the rungs before it. All are real training on one thread of
a CPU, where neither `.item()` nor a copy to a device costs much.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.scenarios.before import Inputs, RowByRow, new_model, padded_when_needed
from benchmarks.scenarios.case import SCENARIOS, after
from benchmarks.scenarios.data import Data
from benchmarks.scenarios.disk import CLOUD_VOLUME, written_at
from tokenfeed import Fixed, ShardLoader

__all__ = ["RUNGS", "climb"]

Entry = dict[str, Any]

ROWS, LENGTH = 8, 192
SAVED_ROWS = 400
"""Rows between two checkpoints."""
SKIPPED = 5
"""Steps before the first that is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """A loop with the changes of one rung, and of all rungs before it."""

    said: str
    batches: Callable[[Data, int], Any]
    rows: int = ROWS
    item_every: int = 1
    fused: bool = False


def similar_lengths(data: Data, rows: int, workers: int = 0) -> Iterator[Inputs]:
    """Yield batches from shards, padded to their longest row."""
    with ShardLoader(data.shards, batching=Fixed(rows), num_workers=workers) as loader:
        for batch in loader:
            yield {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


class BySimilarLength:
    """Batches from shards, in every epoch."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def __call__(self, data: Data, rows: int) -> Iterator[Inputs]:
        for _ in itertools.count():
            yield from similar_lengths(data, rows, self._workers)


def _again(make: Callable[[Data, int], Any]) -> Callable[[Data, int], Iterator[Inputs]]:
    def batches(data: Data, rows: int) -> Iterator[Inputs]:
        epoch = make(data, rows)
        while True:
            yield from epoch

    return batches


_buckets, _workers = BySimilarLength(0), BySimilarLength(2)
RUNGS = (
    Rung(said="tokenizing in the loop, batches of 1", batches=_again(RowByRow), rows=1),
    Rung(said="batches of 8, padded to 192", batches=_again(padded_when_needed)),
    Rung(said="shards, rows of similar length", batches=_buckets),
    Rung(said="2 workers", batches=_workers),
    Rung(said="no .item(): the loss is read every 10 steps", batches=_workers, item_every=10),
    Rung(said="fused AdamW", batches=_workers, item_every=10, fused=True),
)
LAST = "train: saves in the background"


def climb(data: Data, rung: str, rows: int, seed: int) -> Entry:
    """Train with one rung of the ladder.

    Args:
        data: The rows.
        rung: What the rung changes, or LAST.
        rows: Rows to train; the first steps are not timed.
        seed: Seed of the initial weights.
    """
    if rung == LAST:
        rows_s = _by_train(data, rows, seed)
    else:
        rows_s = _by_loop(data, next(each for each in RUNGS if each.said == rung), rows, seed)
    return {"rows_s": round(rows_s, 1), "epoch_s": round(len(data.train) / rows_s, 1)}


def _by_loop(data: Data, rung: Rung, rows: int, seed: int) -> float:
    """Return the rows per second of a loop."""
    torch.manual_seed(seed)
    model = new_model(data)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=rung.fused)
    steps, save_every = rows // rung.rows, SAVED_ROWS // rung.rows
    total = torch.zeros(())
    with tempfile.TemporaryDirectory() as folder:
        batches = rung.batches(data, rung.rows)
        for step, batch in zip(range(-SKIPPED, steps), batches, strict=False):
            if step == 0:
                began = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            if step % rung.item_every == 0:
                total.item()
            if step >= 0 and step % save_every == save_every - 1:
                path = Path(folder) / "checkpoint.pt"
                with written_at(CLOUD_VOLUME, path):
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, path)
        seconds = time.perf_counter() - began
        batches.close()
    return steps * rung.rows / seconds


def _by_train(data: Data, rows: int, seed: int) -> float:
    """Return the rows per second of `train` with the same model, rows and saves."""
    like = SCENARIOS["b"]
    scenario = dataclasses.replace(
        like,
        loop=dataclasses.replace(like.loop, disk=CLOUD_VOLUME),
        steps=rows // ROWS,
        settings=like.settings | {"save_every": SAVED_ROWS // ROWS},
    )
    speed = after(scenario, data, seed).marks.speed()
    return speed["steps_s"] * ROWS
