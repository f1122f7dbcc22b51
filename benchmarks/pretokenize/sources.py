"""How fast is `pretokenize` on other tokenizers than GPT-2's, and on token files?

`families`: the command on tokenizers that gigatoken does not take as they are, beside
`datasets.map`: WordPiece (BERT), single digits (SmolLM, StarCoder), cl100k (GPT-4) and
nanochat's pattern. Each is trained here, or has the merges of one that was.

`tokens`: the command on token files of Megatron, nanoGPT and OLMo, beside zstd level 1 on the same
bytes with as many processes. The files repeat the rows of the corpus up to four bytes of ids per
byte of it. Repeats are interleaved, and ratios are of the same repeat.

    python -m benchmarks.pretokenize.sources [--megabytes 100] [--only tokens families]
"""

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from benchmarks.pretokenize.__main__ import datasets_map
from benchmarks.pretokenize.__main__ import pretokenize as run_command
from benchmarks.protocol import summary, write_result
from benchmarks.text_loaders.data import pretokenize, standard_library, write_json_lines
from tokenfeed.tools.data_sets.export import Format, export_data_set
from tokenfeed.tools.encoding.fast.shapes import GPT_2, GPT_4, NANOCHAT, split_steps

WORKERS = 2
TIMES = ("times_zstd", "times_datasets_map")
FILES: dict[Format, str] = {"megatron": "train.bin", "nanogpt": "train.bin", "olmo": "train.npy"}

Entry = dict[str, Any]


def make_data(folder: Path, megabytes: float) -> None:
    """Write the corpus, a tokenizer, and files of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(standard_library())
    corpus = folder / "corpus.jsonl"
    write_json_lines(corpus, texts, min(len("".join(texts)), int(megabytes * 1e6)))
    pretokenize(corpus, folder / "trained")
    tokenizer = folder / "trained" / "tokenizer.json"
    write_json_lines(corpus, texts, int(megabytes * 1e6))
    pretokenize(corpus, folder / "documents", "--tokenizer", tokenizer)
    for to in FILES:
        export_data_set(str(folder / "documents"), folder / to, to)
    ids = np.fromfile(folder / "nanogpt" / FILES["nanogpt"], np.uint16)
    times = max(int(4e6 * megabytes / ids.nbytes), 1)
    repeat_files(folder, times)


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
        entry: Entry = {"case": f"token file, {to}", "mb_per_s": summary(ours)}
        entry |= {"zstd_mb_per_s": summary(bound), "times_zstd": ratio(ours, bound)}
        results.append(entry)
    return results


def show(results: list[Entry]) -> None:
    table = Table("case", "MB/s", "times zstd or map")
    for entry in results:
        (times,) = (entry[name] for name in TIMES if name in entry)
        table.add_row(entry["case"], f"{entry['mb_per_s']['median']}", f"{times}")
    Console(width=100).print(table)


PARTS: dict[str, Callable[[Path, int], list[Entry]]] = {
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
        if not (folder / "nanogpt").exists():
            make_data(folder, options.megabytes)
        for part in options.only:
            results = PARTS[part](folder, options.repeats)
            show(results)
            write_result(part, results, megabytes=options.megabytes)


if __name__ == "__main__":
    main()
