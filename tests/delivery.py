"""What tests of delivery share: little data in several windows, and what was delivered of it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import ipc

from tokenfeed.pipeline import Batch, Fixed, Packed, Padded, ShardLoader
from tokenfeed.pipeline.policy import Batching

__all__ = [
    "POLICIES",
    "WINDOW_TOKENS",
    "MakeDataset",
    "Span",
    "flip_bit",
    "open_loader",
    "realistic_lengths",
    "row_tokens",
    "run_script",
    "small_batches",
    "spans",
    "times_delivered",
    "tokens_of",
    "workers_of",
]

MakeDataset = Callable[..., Path]
Span = tuple[int, int, int]

WINDOW_TOKENS = 20_000
POLICIES: list[Batching] = [
    Padded(max_tokens=2048),
    Packed(sequence_length=256, rows=4),
    Packed(sequence_length=256, rows=4, split=True),
    Fixed(rows=16),
]


def realistic_lengths(count: int = 900) -> np.ndarray:
    """Lengths as texts have them: most are short, a few are longer than a micro-batch."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(4, 1.2, count), 1, 3000).astype(int)


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several record batches out of little data."""
    monkeypatch.setattr("tokenfeed.pipeline.shard.BATCH_TOKENS", 3_000)


def open_loader(folder: Path, batching: Batching = POLICIES[0], **options: Any) -> ShardLoader:
    """A loader of several windows, without workers unless they are asked for."""
    defaults = {"window_tokens": WINDOW_TOKENS, "num_workers": 0}
    return ShardLoader(folder, batching=batching, **defaults | options)


def spans(batch: Batch) -> list[Span]:
    """(row, first token, tokens) of every piece of a batch."""
    columns = (batch.rows, batch.starts, batch.piece_lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


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


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def workers_of(pid: int | str = "self") -> list[int]:
    """Loader workers that are children of a process."""
    children: list[str] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children += path.read_text().split()
    return [
        int(child)
        for child in children
        if b"tokenfeed.pipeline.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def run_script(script: str, *arguments: object, flags: Iterable[str] = ()) -> Any:
    """Run a Python script to its end and read its last line as JSON; null if it wrote nothing."""
    ended = subprocess.run(
        [sys.executable, *flags, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads((ended.stdout.splitlines() or ["null"])[-1])
