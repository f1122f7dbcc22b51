"""How fast and how full does best-fit packing fill sequences, beside what other trainers use?

Lengths: lognormal documents (mean about 400 tokens), instructions like FLAN's (most below 100
tokens, a tail of long ones) and source files (a heavy tail, cut beforehand into pieces of at most
2,048 tokens), packed into sequences of 2,048. Every packer gets the same lengths, and all are
packed at once. One process and one thread a measurement, repeats interleaved; the time excludes
imports and the conversion of lengths into what the packer takes.

- tokenfeed: `pipeline.planning.arrangement.pack`, with the sort that it needs
- TRL: `_pack_bfd`, which also gathers the rows; here one byte a token
- axolotl: `pack_group`, compiled beforehand: first fit in the order of the rows, in groups of
  100,000 with at most 200 rows a sequence
- Grain: `BestFitPackIterDataset` with 1,000 open sequences, without threads, which also copies the
  rows; here one byte a token
- SeqPacker: `Packer.pack_flat` with its default algorithm

A packer that is too slow for all lengths gets fewer. Refuted by a packer that is both faster and
fuller.

    pip install trl axolotl numba grain    # into the environment of --peer-python
    python -m benchmarks.packing [--peer-python peers/bin/python] [--repeats 3] [--only grain]
    python -m benchmarks.packing --only seqpacker --peer-python peers/bin/python    # 4 minutes
    python -m benchmarks.packing --idle    # no training: how equal packed steps are

SeqPacker 0.1.3 has a wheel for Linux on x86-64 whose name says Python 3.8, and whose library needs
3.9 or later, because it has the stable ABI. So install it in two steps:

    pip install --no-deps --ignore-requires-python --only-binary :all: --python-version 3.8
        --abi cp38 --implementation cp --platform manylinux2014_x86_64 --target SITE_PACKAGES
        seqpacker==0.1.3
    mv SITE_PACKAGES/seqpacker/_core.cpython-38-x86_64-linux-gnu.so
        SITE_PACKAGES/seqpacker/_core.abi3.so
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CAPACITY = 2048
LENGTHS = ("lognormal", "instructions", "code")
COUNTS = {
    "tokenfeed": 10_000_000,
    "seqpacker": 10_000_000,
    "axolotl": 1_000_000,
    "trl": 300_000,
    "grain": 20_000,
}
"""The most lengths that each packer gets, in the order of the table."""


def make_lengths(kind: str, count: int, capacity: int = CAPACITY) -> np.ndarray:
    """Return lengths of rows, each at most the capacity, shape (count,), int64."""
    rng = np.random.default_rng(0)
    if kind == "lognormal":
        lengths = rng.lognormal(5.5, 1.0, count)
    elif kind == "instructions":
        short, long = rng.lognormal(3.8, 0.6, count), rng.lognormal(6.0, 0.8, count)
        lengths = np.where(rng.random(count) < 0.85, short, long)
    else:
        files = rng.pareto(1.1, count) * 300 + 20
        whole = np.minimum(files, 1e6).astype(np.int64)
        pieces = -(-whole // capacity)
        lengths = np.full(int(pieces.sum()), capacity)
        lengths[np.cumsum(pieces) - 1] = whole - (pieces - 1) * capacity
        lengths = rng.permutation(lengths)[:count]
    return np.clip(lengths, 1, capacity).astype(np.int64)


def _tokenfeed(lengths: np.ndarray) -> tuple[float, int]:
    from tokenfeed.pipeline.planning.arrangement import pack, sort_by_length

    started = time.perf_counter()
    bins, offsets = pack(sort_by_length(lengths, 0)[::-1], lengths, CAPACITY)
    seconds = time.perf_counter() - started
    assert len(np.unique(bins)) == len(lengths)
    assert np.add.reduceat(lengths[bins], offsets[:-1]).max() <= CAPACITY
    return seconds, len(offsets) - 1


def _trl(lengths: np.ndarray) -> tuple[float, int]:
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    offsets = np.append(0, np.cumsum(lengths))
    tokens = pa.array(np.zeros(offsets[-1], np.int8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, tokens)})
    started = time.perf_counter()
    packed = _pack_bfd(table, CAPACITY)
    return time.perf_counter() - started, len(packed)


def _axolotl(lengths: np.ndarray) -> tuple[float, int]:
    from axolotl.utils.samplers.multipack import pack_group

    pack_group(np.array([3, 2, 1]), 0, 4, 100_000, 200)
    started = time.perf_counter()
    groups = [lengths[start : start + 100_000] for start in range(0, len(lengths), 100_000)]
    bins = sum(len(pack_group(group, 0, CAPACITY, 100_000, 200, False)) for group in groups)
    return time.perf_counter() - started, bins


def _grain(lengths: np.ndarray) -> tuple[float, int]:
    import grain
    from grain.experimental import BestFitPackIterDataset

    rows = grain.MapDataset.source([{"ids": np.zeros(length, np.int8)} for length in lengths])
    started = time.perf_counter()
    packed = BestFitPackIterDataset(
        rows.to_iter_dataset(grain.ReadOptions(num_threads=0)),
        length_struct={"ids": CAPACITY},
        num_packing_bins=1000,
        shuffle_bins=False,
    )
    bins = sum(1 for _ in packed)
    return time.perf_counter() - started, bins


def _seqpacker(lengths: np.ndarray) -> tuple[float, int]:
    from seqpacker import Packer

    started = time.perf_counter()
    _, splits = Packer(CAPACITY).pack_flat(lengths)
    return time.perf_counter() - started, len(splits) + 1


PACKERS: dict[str, Callable[[np.ndarray], tuple[float, int]]] = {
    "tokenfeed": _tokenfeed,
    "trl": _trl,
    "axolotl": _axolotl,
    "grain": _grain,
    "seqpacker": _seqpacker,
}


def pack_once(packer: str, kind: str, count: int) -> dict[str, Any]:
    """Pack once in this process: seconds, lengths a second, and the share of slots in use."""
    lengths = make_lengths(kind, count)
    seconds, bins = PACKERS[packer](lengths)
    return {
        "lengths": len(lengths),
        "seconds": seconds,
        "m_lengths_s": len(lengths) / seconds / 1e6,
        "full": lengths.sum() / bins / CAPACITY,
    }


def idle(kind: str, capacity: int, *, balanced: bool, ranks: int = 8, width: int = 2048) -> float:
    """Return the share of time that ranks wait for the slowest rank of each step, by the operations
    of a layer: 24 w**2 for each token and 2 w for each square of a document's tokens, where w is
    the width. A rank gets one sequence a step, and attention skips other documents."""
    from tokenfeed import Packed
    from tokenfeed.pipeline.planning.batching import plan_window
    from tokenfeed.pipeline.planning.schedule import Draw

    lengths = make_lengths(kind, 200_000, capacity)
    batching = Packed(capacity, 1, balance_attention=balanced)
    plan = plan_window(lengths, batching, step_size=ranks, draw=Draw(0, 0, 0, 1))
    tokens, offsets = plan.cut.lengths[plan.pieces], plan.sequence_offsets
    assert offsets is not None
    costs = np.add.reduceat(24 * width**2 * tokens + 2 * width * tokens**2, offsets[:-1])
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return float(1 - steps.mean(1).sum() / steps.max(1).sum())


def _in_process(python: str, *args: object) -> dict[str, Any]:
    command = [python, "-m", "benchmarks.packing", "--one", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{args[0]} failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(argv: list[str] | None = None) -> None:
    """Measure every packer, print a table, and write results/packing.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", help="interpreter with the peers; without it, ours only")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, default=10_000_000, help="the most of any packer")
    parser.add_argument("--only", nargs="+", choices=PACKERS, help="keep the results of others")
    parser.add_argument("--results", type=Path, help="folder of packing.json")
    parser.add_argument("--idle", action="store_true", help="print how equal the ranks' work is")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.idle:
        for kind, capacity in itertools.product(LENGTHS, (2048, 8192, 32768)):
            shares = [idle(kind, capacity, balanced=balanced) for balanced in (False, True)]
            print(f"| {kind} | {capacity:,} | {shares[0]:.1%} | {shares[1]:.1%} |")
        return
    if options.one:
        packer, kind, count = options.one
        print(json.dumps(pack_once(packer, kind, int(count))))
        return
    from benchmarks.protocol import RESULTS, summary, write_result  # needs our packages

    packers = options.only or (list(PACKERS) if options.peer_python else ["tokenfeed"])
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for _ in range(options.repeats):
        for kind in LENGTHS:
            for packer in packers:
                python = sys.executable if packer == "tokenfeed" else options.peer_python
                most = min(COUNTS[packer], options.lengths)
                for count in sorted({most, *([min(1_000_000, most)] * (packer == "tokenfeed"))}):
                    runs.setdefault((kind, packer, count), []).append(
                        _in_process(python, packer, kind, count)
                    )
    results = []
    print("| lengths | packer | rows | M rows/s | full |\n| --- | --- | --- | --- | --- |")
    for (kind, packer, _), measured in runs.items():
        speed = statistics.median(run["m_lengths_s"] for run in measured)
        rows, full = measured[0]["lengths"], measured[0]["full"]
        print(f"| {kind} | {packer} | {rows:,} | {speed:.3g} | {full:.3%} |")
        seconds = summary([run["seconds"] for run in measured], 3)
        results.append(
            {
                "lengths": kind,
                "packer": packer,
                "rows": rows,
                "seconds": seconds,
                "m_rows_s": round(speed, 3),
                "full": round(full, 6),
            }
        )
    folder = options.results or RESULTS
    if options.only:
        former = json.loads((folder / "packing.json").read_text())["results"]
        results += [entry for entry in former if entry["packer"] not in packers]
        order = [*LENGTHS, *COUNTS]
        results.sort(key=lambda each: (order.index(each["lengths"]), order.index(each["packer"])))
    write_result("packing", results, folder)


if __name__ == "__main__":
    main()
