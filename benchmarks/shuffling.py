"""How fast does `shards shuffle` put the rows of a data set in random order, in how much memory?

A data set of about 1 GB is written through the project's writer: documents (mean 1,100 tokens) or
short rows (mean 12), whose ids come in phrases that are drawn again and again, so that they
compress about as well as text. The real command shuffles it in new processes, with 2 workers and
`--memory 200MB`; time is from start to last fsync. Memory is the most that all its processes had
together (PSS), of one more run that is looked at ten times a second and not timed. Beside it, what
the disk alone needs to write as many bytes as the shards have, and to sync them. On a machine that
others use, look at the processor time of all processes instead of the speed.

    python benchmarks/shuffling.py [--repeats 3] [--size 1000] [--data FOLDER]
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bare_manifest import write_manifest
from loader_process import family_pss
from protocol import summary, write_result
from rich.console import Console
from rich.table import Table

from tokenfeed.pipeline.format.manifest import Manifest, ShardInfo, SplitInfo, length_histogram
from tokenfeed.pipeline.format.rows import Rows
from tokenfeed.pipeline.format.shard import ShardWriter

KINDS = {"documents": 1_100, "short": 12}
"""Mean tokens of a row."""
VOCABULARY = 50_257
PHRASES, PHRASE_TOKENS = 1 << 16, 8
SHARDS = 16
PART_TOKENS = 4_000_000
COMMAND = [sys.executable, "-m", "tokenfeed.tools.shards", "shuffle"]
SETTINGS = ["--memory", "200MB", "--workers", "2", "--json"]


class Phrases:
    """Draws rows of phrases."""

    def __init__(self, mean: int) -> None:
        self._rng = np.random.default_rng(0)
        ids = self._rng.zipf(1.3, (PHRASES, PHRASE_TOKENS)) % VOCABULARY
        self._phrases = ids.astype(np.uint16)
        self._mean = mean
        self._rows = 0

    def rows(self) -> Rows:
        """Some 4 M tokens."""
        count = PART_TOKENS // self._mean
        lengths = np.maximum(1, self._rng.exponential(self._mean, count)).astype(np.int64)
        needed = int(lengths.sum())
        drawn = self._rng.zipf(1.1, needed // PHRASE_TOKENS + 1) % PHRASES
        first, self._rows = self._rows, self._rows + count
        return Rows(
            lengths,
            {"input_ids": self._phrases[drawn].reshape(-1)[:needed]},
            {
                "origin_file": np.zeros(count, np.uint32),
                "origin_record": np.arange(first, self._rows, dtype=np.uint64),
            },
        )


def make_data(folder: Path, kind: str, num_bytes: int) -> None:
    """Write a data set of about so many bytes."""
    phrases = Phrases(KINDS[kind])
    shards: list[ShardInfo] = []
    histogram = length_histogram(np.empty(0))
    for number in range(SHARDS):
        name = f"train/{number:05d}.arrow"
        with ShardWriter(folder, name, VOCABULARY) as writer:
            while (folder / f"{name}.tmp").stat().st_size < num_bytes / SHARDS:
                rows = phrases.rows()
                histogram += length_histogram(rows.lengths)
                writer.append(rows)
        assert writer.info is not None
        shards.append(writer.info)
    split = SplitInfo(shards=tuple(shards), length_histogram=tuple(histogram.tolist()))
    write_manifest(folder, split, vocabulary=VOCABULARY)


def shuffle(data: Path, out: Path, sample_seconds: float | None) -> tuple[float, float, int]:
    """One run of the command: seconds, those of processors, the most memory if it is looked for."""
    started, cpu_started, peak = time.perf_counter(), cpu_seconds(), 0
    command = [*COMMAND, str(data), str(out), *SETTINGS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while sample_seconds and process.poll() is None:
        peak = max(peak, family_pss(process.pid))
        time.sleep(sample_seconds)
    if process.wait():
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds, cpu_seconds() - cpu_started, peak


def cpu_seconds() -> float:
    """Processor time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def disk_seconds(folder: Path, num_bytes: int) -> float:
    """Write and sync so many bytes."""
    block, started = os.urandom(1 << 20), time.perf_counter()
    with open(folder / "written", "wb", buffering=0) as file:
        for _ in range(num_bytes >> 20):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    (folder / "written").unlink()
    return seconds


def measure(folder: Path, kind: str, num_bytes: int, repeats: int) -> dict[str, Any]:
    """Everything about one kind of rows."""
    data = folder / kind
    if not (data / "manifest.json").exists():
        make_data(data, kind, num_bytes)
    train = Manifest.read(data).split("train")
    size = sum(shard.bytes for shard in train.shards)
    *_, peak = shuffle(data, folder / "out", sample_seconds=0.1)
    runs = [shuffle(data, folder / "out", None) for _ in range(repeats)]
    seconds = [run[0] for run in runs]
    disk = [disk_seconds(folder, size) for _ in range(repeats)]
    return {
        "kind": kind,
        "rows": train.rows,
        "tokens": train.tokens,
        "shard_bytes": size,
        "bytes_per_token": round(size / train.tokens, 2),
        "mb_per_s": summary([size / 1e6 / each for each in seconds]),
        "million_tokens_per_s": summary([train.tokens / 1e6 / each for each in seconds]),
        "million_rows_per_s": summary([train.rows / 1e6 / each for each in seconds], 2),
        "mb_per_cpu_s": summary([size / 1e6 / run[1] for run in runs]),
        "disk_mb_per_s": summary([size / 1e6 / each for each in disk]),
        "peak_memory_mb": round(peak / 1e6),
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="shards shuffle, 2 workers, --memory 200MB")
    for name in (
        "rows",
        "MB",
        "B/token",
        "MB/s",
        "M tokens/s",
        "M rows/s",
        "MB/CPU s",
        "disk",
        "memory",
    ):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result["kind"],
            f"{result['shard_bytes'] / 1e6:,.0f}",
            str(result["bytes_per_token"]),
            *(
                f"{result[name]['median']} [{result[name]['min']}, {result[name]['max']}]"
                for name in (
                    *("mb_per_s", "million_tokens_per_s", "million_rows_per_s"),
                    *("mb_per_cpu_s", "disk_mb_per_s"),
                )
            ),
            f"{result['peak_memory_mb']} MB",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", type=int, default=1000, help="MB of shards")
    parser.add_argument("--data", type=Path, help="keep the data sets in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.data) as temporary:
        folder = arguments.data or Path(temporary)
        results = [
            measure(folder, kind, arguments.size * 10**6, arguments.repeats) for kind in KINDS
        ]
    write_result("shuffling", results)
    show(results)


if __name__ == "__main__":
    main()
