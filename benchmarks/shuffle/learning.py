"""Does it matter how well the rows are mixed? One small model, one corpus, several orders.

The corpus is real text, sorted by source: so many rows of each, of 64 tokens. Its orders are those
that benchmarks/shuffle/ measures on 200 M tokens sorted by source: a row of the small corpus
stands for the rows around the same place of the large one, and comes when one of these does. So a
step of 32 rows stands for 1 M tokens, and the sources come and go as they would. Each run is one
epoch with a cosine schedule; then the loss on held-out text of every source. Runs of equal seeds
begin with equal weights, so orders are compared within a seed; a second full shuffle says how far
two orders differ that are equally good. Refuted by our order if it differs by more than that.

usage: python -m benchmarks.shuffle.learning SOURCE [SOURCE ...] [--seeds 4] [--peer-python PYTHON]

A SOURCE is a folder, a text file, or a .jsonl file with the field to read: FILE.jsonl:FIELD.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy

from benchmarks.protocol import RESULTS, write_result
from benchmarks.shuffle.cases import CASES, FULL, find_peers, make, orders_of
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models.transformer import ModelSize, Transformer

LENGTH, ROWS = 64, 32
VOCABULARY = 2048
SIZE = ModelSize(layers=2, width=128, heads=4)
HEAD = Head(kind="vocabulary", outputs=VOCABULARY, vocabulary_size=VOCABULARY)
RATE, WARMUP = 2e-3, 10
HELD_OUT = 64
"""Rows of each source."""
CORPUS = "documents by source"
AGAIN, SORTED = "another full shuffle", "sorted"
ORDERS = (FULL, AGAIN, "tokenfeed padded", "datasets buffer 10,000", SORTED)

Entry = dict[str, Any]
Ids = np.ndarray


def texts(source: str) -> Iterator[str]:
    """The documents of a source."""
    name, _, field = source.partition(".jsonl:")
    if field:
        with open(f"{name}.jsonl", encoding="utf-8") as file:
            for line in file:
                value = json.loads(line)[field]
                yield value if isinstance(value, str) else " ".join(map(str, value))
        return
    path = Path(source)
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file() and b"\0" not in (read := each.read_bytes()):
            yield read.decode("utf-8", errors="replace")


def beginning(source: str, characters: int) -> str:
    """So much of a source."""
    parts, left = [], characters
    for text in texts(source):
        parts.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    return "\n".join(parts)


def encode(sources: list[str], rows: int) -> np.ndarray:
    """The first rows of every source, (sources, rows, LENGTH), int64."""
    parts = [beginning(source, rows * LENGTH * 6) for source in sources]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(parts, trainer)
    encoded = []
    for source, part in zip(sources, parts, strict=True):
        ids = np.array(tokenizer.encode(part).ids)
        if len(ids) < rows * LENGTH:
            sys.exit(f"error: {source}: {len(ids):,} tokens, {rows * LENGTH:,} are needed.")
        encoded.append(ids[: rows * LENGTH].reshape(rows, LENGTH))
    return np.stack(encoded)


def split(encoded: np.ndarray) -> tuple[Ids, Ids]:
    """Rows to learn from, (rows, LENGTH), in the order of the sources; and those held out."""
    every = encoded.shape[1] // HELD_OUT
    held = np.arange(encoded.shape[1]) % every == every - 1
    return encoded[:, ~held].reshape(-1, LENGTH), encoded[:, held]


def stand_in(order: np.ndarray, rows: int) -> np.ndarray:
    """The order of few rows that stand for those at the same places of a large corpus."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    chosen = (np.arange(rows) * len(order)) // rows
    return np.argsort(place[chosen], kind="stable")


def large_orders(options: argparse.Namespace) -> dict[str, list[np.ndarray]]:
    """The rows of the large corpus as every loader delivers them, an order a seed."""
    peers, _ = find_peers(options.peer_python or sys.executable)
    corpus, folder = make(options.data, CORPUS, options.scale)
    count, seeds = len(corpus.lengths), range(options.seeds)
    found = {
        AGAIN: [np.random.default_rng(1000 + seed).permutation(count) for seed in seeds],
        SORTED: [np.arange(count) for _ in seeds],
    }
    for case in CASES[CORPUS]:
        if case.name in ORDERS and (case.peer is None or case.peer in peers):
            every = replace(case, epochs=options.seeds)
            orders = orders_of(every, peers.get(case.peer or ""), options.data, folder)
            found[case.name] = [order.rows[order.whole] for order in orders]
    return found


def learn(rows: Ids, order: np.ndarray, seed: int) -> Transformer:
    """One epoch."""
    torch.manual_seed(seed)
    model = Transformer(SIZE, HEAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    steps = len(order) // ROWS
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(steps))
    for batch in np.split(order[: steps * ROWS], steps):
        loss(model, rows[batch]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def rate(steps: int) -> Callable[[int], float]:
    def at(step: int) -> float:
        return min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    return at


def loss(model: Transformer, ids: Ids) -> torch.Tensor:
    ids_BT = torch.from_numpy(ids)
    logits_BTV = model(MicroBatch.of_ids(ids_BT, causal=True))
    return cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


def trial(name: str, rows: Ids, held: Ids, order: np.ndarray, seed: int) -> list[float]:
    """The losses of one run, on one core."""
    torch.set_num_threads(1)
    found = losses(learn(rows, order, seed), held)
    print(f"seed {seed}, {name}: {np.mean(found):.4f}", file=sys.stderr, flush=True)
    return found


@torch.no_grad()
def losses(model: Transformer, held: Ids) -> list[float]:
    """On the held-out rows of each source."""
    return [float(loss(model, rows)) for rows in held]


def describe(name: str, found: dict[str, list[list[float]]]) -> Entry:
    """Means over the seeds; the difference to a full shuffle is within a seed."""
    of_seeds = np.array(found[name])
    means, worst = of_seeds.mean(axis=1), of_seeds.max(axis=1)
    entry = {
        "case": name,
        "seeds": len(means),
        "loss": round(float(means.mean()), 4),
        "worst_source": round(float(worst.mean()), 4),
        "by_source": [round(float(each), 3) for each in of_seeds.mean(axis=0)],
        "by_seed": [round(float(each), 4) for each in means],
    }
    if FULL in found and name != FULL:
        apart = means - np.array(found[FULL]).mean(axis=1)
        entry["to_full"] = {"mean": round(float(apart.mean()), 4)}
        entry["to_full"] |= {n: round(float(f(apart)), 4) for n, f in (("min", min), ("max", max))}
    return entry


def show(results: list[Entry]) -> None:
    table = Table("order", "loss, mean of sources", "worst source", "less a full shuffle's")
    for entry in results:
        figures = [str(entry[name]) for name in ("loss", "worst_source")]
        table.add_row(entry["case"], *figures, str(entry.get("to_full", "")))
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--peer-python", help="an interpreter that has `datasets`")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rows", type=int, default=6400, help="of all sources together")
    parser.add_argument("--data", type=Path, help="keep the large corpus here")
    parser.add_argument("--scale", type=float, default=1.0, help="of the large corpus")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    per_source = options.rows // len(options.sources)
    rows, held = split(encode(options.sources, per_source + HELD_OUT))
    with tempfile.TemporaryDirectory() as name:
        options.data = options.data or Path(name)
        large = large_orders(options)
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        started = {
            name: [
                pool.submit(trial, name, rows, held, stand_in(order, len(rows)), seed)
                for seed, order in enumerate(large[name])
            ]
            for name in ORDERS
            if name in large
        }
        found = {name: [run.result() for run in runs] for name, runs in started.items()}
    results = [describe(name, found) for name in found]
    show(results)
    names = [Path(source).name for source in options.sources]
    settings = {"sources": names, "rows": len(rows), "row_tokens": LENGTH, "batch_rows": ROWS}
    print(f"written to {write_result('learning', results, options.results, **settings)}")


if __name__ == "__main__":
    main()
