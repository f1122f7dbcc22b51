"""How well are rows mixed while a list of stages changes the mixture?

Two corpora of 200 M tokens, sorted by source and by date, so each has ten groups that lie apart. A
run has weights of 0.7 and 0.3 for 60 M tokens, changes them linearly to 0.2 and 0.8 over the next
60 M, and keeps them for 60 M. For steps of 64 k to 1 M tokens, a deviation is how far the shares of
the twenty groups in a step are from the list's shares at that place (root of the mean square). The
reference draws every row at random: its source by the shares at that place, then a row of the
source that was not drawn before.

    ratio   deviation of the loader, relative to the reference, before, in and after the change
    wave    largest distance of the first corpus's share from the list's in a step of 4 M tokens,
            relative to the reference

The loader and the reference have several seeds. The standard error of a ratio comes from the
spread of the mean squares over the seeds. Refuted by a ratio above 1.1 or a wave above 2.

    python -m benchmarks.shuffle.staged && python -m benchmarks.readme
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.protocol import RESULTS, write_result
from benchmarks.shuffle.cases import load, make, ours, run
from benchmarks.shuffle.corpora import Corpus
from benchmarks.shuffle.metrics import Order, by_rows, shares

__all__ = ["CASES", "describe", "drawn", "expected"]

CORPORA = ("documents by source", "documents by date")
FIRST, LAST, PART = (0.7, 0.3), (0.2, 0.8), 60_000_000
"""Weights before and after the change, and tokens of each of the three parts."""
PARTS = ("before", "in", "after")
STEPS = {"64k": 1 << 16, "0.5M": 1 << 19, "1M": 1 << 20}
WAVE_STEP = 1 << 22
CASES = (
    ours("padded", 27, "Padded", 16_384),
    ours("packed", 27, "Packed", 2048, 8),
    ours("fixed", 27, "Fixed", 27),
)

Entry = dict[str, Any]


def expected(tokens: np.ndarray, part: int) -> np.ndarray:
    """Share of the first corpus after so many tokens of the run."""
    change = np.clip((tokens - part) / part, 0, 1)
    return FIRST[0] + (LAST[0] - FIRST[0]) * change


def drawn(corpora: list[Corpus], part: int, seed: int) -> Order:
    """Rows at random, at the shares of the list; rows of the second corpus follow the first's."""
    rng = np.random.default_rng(seed)
    means = [float(corpus.lengths.mean()) for corpus in corpora]
    count = int(3 * part / min(means) * 1.2)
    share = expected(np.arange(count) * 3 * part / count, part)
    of_first = share / means[0] / (share / means[0] + (1 - share) / means[1])
    is_second = rng.random(count) >= of_first
    rows = np.empty(count, np.int64)
    for number, corpus in enumerate(corpora):
        own = is_second == number
        order = rng.permutation(len(corpus.lengths))
        rows[own] = np.resize(order, own.sum()) + number * len(corpora[0].lengths)
    lengths = np.concatenate([corpus.lengths for corpus in corpora])
    stop = int(np.searchsorted(np.cumsum(lengths[rows]), 3 * part))
    return by_rows(rows[:stop], lengths, 27)


def distances(order: Order, groups: np.ndarray, step: int, part: int) -> np.ndarray:
    """Share of each group in each step, less its share in the list, (steps, groups)."""
    found = shares(order, groups, step)
    kinds = found.shape[1] // 2
    first = expected((np.arange(len(found)) + 0.5) * step, part)
    due = np.repeat(np.stack([first, 1 - first], axis=1) / kinds, kinds, axis=1)
    return np.asarray(found - due)


def describe(orders: list[Order], corpora: list[Corpus], part: int) -> Entry:
    """Ratios before, in and after the change, each with its standard error, and the wave.

    `orders` has the order of each seed.
    """
    groups = np.concatenate([corpora[0].groups, corpora[1].groups + corpora[0].groups.max() + 1])
    both = orders, [drawn(corpora, part, seed) for seed in range(len(orders))]
    found: Entry = {name: {} for name in PARTS}
    for name, step in STEPS.items():
        apart = [[distances(each, groups, step, part) ** 2 for each in of] for of in both]
        for number, of_part in enumerate(PARTS):
            steps = slice(number * part // step, (number + 1) * part // step)
            found[of_part][name] = ratio(*([each[steps].mean() for each in of] for of in apart))
    half = int(groups.max() + 1) // 2
    step = min(WAVE_STEP, part // 8)
    waves = [
        np.mean([np.abs(distances(each, groups, step, part)[:, :half].sum(1)).max() for each in of])
        for of in both
    ]
    return found | {"wave": float(f"{waves[0] / waves[1]:.3g}")}


def ratio(ours_: list[float], theirs: list[float]) -> dict[str, float]:
    """Root of the ratio of the means of two samples, and its standard error."""
    value = np.sqrt(np.mean(ours_) / np.mean(theirs))
    errors = [np.std(each, ddof=1) / np.mean(each) / len(each) ** 0.5 for each in (ours_, theirs)]
    error = value * np.hypot(*errors) / 2  # of a root: half of the relative error
    return {"ratio": round(float(value), 3), "error": round(float(error), 3)}


def measured(options: argparse.Namespace) -> Iterator[Entry]:
    made = [make(options.data, name, options.scale) for name in CORPORA]
    corpora, folders = [corpus for corpus, _ in made], [folder / "shards" for _, folder in made]
    part = int(PART * options.scale)
    names = [str(folder.relative_to(options.data)) for folder in folders]
    first, last = (dict(zip(names, weights, strict=True)) for weights in (FIRST, LAST))
    stages = [
        {"weights": first, "until_tokens": part},
        {"weights": first, "to": last, "until_tokens": 2 * part},
        {"weights": last, "until_tokens": 3 * part},
    ]
    for case in CASES:
        print(f"stages: {case.name}", file=sys.stderr, flush=True)
        orders = []
        for seed in range(options.seeds):
            settings = json.dumps(case.settings | {"stages": stages, "seed": seed})
            run(sys.executable, "ours", settings, options.data, 1, options.data / "order")
            orders.append(load(options.data / "order-0.npz"))
        yield {"case": case.name, **describe(orders, corpora, part)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--scale", type=float, default=1.0, help="of the data; for a quick try")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        options.data = options.data or Path(name)
        results = list(measured(options))
    more = {"scale": options.scale, "seeds": options.seeds}
    path = write_result("stages", results, options.results, **more)
    Console().print_json(json.dumps(results))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
