"""How many real tokens per second reach the training loop as int64 CPU batches?

Cases: short rows (mean 12 tokens) and documents (mean about 1,100), in vocabulary 32,768, each
padded and packed; beside `datasets` (map-style, the same work: shuffled, padded, int64) and the
bound: one gather per batch from an uncompressed memory map of pre-cut rows, without workers.
Every run counts real tokens, not slots. It would be refuted by a peer that shuffles as much and
delivers more.
One process per case and repeat; the page cache is warm; the first batch is timed apart.

usage: python benchmarks/loader.py [--repeats 3] [--seconds 4] [--workers 2]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from protocol import summary, write_result
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from tokenfeed.pipeline import Packed, Padded, ShardLoader, ShardWriter
from tokenfeed.pipeline.manifest import (
    FileInfo,
    Ledger,
    Manifest,
    SplitInfo,
    TokenizerInfo,
    length_histogram,
)
from tokenfeed.pipeline.rows import Rows
from tokenfeed.pipeline.storage import file_xxh3

VOCABULARY = 32_768
SEQUENCE = 2048
ROWS = {"short": 12, "documents": 1_100}
TOKENS = {"short": 40_000_000, "documents": 80_000_000}
SHARDS = 4

Counts = tuple[int, int]
"""Real tokens and token slots of one batch."""


def lengths_of(kind: str) -> np.ndarray:
    """Log-normal row lengths with the mean of `ROWS`."""
    rng = np.random.default_rng(0)
    mean, sigma = ROWS[kind], 0.8
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, TOKENS[kind] // mean)
    return np.clip(drawn, 1, 100 * mean).astype(np.int64)


def make_data(folder: Path, kind: str) -> None:
    """Write the same rows as shards, as a `datasets` folder and as a memory map of cut rows.

    Ids follow a Zipf law, like text, so that zstd has as much to do as on text.
    """
    rng = np.random.default_rng(1)
    lengths = lengths_of(kind)
    ids = (rng.zipf(1.2, lengths.sum()) % VOCABULARY).astype(np.uint16)
    write_shards(folder / kind, ids, lengths)
    whole = len(ids) // SEQUENCE * SEQUENCE
    ids[:whole].tofile(folder / f"{kind}.bin")
    ends = np.cumsum(lengths)
    keep = int(np.searchsorted(ends, TOKENS[kind] // 8))  # it is slow: an eighth is plenty
    column = pa.ListArray.from_arrays(
        pa.array(np.append(0, ends[:keep]).astype(np.int32)), pa.array(ids[: ends[keep - 1]])
    )
    from datasets import Dataset

    Dataset(pa.table({"input_ids": column})).save_to_disk(folder / f"{kind}.datasets")


def write_shards(folder: Path, ids: np.ndarray, lengths: np.ndarray) -> None:
    """Write a data set with the library's own writer."""
    origin = {
        "origin_file": np.zeros(len(lengths), np.uint32),
        "origin_record": np.arange(len(lengths), dtype=np.uint64),
    }
    rows = Rows(lengths, {"input_ids": ids}, origin)
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(lengths)), SHARDS)):
        with ShardWriter(folder, f"train/{number:05d}.arrow", VOCABULARY) as writer:
            writer.append(rows.slice(int(part[0]), int(part[-1]) + 1))
        assert writer.info is not None
        shards.append(writer.info)
    (folder / "none").touch()
    empty = {"file": "none", "bytes": 0, "xxh3": file_xxh3(folder / "none")}
    histogram = tuple(length_histogram(lengths).tolist())
    count = len(lengths)
    Manifest(
        format_version=1,
        task="lm",
        columns=(),
        label_names=(),
        tokenizer=TokenizerInfo(
            **empty,
            vocabulary_size=VOCABULARY,
            end_id=None,
            pad_id=0,
            engine="none",
            engine_version="0",
            audited=0,
            differences=0,
            special_tokens_in_text="plain",
            special_tokens_added=False,
        ),
        splits={"train": SplitInfo(shards=tuple(shards), length_histogram=histogram)},
        ledger=Ledger(files=1, bytes=0, read=count, written=count, empty=0, rejected=0),
        sources=FileInfo(**empty),
        rejects=FileInfo(**empty),
    ).write(folder)


def tokenfeed(folder: Path, kind: str, workers: int, batching: Padded | Packed) -> Iterator[Counts]:
    """Epoch after epoch of our loader."""
    with ShardLoader(folder / kind, batching=batching, num_workers=workers, epochs=None) as loader:
        for batch in loader:
            yield batch.num_tokens, batch.num_slots


def pad(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual collate function: pad to the longest of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    mask = np.zeros((len(rows), longest), np.bool_)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = row["input_ids"]
        mask[number, : len(row["input_ids"])] = True
    return torch.from_numpy(ids), torch.from_numpy(mask)


def hf_datasets(folder: Path, kind: str, workers: int) -> Iterator[Counts]:
    """`datasets`, map-style and shuffled, under a DataLoader; the rows of about 16k tokens."""
    from datasets import load_from_disk

    data = load_from_disk(folder / f"{kind}.datasets").with_format("numpy")
    rows = max(1, 16_384 // (3 * ROWS[kind]))
    while True:
        loader = DataLoader(data, rows, shuffle=True, num_workers=workers, collate_fn=pad)
        for ids, mask in loader:
            yield int(mask.sum()), ids.numel()


def memmap_gather(folder: Path, kind: str, workers: int) -> Iterator[Counts]:
    """The bound: rows of one length, uncompressed, shuffled, gathered in the training process."""
    rows = np.memmap(folder / f"{kind}.bin", np.uint16, "r").reshape(-1, SEQUENCE)
    rng = np.random.default_rng(0)
    while True:
        for chosen in np.array_split(rng.permutation(len(rows)), len(rows) // 8):
            ids = torch.from_numpy(rows[chosen].astype(np.int64))
            yield ids.numel(), ids.numel()


CASES: dict[str, Callable[[Path, str, int], Iterable[Counts]]] = {
    "tokenfeed padded": lambda f, k, w: tokenfeed(f, k, w, Padded(max_tokens=16_384)),
    "tokenfeed packed": lambda f, k, w: tokenfeed(f, k, w, Packed(SEQUENCE, 8)),
    "datasets map-style": hf_datasets,
    "bound: memmap gather": memmap_gather,
}


def measure(counts: Iterable[Counts], seconds: float) -> dict[str, float]:
    """Drain for some seconds after the first batch, which stands apart."""
    started = time.perf_counter()
    iterator = iter(counts)
    next(iterator)
    first = time.perf_counter()
    tokens = slots = 0
    for real, padded in iterator:
        tokens += real
        slots += padded
        if (now := time.perf_counter()) - first > seconds:
            break
    return {
        "mtok_s": tokens / (now - first) / 1e6,
        "padding": 1 - tokens / slots,
        "first_batch_s": first - started,
    }


def run_case(folder: Path, case: str, kind: str, options: argparse.Namespace) -> dict[str, float]:
    """One case in a process of its own."""
    arguments = ["--case", case, "--kind", kind, "--data", str(folder)]
    arguments += ["--seconds", str(options.seconds), "--workers", str(options.workers)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, repeats interleaved so that a slow minute of the machine hits them all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ROWS:
            make_data(folder, kind)
        runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(options.repeats):
            for kind in ROWS:
                for case in CASES:
                    result = run_case(folder, case, kind, options)
                    runs.setdefault((kind, case), []).append(result)
    return [
        {
            "rows": kind,
            "case": case,
            "workers": options.workers,
            **{
                field: summary([run[field] for run in results], digits=4)
                for field in ("mtok_s", "padding", "first_batch_s")
            },
        }
        for (kind, case), results in runs.items()
    ]


def show(results: list[dict[str, Any]]) -> None:
    """The table a person reads."""
    table = Table("rows", "case", "M tokens/s", "[least, most]", "padding", "first batch")
    for result in results:
        speed = result["mtok_s"]
        table.add_row(
            result["rows"],
            result["case"],
            f"{speed['median']:.1f}",
            f"[{speed['min']:.1f}, {speed['max']:.1f}]".replace("[", r"\["),
            f"{result['padding']['median']:.2%}",
            f"{result['first_batch_s']['median']:.2f} s",
        )
    Console(width=100).print(table)


def main() -> None:
    """Run one case when asked by `run_case`, else all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case:
        counts = CASES[options.case](options.data, options.kind, options.workers)
        print(json.dumps(measure(counts, options.seconds)))
        return
    results = compare(options)
    show(results)
    print(f"written to {write_result('loader', results)}")


if __name__ == "__main__":
    main()
