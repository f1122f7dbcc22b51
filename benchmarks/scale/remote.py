"""What do 100,000 shards in a store cost one rank of 1,024?

A manifest of 100,000 shards of 47 M tokens each (4.7 * 10^12 in all) is read from a server that
answers 30 ms late. Every one of them stands for a real shard of that size, footer, record batches
and checksums included: only the file is the same for many. Each case is a new process with one
worker and an empty cache: rank 0, rank 1,023, and rank 1,023 that goes on in the middle of the
epoch. Measured: seconds until the loader is made, and until its first batch, each with requests and
bytes; seconds a window after that; memory of the training process and of its worker. Last, what a
cache of 70,000 record batches and 30,000 footers takes to sweep.
It would be refuted by a loader that takes 2 s to make, or a worker of 300 MB.

usage: python -m benchmarks.scale.remote [--repeats 3] [--data FOLDER] [--shards 100000]
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.remote.__main__ import count, serving
from benchmarks.remote.case import cpu_seconds
from benchmarks.text_loaders.case import family
from benchmarks.text_loaders.data import VOCABULARY, pretokenize, standard_library, write_json_lines
from benchmarks.text_loaders.processes import pss
from tokenfeed import Manifest, Packed, ShardLoader
from tokenfeed.pipeline.caching.node import Node
from tokenfeed.pipeline.caching.node_cache import sweep
from tokenfeed.pipeline.planning.plan import Ahead, Position
from tokenfeed.pipeline.planning.state import resealed

SHARDS, RANKS, DELAY_MS = 100_000, 1024, 30.0
CHARACTERS, SHARD_SIZE = 660_000_000, "224MB"
"""Of the real data set: three shards of 47 M tokens and 617 record batches."""
WINDOWS = 12
"""Read after the first batch."""
CACHE_BYTES = 4 << 30
CASES = {"rank 0": 0, f"rank {RANKS - 1}": RANKS - 1, "resume": RANKS - 1}
SWEPT_BATCHES, SWEPT_ENDS = 70_000, 30_000
SWEPT_BYTES = 100
FIELDS = {
    "open_s": 2,
    "first_batch_s": 2,
    "window_s": 3,
    "window_cpu_s": 3,
    "training_mb": 0,
    "worker_mb": 0,
}
"""With how many digits."""

Entry = dict[str, Any]


def make_documents(folder: Path) -> None:
    """The standard library's files again and again, unless they are there."""
    if (folder / "manifest.json").exists():
        return
    corpus = folder.with_name("corpus.jsonl")
    write_json_lines(corpus, list(standard_library()), CHARACTERS)
    pretokenize(corpus, folder, "--vocab-size", VOCABULARY, "--shard-size", SHARD_SIZE)
    corpus.unlink()


def make_many(real: Path, large: Path, num_shards: int) -> None:
    """A folder that names the shards of another one again and again."""
    manifest = Manifest.read(real)
    split = manifest.split("train")
    shards = tuple(itertools.islice(itertools.cycle(split.shards), num_shards))
    rows = sum(shard.rows for shard in shards)
    histogram = tuple(count * rows // split.rows for count in split.length_histogram)
    ledger = replace(manifest.ledger, read=rows, written=rows, empty=0, rejected=0)
    splits = {"train": replace(split, shards=shards, length_histogram=histogram)}
    large.mkdir(exist_ok=True)
    for name in ("train", manifest.tokenizer.file):
        if not (large / name).exists():
            (large / name).symlink_to(real.absolute() / name)
    replace(manifest, splits=splits, ledger=ledger).write(large)


def case(name: str, url: str, cache: str, kept: str) -> Entry:
    """One measurement in this process."""
    state, before = Path(kept), count(url)
    started = time.perf_counter()
    loader = ShardLoader(
        url,
        batching=Packed(sequence_length=2048, batch_size=8),
        epochs=None,
        num_workers=1,
        rank=CASES[name],
        world_size=RANKS,
        cache_dir=cache,
        cache_bytes=CACHE_BYTES,
    )
    found: Entry = {"open_s": time.perf_counter() - started} | asked("open", url, before)
    if name == "resume":
        loader.load_state_dict(json.loads(state.read_text()))
    batches = iter(loader)
    next(batches)
    found["first_batch_s"] = time.perf_counter() - started
    found |= asked("first_batch", url, before)
    middle = loader._plan.num_windows // 2
    state.write_text(json.dumps(resealed(loader.state_dict(), window=middle, micro_batch=0)))
    first, cpu, started = loader.position.window, cpu_seconds(), time.perf_counter()
    training = worker = 0
    while (windows := loader.position.window - first) < WINDOWS:
        next(batches)
        own, *workers = map(pss, family(os.getpid()))
        training, worker = max(training, own), max(worker, *workers)
    found["window_s"] = (time.perf_counter() - started) / windows
    found["window_cpu_s"] = (cpu_seconds() - cpu) / windows
    loader.close()
    return found | {"training_mb": training / 1e6, "worker_mb": worker / 1e6}


def asked(moment: str, url: str, before: dict[str, int]) -> Entry:
    """Requests and bytes until now."""
    return {f"{moment}_{key}": value - before[key] for key, value in count(url).items()}


def time_sweep(large: Path, folder: Path) -> Entry:
    """What a sweep takes that removes a tenth, and how much of it goes to ask the plan."""
    with ShardLoader(large, batching=Packed(2048, batch_size=8), num_workers=0) as loader:
        plan, infos = loader._plan, loader.manifest.split("train").shards
    node = Node(None)
    node.ahead = ahead = Ahead(plan, Position(0, plan.num_windows // 2, 0))
    until = partial(node._windows_until, 0, len(infos))
    batches = np.linspace(0, plan.order.sizes[0] - 1, SWEPT_BATCHES).astype(np.int64)
    names = [f"set/{number & 255:02x}/{number:x}" for number in batches.tolist()]
    names += [f"set/ends/{shard:x}" for shard in range(SWEPT_ENDS)]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SWEPT_BYTES))
    started = time.perf_counter()
    ahead.until(0, batches)
    until_s = time.perf_counter() - started
    started = time.perf_counter()
    left = sweep(str(folder), len(names) * SWEPT_BYTES, {"set": until})
    return {"sweep_s": time.perf_counter() - started, "until_s": until_s, "left_bytes": left}


def run_case(*arguments: object) -> Entry:
    """One process; what it printed."""
    command = [sys.executable, "-m", "benchmarks.scale.remote", "--case", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Entry = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(large: Path, delay_ms: float, kept: Path) -> dict[str, Entry]:
    """All cases once."""
    with serving(large, delay_ms) as (url, _):
        return {name: run_case(name, url, kept / name, kept / "state") for name in CASES}


def show(results: list[Entry], swept: Entry) -> None:
    """The table a person reads."""
    table = Table("case", *FIELDS, "requests to open", "MB", "to the first batch", "MB")
    for entry in results:
        cells = [f"{entry[field]['median']:,}" for field in FIELDS]
        for moment in ("open", "first_batch"):
            cells.append(f"{entry[f'{moment}_requests']:,}")
            cells.append(f"{entry[f'{moment}_bytes'] / 1e6:.1f}")
        table.add_row(entry["case"], *cells)
    Console(width=160).print(table)
    print(json.dumps(swept))


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.data or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        make_documents(folder / "documents")
        make_many(folder / "documents", folder / "many", options.shards)
        runs = []
        for number in range(options.repeats):
            kept = Path(name) / str(number)
            kept.mkdir()
            runs.append(measure(folder / "many", options.delay_ms, kept))
        swept = time_sweep(folder / "many", Path(name) / "swept")
    results = [
        runs[-1][case]
        | {"case": case, "shards": options.shards}
        | {field: summary([run[case][field] for run in runs], d) for field, d in FIELDS.items()}
        for case in CASES
    ]
    show(results, swept)
    more = {"delay_ms": options.delay_ms, "ranks": RANKS}
    print(f"written to {write_result('scale_remote', [*results, swept], options.results, **more)}")


if __name__ == "__main__":
    main()
