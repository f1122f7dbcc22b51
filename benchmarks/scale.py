"""What does a loader cost for data sets that no test can hold? A simulation: manifests without
shards, of which the plan of every rank is made.

- 20 T tokens: 50 data sets with 100,000 shards, rank 9,999 of 10,000
- 1,000 data sets: a mixture of them

Measured in a process each: seconds to open, megabytes that opening adds, milliseconds for the order
of a window in the middle of an epoch, milliseconds for `state_dict` and bytes of its JSON. Refuted
by 4 s, 300 MB or 20 ms for 20 T tokens, or by 1 s, 200,000 bytes or 5 ms for 1,000 data sets.

    python -m benchmarks.scale        # a minute; on a quiet machine
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch  # noqa: F401 - so that no figure contains its import

from benchmarks.protocol import RESULTS, write_result
from tokenfeed import Manifest, Mixture, Packed, ShardLoader, pretokenize
from tokenfeed.pipeline.format.manifest import ShardInfo, SplitInfo

CASES = {"20 T tokens": (50, 2000, 200_000_000), "1,000 data sets": (1000, 1, 200_000_000)}
"""Data sets, shards of each, and tokens of a shard."""
RANKS, REPEATS, ROW_TOKENS, BATCH_TOKENS = 10_000, 20, 800, 66_000


def write(folder: Path, data_sets: int, shards: int, tokens: int) -> None:
    """Write manifests of data sets that do not exist."""
    pretokenize([{"text": "a row of text " * 9}], folder / "template", vocab_size=300, validation=0)
    real = Manifest.read(folder / "template")
    rows = tokens // ROW_TOKENS
    for number in range(data_sets):
        infos = tuple(
            ShardInfo(
                file=f"train/{nth:05}.arrow",
                bytes=tokens * 2,
                xxh3=f"{number * shards + nth:016x}",
                rows=rows,
                tokens=tokens - number,
                batches=tokens // BATCH_TOKENS,
                longest_row=30_000,
                seal=f"{number * shards + nth:016x}",
            )
            for nth in range(shards)
        )
        histogram = [0] * 32
        histogram[9] = rows * shards
        split = SplitInfo(shards=infos, length_histogram=tuple(histogram))
        ledger = replace(real.ledger, read=rows * shards, written=rows * shards)
        folder_of_one = folder / f"{number:04}"
        folder_of_one.mkdir()
        replace(real, splits={"train": split}, ledger=ledger).write(folder_of_one)


def measure(folder: Path) -> dict[str, float]:
    """Open a mixture of all manifests, and use it."""
    folders = sorted(path for path in folder.iterdir() if path.name != "template")
    memory, started = peak_mb(), time.perf_counter()
    loader = ShardLoader(
        Mixture({path: 1 + n % 7 for n, path in enumerate(folders)}, exhausted="continue"),
        batching=Packed(4096, 4),
        rank=RANKS - 1,
        world_size=RANKS,
    )
    opened_s, opened_mb = time.perf_counter() - started, peak_mb() - memory
    order = loader._plan.order
    middle = order.num_windows // 2
    windows = [timed_ms(partial(order.window, 0, middle + n)) for n in range(REPEATS)]
    states = [timed_ms(loader.state_dict) for _ in range(REPEATS)]
    return {
        "tokens": sum(source.tokens for source in order.sources),
        "open_s": opened_s,
        "open_mb": opened_mb,
        "first_window_ms": windows[0],
        "window_ms": median(windows),
        "state_ms": median(states),
        "state_bytes": len(json.dumps(loader.state_dict())),
    }


def timed_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def peak_mb() -> float:
    """Most memory of this process so far; `ru_maxrss` would have that of its parent, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # in a process of a case
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(measure(options.folder)))
        return
    results = []
    for case, sizes in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), *sizes)
            command = [sys.executable, "-m", "benchmarks.scale", "--folder", folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(done.stdout)
        results.append({"case": case} | {k: float(f"{v:.3g}") for k, v in figures.items()})
        print(results[-1])
    print(f"written to {write_result('scale', results, options.results)}")


if __name__ == "__main__":
    main()
