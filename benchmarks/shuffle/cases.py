"""Which orders benchmarks/shuffle/ measures on which corpus."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shuffle.corpora import CORPORA, Corpus, write_shards
from benchmarks.shuffle.metrics import Order


@dataclass(frozen=True, slots=True)
class Case:
    """One order."""

    name: str
    rows_a_batch: int
    """Of the full shuffle to compare with."""
    epochs: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    """Policy and arguments, window_tokens."""


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Two corpora read as one."""

    corpora: tuple[str, str]
    weights: tuple[float, float]
    cases: tuple[Case, ...]


def ours(name: str, rows_a_batch: int, policy: str, *arguments: int, **settings: Any) -> Case:
    epochs = settings.pop("epochs", 1)
    settings |= {"policy": policy, "arguments": arguments}
    return Case(f"tokenfeed {name}", rows_a_batch, epochs, settings=settings)


def windows(*padded: Any) -> list[Case]:
    """Padded, with windows of other sizes."""
    sizes = {f"window_tokens {size}M": size * 1_000_000 for size in (4, 32, 128)}
    return [ours(f"padded, {n}", *padded, window_tokens=size) for n, size in sizes.items()]


def policies(rows: int, tokens: int, sequence: int, epochs: int) -> list[Case]:
    """The three policies as they are by default, with batches of about so many tokens."""
    return [
        ours("padded", rows, "Padded", tokens, epochs=epochs),
        ours("packed", rows, "Packed", sequence, tokens // sequence, epochs=epochs),
        ours("fixed", rows, "Fixed", rows, epochs=epochs),
    ]


def small_sets() -> dict[str, list[Case]]:
    """Sets of one window, as fine-tuning has them."""
    few = [
        ours("padded", 8, "Padded", 16_384, epochs=2),
        ours("packed", 8, "Packed", 2048, 8, epochs=2),
        ours("fixed", 8, "Fixed", 8, epochs=2),
        ours("fixed, 32 rows", 32, "Fixed", 32, epochs=2),
    ]
    classes = [
        ours("padded", 16, "Padded", 4096, epochs=2),
        ours("fixed, 16 rows", 16, "Fixed", 16, epochs=2),
        ours("fixed, 64 rows", 64, "Fixed", 64, epochs=2),
    ]
    return {"2,000 documents": few, "two classes": classes}


CASES: dict[str, list[Case]] = {
    "documents by source": [
        *policies(27, 16_384, 2048, 2),
        *windows(27, "Padded", 16_384),
    ],
    "documents by length": policies(27, 16_384, 2048, 1),
    "documents by date": policies(27, 16_384, 2048, 1),
    "short rows by source": [
        *policies(170, 4_096, 512, 1),
        *windows(170, "Padded", 4_096),
    ],
    **small_sets(),
}

MIXTURES = Mixtures(
    ("documents by source", "a small source"),
    (0.98, 0.02),
    (ours("padded", 27, "Padded", 16_384), ours("packed", 27, "Packed", 2048, 8)),
)

COSTS = {
    "documents by source": [
        *policies(27, 16_384, 2048, 1),
        *windows(27, "Padded", 16_384),
    ],
    "short rows by source": [*policies(170, 4_096, 512, 1), *windows(170, "Padded", 4_096)],
}


class CaseError(Exception):
    """An order could not be had; the text is the last line that was written."""


def run(*arguments: object) -> str:
    """One case in a process of its own; what it printed last."""
    command = [sys.executable, "-m", "benchmarks.shuffle.case", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if any(map(str.isalnum, line))]
        raise CaseError(said[-1].strip("│ ") if said else f"ended with {done.returncode}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def orders_of(case: Case, data: Path, folder: Path) -> list[Order]:
    """The epochs of one case."""
    out = data / "order"
    run("order", json.dumps(case.settings), folder / "shards", case.epochs, out)
    return [load(Path(f"{out}-{epoch}.npz")) for epoch in range(case.epochs)]


def load(path: Path) -> Order:
    with np.load(path) as file:
        order = Order(**{name: file[name] for name in file.files})
    path.unlink()
    return order


def make(data: Path, name: str, scale: float) -> tuple[Corpus, Path]:
    """The corpus, and the folder with its lengths and its shards."""
    corpus, folder = CORPORA[name](scale), data / name.replace(" ", "-")
    if not (folder / "lengths.npy").exists():
        write_shards(folder / "shards", corpus)
        np.save(folder / "lengths.npy", corpus.lengths)
    return corpus, folder
