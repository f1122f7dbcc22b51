"""How well are rows mixed that were sorted, and what does that cost?

Corpora of 200 M tokens, sorted by source (ten of equal size), by length and by date (documents of
600 tokens in the mean, lognormal), and short rows (24) sorted by source. Every order is one that
ShardLoader delivered from shards. Measured for steps of 64 k to 4 M tokens:

    deviation    standard deviation of a tenth's share of a step, over that of a full shuffle
    correlation  of neighbouring steps: 0 where a step does not tell of the next
    neighbours   how far rows side by side in a batch were apart (1: as in a full shuffle), and how
                 often within a thousandth of the corpus (1: as often as by chance)
    drift        largest change of a tenth's share from the first tenth of an epoch to the last
    again        pairs of rows of one batch that meet again in the next epoch, and whole batches
    labels       variance of two classes within a batch over the binomial, where length goes with
                 the class
    met          record batches that share a window again in the next reading, over chance: of five
                 epochs, and of five readings in one stage and in five
    mixture      share of a source of weight 0.02 in every 4 M tokens, over its weight

Refuted by a deviation, a drift or an again that is larger than said. The results keep the figures
of peers, and the picture of an epoch, from 2026-11 (commit 027df8e4, `shuffle/peers.py`): they do
not depend on tokenfeed.

    python -m benchmarks.shuffle && python -m benchmarks.readme
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.protocol import RESULTS, write_result
from benchmarks.shuffle.cases import CASES, COSTS, MIXTURES, CaseError, load, make, orders_of, run
from benchmarks.shuffle.corpora import Corpus
from benchmarks.shuffle.metrics import (
    Order,
    again,
    deviation,
    drift,
    five_readings,
    full_shuffle,
    label_variance,
    met_again,
    neighbours,
    persistence,
    shares,
)
from tokenfeed.pipeline.planning.schedule import Schedule, Source, Stretch

STEPS = {"64k": 1 << 16, "0.5M": 1 << 19, "1M": 1 << 20, "4M": 1 << 22}
SEEDS = 3
"""Full shuffles that a spread is compared with."""
WINDOWS = 24
"""Windows of a reading, for `met`: 3,000 record batches of 65,536 tokens."""
FULL = "full shuffle (datasets, map-style)"

Entry = dict[str, Any]


class Measure:
    """What all orders of one corpus are compared with."""

    def __init__(self, corpus: Corpus, rows_a_batch: int) -> None:
        self.corpus = corpus
        tokens = np.bincount(corpus.groups, corpus.lengths)
        self.whole = tokens / tokens.sum()
        shuffles = [full_shuffle(corpus.lengths, rows_a_batch, seed) for seed in range(SEEDS)]
        self.spread = {name: self._spread(shuffles, step) for name, step in STEPS.items()}

    def _spread(self, orders: list[Order], step: int) -> float | None:
        found = [deviation(shares(o, self.corpus.groups, step), self.whole) for o in orders]
        squares = [each**2 for each in found if each is not None]
        return float(np.sqrt(np.mean(squares))) if squares else None

    def describe(self, orders: list[Order]) -> Entry:
        """All figures of the epochs of one case."""
        first, groups = orders[0], self.corpus.groups
        found: Entry = {"deviation": {}, "correlation": {}}
        for name, step in STEPS.items():
            of_steps = shares(first, groups, step)
            spread, chance = deviation(of_steps, self.whole), self.spread[name]
            if spread is not None and chance:
                found["deviation"][name] = digits(spread / chance)
                found["correlation"][name] = digits(persistence(of_steps, self.whole))
        found["neighbours"] = {name: digits(n) for name, n in neighbours(first).items()}
        found["drift"] = digits(drift(first, groups))
        found["padding"] = digits(first.padding)
        if len(orders) > 1:
            found["again"] = {name: digits(part) for name, part in again(*orders[:2]).items()}
        if len(self.whole) == 2:
            found["labels"] = digits(label_variance(first, groups))
        return found


def digits(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def compare(options: argparse.Namespace, old: list[Entry]) -> list[Entry]:
    """Every case of every corpus, and what the old results have of peers."""
    results = []
    for rows in options.corpora:
        corpus, folder = make(options.data, rows, options.scale)
        measure = Measure(corpus, CASES[rows][0].rows_a_batch)
        for case in CASES[rows]:
            entry: Entry = {"rows": rows, "case": case.name}
            print(f"{rows}: {case.name}", file=sys.stderr, flush=True)
            try:
                orders = orders_of(case, options.data, folder)
                results.append(entry | measure.describe(orders))
            except CaseError as error:
                results.append(entry | {"failed": str(error)})
        of_peers = [e for e in old if e["rows"] == rows and not e["case"].startswith("tokenfeed")]
        results += of_peers
    return results


def mixtures(options: argparse.Namespace) -> Iterator[Entry]:
    """How evenly a small source comes, beside the same rows in a random order."""
    folders = {name: make(options.data, name, options.scale)[1] for name in MIXTURES.corpora}
    weights = {
        f"{folder.relative_to(options.data)}/shards": weight
        for folder, weight in zip(folders.values(), MIXTURES.weights, strict=True)
    }
    large = len(np.load(folders[MIXTURES.corpora[0]] / "lengths.npy"))
    for case in MIXTURES.cases:
        print(f"mixture: {case.name}", file=sys.stderr, flush=True)
        settings = json.dumps(case.settings | {"weights": weights})
        run("order", settings, options.data, 1, options.data / "order")
        order = load(options.data / "order-0.npz")
        groups = (np.arange(order.rows.max() + 1) >= large).astype(np.int64)
        yield mixed(case.name, shares(order, groups, STEPS["4M"]))
    random = full_shuffle(order.tokens, case.rows_a_batch, 0)
    yield mixed(FULL, shares(random, groups[order.rows], STEPS["4M"]))


def met() -> Iterator[Entry]:
    """Record batches that meet again, with and without stages; mean of some seeds."""
    (source,) = sources = (Source(3000, 3000 << 16),)
    weight, window_tokens = Fraction(1), source.tokens // WINDOWS
    one, *_ = stages = [
        Stretch.of_stage(sources, {0: weight}, window_tokens, WINDOWS, source.tokens)
        for _ in range(5)
    ]
    epoch = Stretch.of_epoch(sources, [weight], window_tokens, "continue")
    one = replace(one, num_windows=5 * WINDOWS, tokens=one.tokens * 5)
    for name, stretches in {"epochs": [epoch], "one stage": [one], "five stages": stages}.items():
        orders = [Schedule(sources, tuple(stretches), seed, True) for seed in range(20)]
        found = [met_again(five_readings(order, WINDOWS)) for order in orders]
        yield {
            "rows": "record batches",
            "case": f"five {name}" if name == "epochs" else f"five readings in {name}",
            "met": digits(np.mean(found)),
            "error": digits(np.std(found, ddof=1) / len(found) ** 0.5),
        }


def mixed(name: str, of_steps: np.ndarray) -> Entry:
    part = of_steps[:, 1] / MIXTURES.weights[1]
    least, most = digits(part.min()), digits(part.max())
    return {"rows": "mixture", "case": name, "least": least, "most": most, "steps": len(part)}


def costs(options: argparse.Namespace, old: Entry) -> Iterator[Entry]:
    """Speed, first batch and memory of ours, with one worker; medians of some runs. Without runs,
    those of the last results, with the commit that they are of."""
    if not options.repeats:
        commit = {"commit": old["environment"].get("commit")}
        yield from (commit | each for each in old["results"] if each["rows"].startswith("cost, "))
        return
    for rows, cases in COSTS.items():
        _, folder = make(options.data, rows, options.scale)
        for case in cases:
            print(f"cost, {rows}: {case.name}", file=sys.stderr, flush=True)
            entry = {"rows": f"cost, {rows}", "case": case.name}
            arguments = ("cost", json.dumps(case.settings), folder / "shards")
            runs = [json.loads(run(*arguments)) for _ in range(options.repeats)]
            middle = {name: digits(np.median([each[name] for each in runs])) for name in runs[0]}
            yield entry | middle


def show(results: list[Entry]) -> None:
    """The table a person reads."""
    columns = (*STEPS, "corr. 64k", "1M", "apart", "near", "drift", "padding", "pairs", "chance")
    table = Table("rows", "order", *columns, "batches", "labels")
    for entry in results:
        if "deviation" in entry:
            table.add_row(entry["rows"], entry["case"], *cells(entry))
    console = Console(width=190)
    console.print(table)
    for entry in results:
        if "deviation" not in entry:
            console.print_json(json.dumps(entry), indent=None)


def cells(entry: Entry) -> Iterator[str]:
    repeated = entry.get("again", {})
    figures = [entry["deviation"].get(name) for name in STEPS]
    figures += [entry["correlation"].get(name) for name in ("64k", "1M")]
    figures += [*entry["neighbours"].values(), entry["drift"], entry["padding"]]
    figures += [repeated.get(name) for name in ("pairs", "chance", "batches")]
    for figure in [*figures, entry.get("labels")]:
        yield "" if figure is None else f"{figure:.3g}"


def last_results(options: argparse.Namespace) -> Entry:
    """Those of the same scale, if there are any."""
    path = options.results / "shuffle.json"
    found: Entry = json.loads(path.read_text()) if path.exists() else {"environment": {}}
    fits = found["environment"].get("scale") == options.scale
    return found if fits else {"environment": {}, "results": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--repeats", type=int, default=3, help="of the costs; 0 keeps the last ones"
    )
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--scale", type=float, default=1.0, help="of the data; for a quick try")
    parser.add_argument("--corpora", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--json", action="store_true", help="print the results, not a table")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    old = last_results(options)
    versions = old["environment"].get("peers", {})
    with tempfile.TemporaryDirectory() as name:
        options.data = options.data or Path(name)
        results = compare(options, old["results"])
        results += [*met(), *mixtures(options), *costs(options, old)]
    path = write_result("shuffle", results, options.results, peers=versions, scale=options.scale)
    if options.json:
        print(path.read_text())
        return
    show(results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
