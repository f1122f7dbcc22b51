"""How fast is `pretokenize`, from reading to fsync, beside `datasets.map` and beside the bound?

Whole runs of the real command in new processes, tokenizer caches cold, the input in the page cache.
The bounds are the fast engine alone over the same texts in memory: `engine, one call` is how its
users call it (all texts at once, its own threads); `engine, 2 processes` is the stricter one, a
process a core with batches that fit the cache. `datasets.map` runs over the first part of the
corpus, which is enough to know its rate.

    python -m benchmarks.pretokenize --tokenizers gpt2/ llama3/ --corpora code.jsonl linux-doc.jsonl
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.protocol import summary, write_result
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import Rows
from tokenfeed.pipeline.format.shard import ShardReader

MAP_BYTES = 24_000_000
REPEATS = 3
WORKERS = 2

LOAD = """
import json, sys, time
path, tokenizer = sys.argv[1:3]
texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
num_bytes = sum(len(text.encode()) for text in texts)
"""
ENGINE_ONE_CALL = f"""{LOAD}
import gigatoken
engine = gigatoken.Tokenizer.from_json(open(tokenizer, "rb").read())
engine.encode_batch(["a"])
started = time.perf_counter()
engine.encode_batch(texts, parallel=True)
print(num_bytes, time.perf_counter() - started)
"""
ENGINE_PROCESSES = f"""{LOAD}
import gigatoken
mine = texts[int(sys.argv[3]) :: {WORKERS}]
num_bytes = sum(len(text.encode()) for text in mine)
batches, pending = [[]], 0
for text in mine:
    batches[-1].append(text)
    pending += len(text)
    if pending > 1 << 22:
        batches.append([])
        pending = 0
engine = gigatoken.Tokenizer.from_json(open(tokenizer, "rb").read())
engine.encode_batch(["a"])
print("ready", flush=True)
sys.stdin.readline()
started = time.perf_counter()
for batch in batches:
    engine.encode_batch(batch, parallel=False)
print(num_bytes, time.perf_counter() - started)
"""
DATASETS_MAP = f"""
import sys, time
path, tokenizer, cache = sys.argv[1:4]
started = time.perf_counter()
import datasets, tokenizers
datasets.disable_progress_bars()
made = tokenizers.Tokenizer.from_file(tokenizer)
made.no_truncation()
made.no_padding()
data = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
num_bytes = sum(len(text.encode()) for text in data["text"])
def encode(batch):
    return {{"input_ids": [e.ids for e in made.encode_batch_fast(batch["text"])]}}
data.map(encode, batched=True, num_proc={WORKERS}, remove_columns=data.column_names)
print(num_bytes, time.perf_counter() - started)
"""


MDS = """
import sys
import numpy as np
from streaming import MDSWriter
folder = sys.argv[1]
ids, ends = np.load(folder + "/ids.npy"), np.load(folder + "/ends.npy")
columns = {"input_ids": f"ndarray:{ids.dtype}"}
with MDSWriter(out=folder + "/mds", columns=columns, compression="zstd") as writer:
    for row in np.split(ids, ends[:-1]):
        writer.write({"input_ids": row})
"""


def tokenizer_file(tokenizer: Path) -> str:
    return str(tokenizer / "tokenizer.json")


def script(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def rate(output: str) -> float:
    """MB/s from the last line of a script: bytes and seconds."""
    num_bytes, seconds = map(float, output.split("\n")[-2].split())
    return num_bytes / 1e6 / seconds


def engine_one_call(corpus: Path, tokenizer: Path) -> float:
    command = script(ENGINE_ONE_CALL, corpus, tokenizer_file(tokenizer))
    return rate(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def engine_processes(corpus: Path, tokenizer: Path) -> float:
    """The sum over processes that start together."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [
        subprocess.Popen(script(ENGINE_PROCESSES, corpus, tokenizer_file(tokenizer), i), **pipes)
        for i in range(WORKERS)
    ]
    for process in running:
        process.stdout.readline()
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(rate(process.communicate()[0]) for process in running)


def datasets_map(corpus: Path, tokenizer: Path, folder: Path) -> float:
    part = folder / "part.jsonl"
    with open(corpus, "rb") as whole, open(part, "wb") as file:
        file.writelines(itertools.takewhile(lambda _: file.tell() < MAP_BYTES, whole))
    command = script(DATASETS_MAP, part, tokenizer_file(tokenizer), folder / "cache")
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    shutil.rmtree(folder / "cache")
    return rate(run.stdout)


def pretokenize(corpus: Path, tokenizer: Path, out: Path) -> tuple[dict[str, Any], float, int]:
    """One run into a new folder: its summary, wall seconds, and all processes' most memory."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "tokenfeed.tools.pretokenize", str(corpus), str(out)]
    command += ["--tokenizer", str(tokenizer), "--workers", str(WORKERS), "--json"]
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, sum(map(resident_bytes, family(process.pid))))
        time.sleep(0.05)
    seconds = time.perf_counter() - started
    assert process.stdout
    return json.loads(process.stdout.read()), seconds, peak_bytes


def family(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def bytes_a_token(out: Path, folder: Path, mds_python: str | None) -> dict[str, float]:
    """The same ids in other containers."""
    manifest = Manifest.read(out)
    parts = []
    for shard in manifest.splits["train"].shards:
        reader = ShardReader.open(out, manifest, shard)
        parts += [reader.read(index)[0] for index in range(shard.batches)]
    rows = Rows.concatenate(parts)
    ends = np.cumsum(rows.lengths)
    np.save(folder / "ids.npy", rows.ids)
    np.save(folder / "ends.npy", ends)
    ids = pa.LargeListArray.from_arrays(pa.array(np.append(0, ends)), pa.array(rows.ids))
    pq.write_table(pa.table({"input_ids": ids}), folder / "ids.parquet", compression="zstd")
    sizes = {
        "tokenfeed": sum(shard.bytes for shard in manifest.splits["train"].shards),
        "npy": (folder / "ids.npy").stat().st_size,
        "parquet zstd": (folder / "ids.parquet").stat().st_size,
        "mds zstd": mds_bytes(mds_python, folder),
    }
    return {name: round(size / len(rows.ids), 3) for name, size in sizes.items() if size}


def mds_bytes(python: str | None, folder: Path) -> int:
    """The size of the same rows in mosaicml-streaming's format."""
    if python is None:
        return 0
    shutil.rmtree(folder / "mds", ignore_errors=True)
    subprocess.run([python, "-c", MDS, str(folder)], check=True, capture_output=True)
    return sum(path.stat().st_size for path in (folder / "mds").iterdir())


def measure(corpus: Path, tokenizer: Path, folder: Path, mds_python: str | None) -> dict[str, Any]:
    runs, one_call, processes, mapped = [], [], [], []
    for _ in range(REPEATS):
        runs.append(pretokenize(corpus, tokenizer, folder / "out"))
        one_call.append(engine_one_call(corpus, tokenizer))
        processes.append(engine_processes(corpus, tokenizer))
        mapped.append(datasets_map(corpus, tokenizer, folder))
    rates = [made["text_bytes"] / 1e6 / seconds for made, seconds, _ in runs]
    speed = {
        "tokenfeed": summary(rates),
        "datasets.map": summary(mapped, 2),
        "engine, one call": summary(one_call),
        "engine, 2 processes": summary(processes),
    }
    made = runs[-1][0]
    middle = {name: numbers["median"] for name, numbers in speed.items()}
    return {
        "tokenizer": tokenizer.name,
        "corpus": corpus.stem,
        "text_mb": round(made["text_bytes"] / 1e6, 1),
        "mb_per_s": speed,
        "times_datasets_map": round(middle["tokenfeed"] / middle["datasets.map"], 1),
        "part_of_one_call": round(middle["tokenfeed"] / middle["engine, one call"], 2),
        "part_of_2_processes": round(middle["tokenfeed"] / middle["engine, 2 processes"], 2),
        "peak_memory_mb": round(max(peak for _, _, peak in runs) / 1e6),
        "bytes_a_token": bytes_a_token(folder / "out", folder, mds_python),
        "engine": made["engine"],
        "audited": made["audited"],
        "audit_differences": made["differences"],
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(
        "tokenizer", "corpus", "MB", "MB/s", "map", "times", "of call", "of 2", "GB", "B/tok"
    )
    for result in results:
        speed = {name: f"{numbers['median']:,}" for name, numbers in result["mb_per_s"].items()}
        table.add_row(
            result["tokenizer"],
            result["corpus"],
            f"{result['text_mb']:,}",
            speed["tokenfeed"],
            speed["datasets.map"],
            f"{result['times_datasets_map']}",
            f"{result['part_of_one_call']:.0%}",
            f"{result['part_of_2_processes']:.0%}",
            f"{result['peak_memory_mb'] / 1e3:.2f}",
            f"{result['bytes_a_token']['tokenfeed']}",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokenizers", nargs="+", type=Path, required=True)
    parser.add_argument("--corpora", nargs="+", type=Path, required=True, help="JSON Lines")
    parser.add_argument(
        "--mds-python",
        help="an interpreter with mosaicml-streaming, which does not go with newer `datasets`",
    )
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for corpus, tokenizer in itertools.product(arguments.corpora, arguments.tokenizers):
            results.append(measure(corpus, tokenizer, Path(folder), arguments.mds_python))
            print(results[-1], flush=True)
    show(results)
    write_result("pretokenize", results)


if __name__ == "__main__":
    main()
