"""What do other sources of texts and of tokens cost, beside `pretokenize` on a file?

`api`: `tokenfeed.pretokenize` on a `datasets.Dataset`, on functions that return an iterator, and
on a polars frame, beside the command on a file of JSON Lines with the same rows. Each run is a
process of its own. Its clock starts when the records are open, before the import of tokenfeed. One
function has its texts in memory, the other one parses JSON while the clock runs.

`families`: the command on tokenizers that gigatoken does not take as they are, beside
`datasets.map`: WordPiece (BERT), single digits (SmolLM, StarCoder), cl100k (GPT-4) and
nanochat's pattern. Each is trained here, or has the merges of one that was.

`tokens`: the command on token files of Megatron, nanoGPT and OLMo, beside zstd level 1 on the same
bytes with as many processes. The files repeat the rows of the corpus up to four bytes of ids per
byte of it. Repeats are interleaved, and ratios are of the same repeat.

    python -m benchmarks.open_data [--megabytes 100] [--repeats 5] [--only api tokens families]
"""

import argparse
import gzip
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from benchmarks.pretokenize.__main__ import datasets_map
from benchmarks.pretokenize.__main__ import pretokenize as run_command
from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.text_loaders.data import pretokenize, standard_library, write_json_lines
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.data_sets.export import Format, export_data_set
from tokenfeed.tools.encoding.engine_support import GPT_2, GPT_4, NANOCHAT, split_steps

WORKERS = 2
SECONDS = 2.5
COMMAND = "command, JSON Lines"
"""Matches between letters, digits and signs. SentencePiece has no piece across such a place."""
TIMES = ("times_command", "times_zstd", "times_datasets_map")
FILES: dict[Format, str] = {"megatron": "train.bin", "nanogpt": "train.bin", "olmo": "train.npy"}

API = """
import json, resource, sys, time
source, corpus, out, tokenizer = sys.argv[1:5]
if source == "datasets.Dataset":
    import datasets
    records = datasets.load_from_disk(corpus + ".dataset")
elif source == "polars frame":
    import polars
    records = polars.read_parquet(corpus + ".parquet")
elif source == "function of texts":
    with open(corpus, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    records = lambda: iter(texts)
else:
    def records():
        with open(corpus, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
started = time.perf_counter()
import tokenfeed
tokenfeed.pretokenize(records, out, tokenizer=tokenizer, workers=WORKERS, validation=0)
seconds = time.perf_counter() - started
print(seconds, sum(each.ru_utime + each.ru_stime for each in before))
""".replace("WORKERS", str(WORKERS))
"""Prints wall seconds, and the processor seconds before the clock starts."""
SOURCES = ("datasets.Dataset", "function of texts", "function that parses JSON", "polars frame")

Entry = dict[str, Any]


def make_data(folder: Path, megabytes: float) -> None:
    """Write the corpus in every form, a tokenizer, and files of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(standard_library())
    corpus = folder / "corpus.jsonl"
    write_json_lines(corpus, texts, min(len("".join(texts)), int(megabytes * 1e6)))
    pretokenize(corpus, folder / "trained")
    tokenizer = folder / "trained" / "tokenizer.json"
    write_json_lines(corpus, texts, int(megabytes * 1e6))
    records = [msgspec.json.decode(line) for line in corpus.read_bytes().splitlines()]
    corpus.write_bytes(msgspec.json.Encoder().encode_lines(records))  # the bytes of a copy
    pretokenize(corpus, folder / "documents", "--tokenizer", tokenizer)
    for to in FILES:
        export_data_set(str(folder / "documents"), folder / to, to)
    ids = np.fromfile(folder / "nanogpt" / FILES["nanogpt"], np.uint16)
    times = max(int(4e6 * megabytes / ids.nbytes), 1)
    repeat_files(folder, times)
    script = """
import sys, datasets
data = datasets.load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
data.save_to_disk(sys.argv[1] + ".dataset")
data.to_parquet(sys.argv[1] + ".parquet")
"""
    command = [sys.executable, "-c", script, str(corpus), str(folder / "cache")]
    subprocess.run(command, check=True, capture_output=True)


def run_api(source: str, folder: Path, out: Path) -> tuple[float, float]:
    """Wall seconds and processor seconds of a run."""
    corpus, tokenizer = folder / "corpus.jsonl", folder / "trained" / "tokenizer.json"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", API, source, str(corpus), str(out), str(tokenizer)]
    if source == COMMAND:
        command = [sys.executable, "-m", "tokenfeed.tools.pretokenize", str(corpus), str(out)]
        command += ["--tokenizer", str(tokenizer), "--workers", str(WORKERS), "--validation", "0"]
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, earlier = time.perf_counter() - started, 0.0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    if source != COMMAND:
        seconds, earlier = map(float, done.stdout.split()[-2:])
    return seconds, cpu - earlier


def measure_api(folder: Path, repeats: int) -> list[Entry]:
    names = (COMMAND, *SOURCES)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    shards = {}
    for _ in range(repeats):
        for name in names:
            runs[name].append(run_api(name, folder, folder / "out"))
            splits = Manifest.read(folder / "out").splits
            shards[name] = [shard.xxh3 for split in splits.values() for shard in split.shards]
    return [
        {
            "part": "api",
            "case": name,
            "seconds": summary([wall for wall, _ in runs[name]], 2),
            "cpu_s": summary([cpu for _, cpu in runs[name]], 2),
            "times_command": ratio([wall for wall, _ in runs[name]], [w for w, _ in runs[COMMAND]]),
            "cpu_times_command": ratio([c for _, c in runs[name]], [c for _, c in runs[COMMAND]]),
            "same_shards": shards[name] == shards[COMMAND],
        }
        for name in names
    ]


def ratio(values: list[float], others: list[float]) -> float:
    """The median of the ratios within a repeat."""
    pairs = zip(values, others, strict=True)
    return round(statistics.median(value / other for value, other in pairs), 3)


def families(folder: Path) -> dict[str, Path]:
    """Return the folder of a tokenizer of each family."""
    bpe = json.loads((folder / "trained" / "tokenizer.json").read_bytes())
    digits = [{"type": "Digits", "individual_digits": True}, json.loads(GPT_2)]
    steps = {
        "digits": digits,
        "cl100k": [*map(json.loads, split_steps((GPT_4,), "Isolated", invert=False))],
        "nanochat": [*map(json.loads, split_steps((NANOCHAT,), "Isolated", invert=False))],
    }
    made = {
        name: json.dumps(bpe | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": each}})
        for name, each in steps.items()
    }
    texts = list(standard_library())
    wordpiece = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer(lowercase=True)
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[SEP]"]
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=30_522, special_tokens=special, show_progress=False
    )
    wordpiece.train_from_iterator(texts[::3], trainer)
    made["wordpiece"] = wordpiece.to_str()
    for name, content in made.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "tokenizer.json").write_text(content)
    return {name: folder / name for name in made}


def measure_families(folder: Path, repeats: int) -> list[Entry]:
    results = []
    for name, tokenizer in families(folder).items():
        ours: list[float] = []
        peer: list[float] = []
        for _ in range(min(repeats, 3)):
            made, seconds, _ = run_command(folder / "corpus.jsonl", tokenizer, folder / "out")
            ours.append(made["text_bytes"] / 1e6 / seconds)
            peer.append(datasets_map(folder / "corpus.jsonl", tokenizer, folder))
        results.append(
            {
                "part": "families",
                "case": name,
                "mb_per_s": summary(ours),
                "datasets_map_mb_per_s": summary(peer, 2),
                "times_datasets_map": ratio(ours, peer),
            }
        )
    return results


def repeat_files(folder: Path, times: int) -> None:
    """Repeat the rows of the token files, with their indexes."""
    lengths = np.fromfile(folder / "megatron" / "train.idx", "<i4", offset=34)
    (rows,) = np.fromfile(folder / "megatron" / "train.idx", "<u8", 1, offset=18).tolist()
    lengths = np.tile(lengths[:rows], times)
    ends = np.cumsum(lengths, dtype=np.int64)
    for to, file in FILES.items():
        ids = (folder / to / file).read_bytes()
        (folder / to / file).write_bytes(ids * times)
    head = (folder / "megatron" / "train.idx").read_bytes()[:18]
    (folder / "megatron" / "train.idx").write_bytes(
        head
        + np.array([len(ends), len(ends) + 1], "<u8").tobytes()
        + lengths.tobytes()
        + (2 * (ends - lengths)).tobytes()
        + np.arange(len(ends) + 1, dtype="<i8").tobytes()
    )
    pairs = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    with gzip.open(folder / "olmo" / "train.csv.gz", "wt", compresslevel=1) as table:
        table.writelines(f"{begin},{end},{n},corpus,{n}\n" for n, (begin, end) in enumerate(pairs))


COMPRESS = """
import sys, time, zstandard
from concurrent.futures import ProcessPoolExecutor
def part(number):
    size = len(data := open(sys.argv[1], "rb").read()) // WORKERS + 1
    data, made = memoryview(data)[number * size : (number + 1) * size], zstandard.ZstdCompressor(1)
    return sum(len(made.compress(data[at : at + (1 << 20)])) for at in range(0, len(data), 1 << 20))
if __name__ == "__main__":
    started = time.perf_counter()
    with ProcessPoolExecutor(WORKERS) as pool:
        sum(pool.map(part, range(WORKERS)))
    print(time.perf_counter() - started)
""".replace("WORKERS", str(WORKERS))
"""Prints the seconds in which processes compress a file."""


def measure_tokens(folder: Path, repeats: int) -> list[Entry]:
    script = folder / "compress.py"
    script.write_text(COMPRESS)
    results = []
    for to, file in FILES.items():
        path, ours, bound = folder / to / file, list[float](), list[float]()
        for _ in range(repeats):
            command = [sys.executable, str(script), str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            bound.append(path.stat().st_size / 1e6 / float(done.stdout))
            shutil.rmtree(folder / "copy", ignore_errors=True)
            started = time.perf_counter()
            pretokenize(
                path, folder / "copy", "--task", "ids", "--tokenizer", folder / "trained",
                "--workers", WORKERS,
            )  # fmt: skip
            ours.append(path.stat().st_size / 1e6 / (time.perf_counter() - started))
        entry: Entry = {"part": "tokens", "case": f"token file, {to}", "mb_per_s": summary(ours)}
        entry |= {"zstd_mb_per_s": summary(bound), "times_zstd": ratio(ours, bound)}
        results.append(entry)
    return results


def show(results: list[Entry]) -> None:
    columns = ("seconds", "cpu_s", "mtok_s", "mb_per_s")
    table = Table("case", "seconds", "CPU s", "M tokens/s", "MB/s", "times command, zstd or map")
    for entry in results:
        middle = {name: f"{x['median']}" for name, x in entry.items() if isinstance(x, dict)}
        (times,) = (entry[name] for name in TIMES if name in entry)
        table.add_row(entry["case"], *(middle.get(name, "") for name in columns), f"{times}")
    Console(width=100).print(table)


PARTS: dict[str, Callable[[Path, int], list[Entry]]] = {
    "api": measure_api,
    "tokens": measure_tokens,
    "families": measure_families,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100, help="of text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.data or Path(name)
        if not (folder / "corpus.jsonl.parquet").exists():
            make_data(folder, options.megabytes)
        results = []
        for part in options.only:
            results += PARTS[part](folder, options.repeats)
            show(results)
    if (RESULTS / "open_data.json").exists():
        former = json.loads((RESULTS / "open_data.json").read_bytes())["results"]
        results = [entry for entry in former if entry["part"] not in options.only] + results
    write_result("open_data", results, megabytes=options.megabytes)


if __name__ == "__main__":
    main()
