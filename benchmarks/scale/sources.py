"""What does it cost to open a mixture of 1,000 data sets?

Every data set has a shard with some rows of its own. Each way is timed in a process of its own,
without worker processes: making a loader, then its first batch. Seconds are by the clock, and of
the processor. Memory is the growth of the largest resident memory while the loader is made, after
all imports. Refuted by more than 1 s or 50 MB for opening.

    python -m benchmarks.scale.sources [--sources 1000] [--repeats 3]    # 1 minute
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.protocol import RESULTS, summary, write_result

WAYS = ("one data set", "mixture", "stages")
FIELDS = ("open_s", "open_processor_s", "open_mb", "first_batch_s")


def make(folder: Path, count: int) -> None:
    """Write the data sets."""
    from benchmarks.shuffle.corpora import Corpus, write_shards

    for number in range(count):
        lengths = np.random.default_rng(number).integers(10, 400, 100 + number % 50)
        write_shards(folder / f"{number:04d}", Corpus(lengths, np.zeros(len(lengths), np.int64)))


def open_once(way: str, folder: Path) -> dict[str, float]:
    """Open the data sets in this process."""
    from tokenfeed import Mixture, Packed, ShardLoader, Stage

    weights: dict[Any, float] = {
        each: 1 + number % 7 for number, each in enumerate(sorted(folder.iterdir()))
    }
    path: Any = {
        "one data set": next(iter(weights)),
        "mixture": Mixture(weights),
        "stages": [Stage(weights)],
    }[way]
    options: Any = {"batching": Packed(2048, batch_size=8), "num_workers": 0}
    ShardLoader(next(iter(weights)), **options)  # imports
    memory, started, processor = peak_mb(), time.perf_counter(), time.process_time()
    loader = ShardLoader(path, **options)
    found = {
        "open_s": time.perf_counter() - started,
        "open_processor_s": time.process_time() - processor,
        "open_mb": peak_mb() - memory,
    }
    next(iter(loader))
    return found | {"first_batch_s": time.perf_counter() - started}


def peak_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    """Measure each way, print a table, and write results/sources.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, folder = options.one
        print(json.dumps(open_once(way, Path(folder))))
        return
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), options.sources)
        for _ in range(options.repeats):
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.scale.sources", "--one", way, name]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                runs[way].append(json.loads(done.stdout))
    results = [
        {
            "sources": 1 if way == WAYS[0] else options.sources,
            "way": way,
            **{field: summary([run[field] for run in of_way], 3) for field in FIELDS},
        }
        for way, of_way in runs.items()
    ]
    print(f"| sources | way | {' | '.join(FIELDS)} |")
    print(f"| {' | '.join(['---'] * (2 + len(FIELDS)))} |")
    for each in results:
        cells = " | ".join(f"{each[field]['median']:.3g}" for field in FIELDS)
        print(f"| {each['sources']} | {each['way']} | {cells} |")
    print(f"written to {write_result('sources', results, options.results)}")


if __name__ == "__main__":
    main()
