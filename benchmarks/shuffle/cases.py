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
from benchmarks.shuffle.peers import PEERS

__all__ = [
    "CASES",
    "COSTS",
    "FULL",
    "LINES",
    "MIXTURES",
    "PICTURED",
    "Case",
    "CaseError",
    "Mixtures",
    "find_peers",
    "load",
    "make",
    "orders_of",
    "ours",
    "run",
]

FULL = "full shuffle (datasets, map-style)"
LINES = (FULL, "tokenfeed padded", "mosaicml-streaming py1e, 16 nodes", "datasets buffer 10,000")
PICTURED = "documents by source"
"""What the picture shows: orders of one corpus."""


@dataclass(frozen=True, slots=True)
class Case:
    """One order."""

    name: str
    rows_a_batch: int
    """Of a peer's batches, and of those of a full shuffle."""
    epochs: int = 1
    peer: str | None = None
    """Its name; None: ours."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of ours: policy and arguments, window_tokens."""


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


def of_peers(rows_a_batch: int, epochs: int, *left_out: str) -> list[Case]:
    return [Case(n, rows_a_batch, epochs, peer=n) for n in PEERS if n not in left_out]


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
    grouped = "transformers group_by_length"
    named = [(8, ""), (32, ", 32 rows")]
    few = [
        ours("padded", 8, "Padded", 16_384, epochs=2),
        ours("packed", 8, "Packed", 2048, 8, epochs=2),
        *(ours(f"fixed{name}", rows, "Fixed", rows, epochs=2) for rows, name in named),
        *(Case(f"{peer}{name}", rows, 2, peer) for peer in (FULL, grouped) for rows, name in named),
    ]
    named = [(16, ", 16 rows"), (64, ", 64 rows")]
    classes = [
        ours("padded", 16, "Padded", 4096, epochs=2),
        *(ours(f"fixed{name}", rows, "Fixed", rows, epochs=2) for rows, name in named),
        *(Case(f"{peer}{name}", rows, 2, peer) for peer in (FULL, grouped) for rows, name in named),
    ]
    return {"2,000 documents": few, "two classes": classes}


_SLOW = ("webdataset buffer 1,000",)
"""Takes some 50 microseconds a row: minutes on rows by the million."""

CASES: dict[str, list[Case]] = {
    "documents by source": [
        *policies(27, 16_384, 2048, 2),
        *windows(27, "Padded", 16_384),
        *of_peers(27, 2),
    ],
    "documents by length": [*policies(27, 16_384, 2048, 1), *of_peers(27, 1)],
    "documents by date": [*policies(27, 16_384, 2048, 1), *of_peers(27, 1)],
    "short rows by source": [
        *policies(170, 4_096, 512, 1),
        *windows(170, "Padded", 4_096),
        *of_peers(170, 1, *_SLOW),
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


def find_peers(python: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """The interpreter of every peer that is installed, and the versions of their packages."""
    if python is None:
        return {}, {}
    found = json.loads(run(python, "versions"))
    return dict.fromkeys(found, python), {k: v for each in found.values() for k, v in each.items()}


def run(python: str, *arguments: object) -> str:
    """One case in a process of its own; what it printed last."""
    return execute([python, "-m", "benchmarks.shuffle.case", *map(str, arguments)])


def execute(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if any(map(str.isalnum, line))]
        raise CaseError(said[-1].strip("│ ") if said else f"ended with {done.returncode}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def orders_of(case: Case, python: str | None, data: Path, folder: Path) -> list[Order]:
    """The epochs of one case; `python` has the peer."""
    out = data / "order"
    if python and case.peer:
        lengths = folder / "lengths.npy"
        run(python, "peer", case.peer, lengths, case.rows_a_batch, case.epochs, out)
    else:
        run(sys.executable, "ours", json.dumps(case.settings), folder / "shards", case.epochs, out)
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
