"""Has orders made, each in a process of its own, and reads them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from shuffle_cases import Case
from shuffle_corpora import CORPORA, Corpus, origins, write_shards
from shuffle_metrics import Order

__all__ = ["CaseError", "find_peers", "load", "make", "orders_of", "run", "shards_of"]

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
        shards = shards_of(case, folder)
        run(sys.executable, "ours", json.dumps(case.settings), shards, case.epochs, out)
    orders = [load(Path(f"{out}-{epoch}.npz")) for epoch in range(case.epochs)]
    if case.settings.get("shuffled"):
        numbers = origins(shards)
        orders = [replace(order, rows=numbers[order.rows]) for order in orders]
    return orders


def shards_of(case: Case, folder: Path) -> Path:
    """The shards of a corpus; those that `shards shuffle` makes of them, where a case wants it."""
    if not case.settings.get("shuffled"):
        return folder / "shards"
    if not (folder / "shuffled" / "manifest.json").exists():
        command = ["tokenfeed.tools.shards", "shuffle", folder / "shards", folder / "shuffled"]
        execute([sys.executable, "-m", *map(str, command)])
    return folder / "shuffled"


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
