"""What does a run of `pretokenize` cost beside its encoding? And beside `datasets.map` and imports?

Whole runs of the real command in new processes, from start to exit, over the first bytes of a
corpus: a tiny one is all start-up, a large one nearly none. Each repeat runs all of them in turn,
so that a slow moment of the machine meets all; wall seconds are medians, and CPU seconds are those
of every process of a run.

    python -m benchmarks.pretokenize.startup --tokenizer gpt2/ --corpus code.jsonl
        --megabytes 0.02 2 24 300
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.protocol import summary, write_result

REPEATS = 5
MAP_MEGABYTES = 30
"""Beyond this `datasets.map` takes long, and its rate is known."""

IMPORTS = "import numpy, pyarrow.compute, pyarrow.parquet, tokenizers"
DATASETS_MAP = """
import sys
path, tokenizer, cache, out = sys.argv[1:5]
import datasets, tokenizers
datasets.disable_progress_bars()
made = tokenizers.Tokenizer.from_file(tokenizer)
made.no_truncation()
made.no_padding()
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
def encode(batch):
    return {"input_ids": [e.ids for e in made.encode_batch_fast(batch["text"])]}
data = data.map(encode, batched=True, num_proc=2, remove_columns=data.column_names)
data.save_to_disk(out)
"""


def timed(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command and of the processes that it waits for."""
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def beginning(corpus: Path, num_bytes: float, path: Path) -> Path:
    """The first lines of a corpus, `num_bytes` in all but for the last line."""
    with open(corpus, "rb") as whole, open(path, "wb") as file:
        for line in whole:
            file.write(line)
            if file.tell() >= num_bytes:
                break
    return path


def commands(part: Path, tokenizer: Path, folder: Path) -> dict[str, list[str]]:
    script = [sys.executable, "-c"]
    pretokenize = [sys.executable, "-m", "tokenfeed.tools.pretokenize"]
    file = str(tokenizer / "tokenizer.json")
    runs = {
        "imports": [*script, IMPORTS],
        "pretokenize": [*pretokenize, str(part), str(folder / "out"), "--tokenizer", file],
    }
    if part.stat().st_size <= MAP_MEGABYTES * 1e6:
        places = [str(part), file, str(folder / "cache"), str(folder / "mapped")]
        runs["datasets.map"] = [*script, DATASETS_MAP, *places]
    return runs


def measure(part: Path, tokenizer: Path, folder: Path, repeats: int) -> dict[str, Any]:
    runs = commands(part, tokenizer, folder)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, command in runs.items():
            for left in ("out", "cache", "mapped"):
                shutil.rmtree(folder / left, ignore_errors=True)
            taken[name].append(timed(command))
    wall = {name: summary([one for one, _ in times], 2) for name, times in taken.items()}
    middle = {name: seconds["median"] for name, seconds in wall.items()}
    megabytes = part.stat().st_size / 1e6
    return {
        "tokenizer": tokenizer.name,
        "megabytes": round(megabytes, 2),
        "wall_s": wall,
        "cpu_s": {name: summary([cpu for _, cpu in times], 2) for name, times in taken.items()},
        "mb_per_s": round(megabytes / middle["pretokenize"], 1),
        "times_imports": round(middle["pretokenize"] / middle["imports"], 2),
        "times_datasets_map": round(middle["datasets.map"] / middle["pretokenize"], 1)
        if "datasets.map" in middle
        else None,
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table("MB", "s", "CPU s", "MB/s", "imports s", "map s", "times imports", "times map")
    for result in results:
        wall = {name: f"{seconds['median']}" for name, seconds in result["wall_s"].items()}
        table.add_row(
            f"{result['megabytes']}",
            wall["pretokenize"],
            f"{result['cpu_s']['pretokenize']['median']}",
            f"{result['mb_per_s']}",
            wall["imports"],
            wall.get("datasets.map", ""),
            f"{result['times_imports']}",
            f"{result['times_datasets_map'] or ''}",
        )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON Lines")
    parser.add_argument("--megabytes", nargs="+", type=float, default=[0.02, 2, 24, 300])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        for megabytes in arguments.megabytes:
            part = beginning(arguments.corpus, megabytes * 1e6, Path(name) / "part.jsonl")
            results.append(measure(part, arguments.tokenizer, Path(name), arguments.repeats))
            print(json.dumps(results[-1]), flush=True)
    show(results)
    write_result("startup", results)


if __name__ == "__main__":
    main()
