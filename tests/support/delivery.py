"""What tests of delivery share: little data in several windows, and what was delivered of it."""

import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pyarrow import ipc
from torch.utils.data import DataLoader

from tokenfeed import Batch, Fixed, Packed, Padded, ShardDataset, ShardLoader
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.planning.state import resealed

MakeDataset = Callable[..., Path]
Span = tuple[int, int, int]
Step = list[list[Span]]

WINDOW_TOKENS = 13_000
POLICIES: list[Batching] = [
    Padded(max_tokens=2048),
    Packed(sequence_length=256, batch_size=4),
    Packed(sequence_length=256, batch_size=4, split=True),
    Fixed(batch_size=16),
]


def with_settings(state: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a state with other settings of its plan, and a right checksum if they have types and
    ranges of settings."""
    changed = state | {"plan": state["plan"] | settings}
    try:
        return resealed(changed)
    except msgspec.ValidationError:
        return changed


PREAMBLE = """
import glob, json, os, signal, sys, threading, time
from tokenfeed import Padded, ShardLoader

def open_loader(**options):
    options |= {"batching": Padded(2048), "window_tokens": 13_000}
    return ShardLoader(sys.argv[1], **options)

def children():
    paths = glob.glob("/proc/self/task/*/children")
    return [int(pid) for path in paths for pid in open(path).read().split()]
"""
"""What scripts begin with that run a loader over the folder they are given."""


def realistic_lengths(count: int = 600, mean: float = 4.0, seed: int = 0) -> np.ndarray:
    """Lengths as texts have them: most are short, a few are longer than a micro-batch."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(mean, 1.2, count), 1, 3000).astype(int)


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several record batches out of little data."""
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 3_000)


def open_loader(folder: Path, batching: Batching = POLICIES[0], **options: Any) -> ShardLoader:
    """A loader of several windows, without workers unless they are asked for."""
    defaults: dict[str, Any] = {"window_tokens": WINDOW_TOKENS, "num_workers": 0}
    return ShardLoader(folder, batching=batching, **defaults | options)


def delivered(loader: Iterable[Iterable[Batch]]) -> list[list[Span]]:
    """The spans of every batch of a DataLoader over a ShardDataset, which yields shares."""
    return [spans(batch) for share in loader for batch in share]


def shuffled(folder: Path, epoch: int) -> list[list[Span]]:
    """The spans that a loader with four small windows delivers in an epoch."""
    loader = open_loader(folder, epochs=1, window_tokens=5_000)
    for _ in range(epoch):
        list(loader)
    return [spans(batch) for batch in loader]


def pool_of(loader: ShardLoader) -> Any:
    """The workers of a loader that runs. No public name leads to them."""
    return loader._delivery._feed._pool  # type: ignore[union-attr]


def spans(batch: Batch) -> list[Span]:
    """(row, first token, tokens) of every piece of a batch."""
    columns = (batch.rows, batch.starts, batch.piece_lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def same_values(batch: Batch, other: Batch) -> bool:
    """Whether two batches hold the same keys and values."""
    return list(batch) == list(other) and all(
        torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(other[key])) for key in batch
    )


def tokens_of(batch: Batch) -> np.ndarray:
    """The tokens of a batch without padding, in the order of its pieces."""
    ids = batch["input_ids"].numpy()
    return np.concatenate([row[:length] for row, length in zip(ids, batch.lengths, strict=True)])


def row_tokens(folder: Path) -> list[np.ndarray]:
    """The tokens of each row of the training split, read with Arrow alone."""
    rows = []
    for path in sorted((folder / "train").glob("*.arrow")):
        with ipc.open_file(path) as reader:
            table = reader.read_all()
        rows += [np.array(row.values) for row in table.column("input_ids")]
    return rows


def times_delivered(pieces: Iterable[Span], lengths: np.ndarray) -> set[int]:
    """How often tokens were delivered: {2} if each one of every row came exactly twice."""
    first = np.append(0, np.cumsum(lengths))
    row, start, length = np.array(list(pieces), np.int64).reshape(-1, 3).T
    assert (length > 0).all()
    assert (start + length <= np.diff(first)[row]).all(), "beyond the end of a row"
    change = np.zeros(first[-1] + 1, np.int64)
    np.add.at(change, first[row] + start, 1)
    np.add.at(change, first[row] + start + length, -1)
    return set(np.cumsum(change)[:-1].tolist())


class Ranks:
    """Loaders of all ranks in step; keeps what they delivered, step by step."""

    def __init__(
        self, folder: Path, world_size: int, state: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.loaders = [
            open_loader(folder, rank=rank, world_size=world_size, **options)
            for rank in range(world_size)
        ]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)
        self.steps: list[Step] = [[]]

    def run(self, rounds: int | None = None) -> dict[str, Any]:
        """Deliver some rounds, None for the rest of the pass; the state after, by way of JSON."""
        feeds = [islice(loader, rounds) for loader in self.loaders]
        for batches in zip(*feeds, strict=True):  # strict: ranks end at the same round
            self._keep(batches)
        for loader in self.loaders:
            loader.close()
        return self._state()

    def _keep(self, batches: tuple[Batch, ...]) -> None:
        self._state()
        assert len({batch.ends_step for batch in batches}) == 1
        for batch in batches:
            assert batch.num_targets == int((batch["labels"] != -100).sum())
            if batch.is_filler:
                assert batch.num_targets == batch.num_tokens == 0
            else:
                self.steps[-1].append(spans(batch))
        if batches[0].ends_step:
            self.steps.append([])

    def _state(self) -> dict[str, Any]:
        states = [json.dumps(loader.state_dict()) for loader in self.loaders]
        assert len(set(states)) == 1, "ranks differ in their state"
        state: dict[str, Any] = json.loads(states[0])
        return state


def joined(runs: list[Ranks]) -> list[Step]:
    """The steps of runs that continue each other, also where one was left within a step."""
    steps: list[Step] = [[]]
    for run in runs:
        steps[-1] += run.steps[0]
        steps += run.steps[1:]
    assert steps[-1] == []
    return steps[:-1]


def check_elastic_run(
    folder: Path,
    lengths: np.ndarray,
    legs: list[tuple[int, int, int]],
    *,
    micro_batches_per_step: int,
    epochs: int,
    **options: Any,
) -> None:
    """Run legs of (world size, rounds, workers) and a last one to the end; compare with one run."""
    options |= {"micro_batches_per_step": micro_batches_per_step, "epochs": epochs}
    alone = Ranks(folder, 1, **options)
    final = alone.run()
    runs: list[Ranks] = []
    state = None
    for number, (world_size, rounds, num_workers) in enumerate(legs):
        last = number + 1 == len(legs)
        runs.append(Ranks(folder, world_size, state, num_workers=num_workers, **options))
        state = runs[-1].run(None if last else rounds)
        if state["epoch"] == epochs:  # further legs would be the next pass
            break
    assert state == final, "digest or position differs"
    steps, whole = joined(runs), joined([alone])
    pieces = (span for step in steps for batch in step for span in batch)
    assert times_delivered(pieces, lengths) == {epochs}
    assert [batch for step in steps for batch in step] == [b for step in whole for b in step]
    if all(world_size < 2 * micro_batches_per_step for world_size, _, _ in legs):
        assert steps == whole


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def open_dataset(folder: Path, batching: Batching = POLICIES[0], **options: Any) -> ShardDataset:
    """A data set of several windows."""
    return ShardDataset(folder, batching, **{"window_tokens": WINDOW_TOKENS} | options)


def plain(dataset: ShardDataset, num_workers: int = 0, windows: int | None = None) -> list[Batch]:
    """The batches of a plain DataLoader."""
    shares = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    return [batch for share in islice(shares, windows) for batch in share]
