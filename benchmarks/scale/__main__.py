"""What does the size of a data set cost at the start, at a resume and in memory?

Manifests of 10^6 to 10^9 rows (as many documents of 1,100 tokens, or short rows of 12) are written
and read for real, with as many shards as `pretokenize` would make (64 M tokens each). Each of their
record batches stands for one of a small real data set, so windows are decoded, checked, planned and
gathered as ever. Timed in a process for each case, reading in the process itself: making a loader
(manifest and plan), its first batch, another loader resumed in the middle of epoch 3, the turn of
an epoch; then one rank's share of a window among up to 1,024 ranks. Last, 100 epochs of the real
documents with 2 workers, and a loop that uses a batch in 1 ms: memory of all processes, and the
waits for the first batch of an epoch beside those for any batch.
It would be refuted by anything that grows with the number of rows or of epochs.

usage: python -m benchmarks.scale [--repeats 3] [--data FOLDER]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.protocol import summary, write_result
from benchmarks.text_loaders.data import lines, pretokenize, standard_library, write_json_lines
from benchmarks.text_loaders.processes import family_pss
from tokenfeed import Manifest, Packed, ShardLoader
from tokenfeed.pipeline.feeding import loader
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.planning.state import resealed
from tokenfeed.pipeline.windows.reader import Window, WindowReader

ROWS = (10**6, 10**7, 10**8, 10**9)
MEAN_LENGTH = {"documents": 1_100, "short": 12}
SHARD_TOKENS = 64_000_000
RANKS = (1, 8, 64, 1024)
BATCHING = Packed(sequence_length=2048, batch_size=8)
EPOCHS = 100
FIELDS = ("open_s", "first_batch_s", "resume_s", "epoch_turn_s", "memory_mb")


class StandIn(WindowReader):
    """Gives record batches of a small data set for those of the large one."""

    real: WindowReader
    num_batches: int

    def __init__(self, sources: tuple[OpenedSplit, ...], **options: Any) -> None:
        """The large data set's shards do not exist, so nothing of it is kept."""
        self.columns = sources[0].manifest.columns

    def read(self, batches: np.ndarray, ahead: object = None) -> Window:
        """Decode real record batches."""
        return self.real.read(batches % self.num_batches)


def make_data(folder: Path) -> None:
    """Tokenize the standard library, as documents and as lines."""
    texts = list(standard_library())
    for kind, rows in (("documents", texts), ("short", list(lines(texts)))):
        if not (folder / kind).exists():
            corpus = folder / f"{kind}.jsonl"
            write_json_lines(corpus, rows, sum(map(len, rows)))
            pretokenize(corpus, folder / kind, "--vocab-size", 8192)
            corpus.unlink()


def write_manifest(real: Path, large: Path, kind: str, rows: int) -> int:
    """Write the manifest of a data set of so many rows; returns the number of its shards."""
    manifest = Manifest.read(real)
    split = manifest.splits["train"]
    tokens = rows * MEAN_LENGTH[kind]
    num_shards = max(1, tokens // SHARD_TOKENS)
    per_shard = {
        "rows": rows // num_shards,
        "tokens": tokens // num_shards,
        "batches": max(1, round(split.batches * tokens / num_shards / split.tokens)),
    }
    shards = tuple(
        replace(split.shards[0], file=f"train/{number:05d}.arrow", **per_shard)
        for number in range(num_shards)
    )
    total = per_shard["rows"] * num_shards
    ledger = replace(manifest.ledger, read=total, written=total, empty=0, rejected=0)
    histogram = np.array(split.length_histogram) * total // split.rows
    histogram[histogram.argmax()] += total - histogram.sum()
    large_split = replace(split, shards=shards, length_histogram=tuple(histogram.tolist()))
    splits = {"train": large_split}
    large.mkdir(exist_ok=True)
    replace(manifest, splits=splits, ledger=ledger).write(large)
    return num_shards


def make_loader(folder: Path, **options: Any) -> ShardLoader:
    return ShardLoader(folder, batching=BATCHING, num_workers=0, epochs=None, **options)


def run_case(real: Path, large: Path) -> dict[str, Any]:
    """Everything about one size, in this process."""
    StandIn.real = WindowReader(open_splits([real], "train"))
    StandIn.num_batches = Manifest.read(real).split("train").batches
    loader.WindowReader = StandIn  # type: ignore[misc]
    measured: dict[str, Any] = {}
    started = time.perf_counter()
    first = make_loader(large)
    measured["open_s"] = time.perf_counter() - started
    next(iter(first))
    measured["first_batch_s"] = time.perf_counter() - started
    state = first.state_dict()
    windows = state["plan"]["windows"]
    measured["resume_s"] = resume(large, resealed(state, epoch=2, window=windows // 2))
    measured["epoch_turn_s"] = turn_of_epoch(large, resealed(state, window=windows - 1))
    measured["windows"] = windows
    measured["state_bytes"] = len(json.dumps(state))
    measured["share_s"] = {str(ranks): time_share(large, ranks) for ranks in RANKS}
    measured["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return measured


def resume(folder: Path, state: dict[str, Any]) -> float:
    """Seconds from nothing to the batch after a saved state."""
    started = time.perf_counter()
    resumed = make_loader(folder)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    next(iter(resumed))
    return time.perf_counter() - started


def turn_of_epoch(folder: Path, state: dict[str, Any]) -> float:
    """Seconds from the last batch of an epoch to the first of the next, without workers."""
    turning = make_loader(folder)
    turning.load_state_dict(state)
    delivered = turning._delivery.delivered  # stand-ins do not sum up to what the manifest says
    plan = replace(delivered.plan, epoch_tokens=(None,))
    turning._delivery.delivered = replace(delivered, plan=plan)
    feed = iter(turning)
    while True:
        started = time.perf_counter()
        next(feed)
        if turning.position.epoch == 1 and turning.position.micro_batch > 0:
            return time.perf_counter() - started


def time_share(folder: Path, ranks: int) -> float:
    """Seconds that a window takes the last of so many ranks."""
    made = make_loader(folder, rank=ranks - 1, world_size=ranks)
    maker = made._window_maker()
    maker.make(made.position)
    started = time.perf_counter()
    maker.make(made.position)
    return time.perf_counter() - started


def endure(real: Path) -> dict[str, Any]:
    """Many epochs of a small data set, with workers."""
    waits, seams, memory = [], [], []
    with ShardLoader(real, batching=BATCHING, num_workers=2, epochs=None) as endless:
        feed = iter(endless)
        while endless.position.epoch < EPOCHS:
            at_seam = endless.position[1:] == (0, 0)
            started = time.perf_counter()
            next(feed)
            (seams if at_seam else waits).append(time.perf_counter() - started)
            if at_seam:
                memory.append(family_pss(os.getpid()) / 1e6)
            time.sleep(0.001)
    return {
        "epochs": EPOCHS,
        "wait_ms": {f"p{q}": float(np.percentile(waits, q)) * 1e3 for q in (50, 95, 99)},
        "wait_at_epoch_turn_ms": {
            "median": statistics.median(seams[1:]) * 1e3,
            "max": max(seams[1:]) * 1e3,
        },
        "memory_mb": {"after 5": memory[5], "after all": memory[-1], "max": max(memory)},
    }


def compare(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """All sizes, each in a process of its own, repeats interleaved."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    shards: dict[tuple[str, int], int] = {}
    for kind in MEAN_LENGTH:
        for rows in ROWS:
            large = folder / f"{kind}-{rows}"
            shards[kind, rows] = write_manifest(folder / kind, large, kind, rows)
    for _ in range(repeats):
        for kind, rows in shards:
            result = in_process("--case", folder / kind, folder / f"{kind}-{rows}")
            runs.setdefault((kind, rows), []).append(result)
    return [
        {
            "rows": rows,
            "kind": kind,
            "shards": shards[kind, rows],
            "windows": results[0]["windows"],
            "state_bytes": results[0]["state_bytes"],
            **{field: summary([run[field] for run in results], digits=3) for field in FIELDS},
            "share_s": {
                ranks: summary([run["share_s"][ranks] for run in results], digits=3)
                for ranks in results[0]["share_s"]
            },
        }
        for (kind, rows), results in runs.items()
    ]


def in_process(*arguments: object) -> dict[str, Any]:
    """This program, in a process of its own; what it printed."""
    command = [sys.executable, "-m", "benchmarks.scale", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def show(results: list[dict[str, Any]], endured: dict[str, Any]) -> None:
    """The table a person reads."""
    shares = [f"share, {ranks} ranks" for ranks in RANKS]
    table = Table("kind", "rows", "shards", "open", "first", "resume", "turn", "MB", *shares)
    for result in results:
        times = [result[field]["median"] for field in FIELDS[:-1]]
        times += [result["share_s"][str(ranks)]["median"] for ranks in RANKS]
        cells = [f"{seconds:.3f} s" for seconds in times]
        memory = f"{result['memory_mb']['median']:.0f}"
        head = [result["kind"], f"{result['rows']:,}", str(result["shards"])]
        table.add_row(*head, *cells[:4], memory, *cells[4:])
    Console(width=140).print(table)
    print(json.dumps(endured, indent=1))


def main() -> None:
    """Run one case when asked by `compare`, else all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="where the data are, or are to be kept")
    parser.add_argument("--case", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--endure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(*options.case)))
        return
    if options.endure:
        print(json.dumps(endure(options.endure)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = options.data or Path(name)
        folder.mkdir(exist_ok=True)
        make_data(folder)
        results = compare(folder, options.repeats)
        endured = in_process("--endure", folder / "documents")
    show(results, endured)
    print(f"written to {write_result('scale', [*results, endured])}")


if __name__ == "__main__":
    main()
