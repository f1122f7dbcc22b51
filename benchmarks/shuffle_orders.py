"""Has orders made, each in a process of its own, and reads them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from shuffle_cases import Case
from shuffle_corpora import CORPORA, Corpus, write_shards
from shuffle_metrics import Order

__all__ = ["CaseError", "find_peers", "load", "make", "orders_of", "run"]

WHERE = str(Path(__file__).with_name("shuffle_case.py"))


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
    return execute([python, WHERE, *map(str, arguments)])


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
