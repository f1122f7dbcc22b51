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

The orders come from plans: the record batches of every window, with the lengths that the shards
have, arranged by the policy. A test compares such an order with the rows that a loader delivers.
The plans and the reference have several seeds. The standard error of a ratio comes from the spread
of the mean squares over the seeds. The control is the reference with other seeds: its ratios show
how far a ratio of 1 is measured from 1. Refuted by a ratio above 1.1 or a wave above 2.

    python -m benchmarks.shuffle.staged && python -m benchmarks.readme    # 4 minutes on 2 cores
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.protocol import RESULTS, write_result
from benchmarks.shuffle.cases import make
from benchmarks.shuffle.corpora import Corpus
from benchmarks.shuffle.metrics import Order, by_rows, shares
from tokenfeed import Fixed, Packed, Padded, Stage
from tokenfeed.pipeline.arithmetic import offsets_of, ranges
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.format.shard import ShardReader
from tokenfeed.pipeline.planning.batching import Spans, plan_window
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.policies import Batching

__all__ = ["POLICIES", "Measured", "drawn", "expected", "planned", "rows_of_batches"]

CORPORA = ("documents by source", "documents by date")
FIRST, LAST, PART = (0.7, 0.3), (0.2, 0.8), 60_000_000
"""Weights before and after the change, and tokens of each of the three parts."""
PARTS = ("before", "in", "after")
STEPS = {"64k": 1 << 16, "0.5M": 1 << 19, "1M": 1 << 20}
WAVE_STEP = 1 << 22
POLICIES: dict[str, Batching] = {
    "tokenfeed padded": Padded(16_384),
    "tokenfeed packed": Packed(2048, 8),
    "tokenfeed fixed": Fixed(27),
}
CONTROL = "rows at random"

Entry = dict[str, Any]


def expected(tokens: np.ndarray, part: int) -> np.ndarray:
    """Share of the first corpus after so many tokens of the run."""
    change = np.clip((tokens - part) / part, 0, 1)
    return FIRST[0] + (LAST[0] - FIRST[0]) * change


def drawn(corpora: list[Corpus], part: int, seed: int) -> Order:
    """Rows at random, at the shares of the list; rows of the second corpus follow the first's."""
    rng = np.random.default_rng(seed)
    first, second = (1 / float(corpus.lengths.mean()) for corpus in corpora)  # rows a token
    tokens = np.linspace(0, 3 * part, 100_001)
    share = expected(tokens, part)
    rows_so_far = offsets_of(np.diff(tokens) * (share * first + (1 - share) * second)[:-1])
    count = int(rows_so_far[-1] * 1.05)
    share = expected(np.interp(np.arange(count), rows_so_far, tokens), part)
    is_second = rng.random(count) >= share * first / (share * first + (1 - share) * second)
    rows = np.empty(count, np.int64)
    for number, corpus in enumerate(corpora):
        own = is_second == number
        order = rng.permutation(len(corpus.lengths))
        rows[own] = np.resize(order, own.sum()) + number * len(corpora[0].lengths)
    lengths = np.concatenate([corpus.lengths for corpus in corpora])
    stop = int(np.searchsorted(np.cumsum(lengths[rows]), 3 * part))
    return by_rows(rows[:stop], lengths, 27)


def rows_of_batches(sources: tuple[OpenedSplit, ...]) -> np.ndarray:
    """Rows of each record batch, counted over all sources, shape (K,), int64."""
    return np.array(
        [
            len(reader.read(number)[0])
            for source in sources
            for info in source.split.shards
            for reader in [ShardReader.open(source.store, source.manifest, info)]
            for number in range(info.batches)
        ]
    )


def planned(plan: Plan, lengths: np.ndarray, rows: np.ndarray) -> Order:
    """What a loader with one rank delivers in an epoch of a plan, without padding.

    `lengths` are the tokens of each row, and `rows` the rows of each record batch, over all
    sources.
    """
    parts, sizes = [], []
    begins = offsets_of(rows)
    for window in range(plan.num_windows):
        batches = plan.order.window(0, window)
        numbers = ranges(begins[batches], rows[batches])
        batching, draw = plan.batching_of(window), plan.order.draw(0, window)
        of_rows = lengths[numbers]
        made = plan_window(
            of_rows,
            batching,
            step_size=plan.micro_batches_per_step,
            draw=draw,
            parts=plan.parts(0, window, numbers),
        )
        spans = Spans.from_plan(made, numbers, of_rows)
        whole = np.ones(len(numbers), np.bool_) if spans.starts is None else spans.starts == 0
        parts.append((spans.numbers, spans.lengths.astype(np.int64), whole))
        sizes.append(np.diff(made.batch_piece_offsets))
    numbers, tokens, whole = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Order(numbers, tokens, whole, offsets_of(np.concatenate(sizes)), int(tokens.sum()))


class Measured:
    """Mean squares of the distances of some orders from the list, one order for each seed."""

    def __init__(self, corpora: list[Corpus], part: int) -> None:
        first, second = (corpus.groups for corpus in corpora)
        self._groups = np.concatenate([first, second + first.max() + 1])
        self._part = part
        self._squares: dict[tuple[str, str], list[float]] = {}
        self._waves: list[float] = []

    def add(self, order: Order) -> None:
        """Add the order of a seed."""
        for name, step in STEPS.items():
            squares = self._distances(order, step) ** 2
            for number, part in enumerate(PARTS):
                steps = slice(number * self._part // step, (number + 1) * self._part // step)
                self._squares.setdefault((part, name), []).append(float(squares[steps].mean()))
        apart = self._distances(order, min(WAVE_STEP, self._part // 8))
        half = apart.shape[1] // 2
        self._waves.append(float(np.abs(apart[:, :half].sum(1)).max()))

    def compared(self, reference: "Measured") -> Entry:
        """Ratios before, in and after the change, each with its standard error, and the wave."""
        found: Entry = {part: {} for part in PARTS}
        for (part, name), squares in self._squares.items():
            found[part][name] = ratio(squares, reference._squares[part, name])
        wave = np.mean(self._waves) / np.mean(reference._waves)
        return found | {"wave": float(f"{wave:.3g}")}

    def _distances(self, order: Order, step: int) -> np.ndarray:
        """Share of each group in each step, less its share in the list, (steps, groups)."""
        found = shares(order, self._groups, step)
        kinds = found.shape[1] // 2
        first = expected((np.arange(len(found)) + 0.5) * step, self._part)
        due = np.repeat(np.stack([first, 1 - first], axis=1) / kinds, kinds, axis=1)
        return np.asarray(found - due)


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Root of the ratio of the means of two samples, and its standard error."""
    value = np.sqrt(np.mean(ours) / np.mean(theirs))
    errors = [np.std(each, ddof=1) / np.mean(each) / len(each) ** 0.5 for each in (ours, theirs)]
    error = value * np.hypot(*errors) / 2  # of a root: half of the relative error
    return {"ratio": round(float(value), 3), "error": round(float(error), 3)}


def measured(options: argparse.Namespace) -> Iterator[Entry]:
    made = [make(options.data, name, options.scale) for name in CORPORA]
    corpora, folders = [corpus for corpus, _ in made], [folder / "shards" for _, folder in made]
    part, seeds = int(PART * options.scale), options.seeds
    first, last = (dict(zip(folders, weights, strict=True)) for weights in (FIRST, LAST))
    stages = [
        Stage(first, until_tokens=part),
        Stage(first, to=last, until_tokens=2 * part),
        Stage(last, until_tokens=3 * part),
    ]
    sources = open_splits(folders, "train")
    lengths = np.concatenate([corpus.lengths for corpus in corpora])
    rows = rows_of_batches(sources)
    plan_of = partial(
        Plan.from_splits, sources, stages, split="train", micro_batches_per_step=1, shuffle=True
    )
    reference = Measured(corpora, part)
    for seed in track(range(seeds), "reference"):
        reference.add(drawn(corpora, part, seed))
    for name in (*POLICIES, CONTROL):
        ours = Measured(corpora, part)
        for seed in track(range(seeds), name):
            if name == CONTROL:
                ours.add(drawn(corpora, part, seeds + seed))
            else:
                plan = plan_of(POLICIES[name], window_tokens=None, seed=seed)
                ours.add(planned(plan, lengths, rows))
        yield {"case": name, **ours.compared(reference)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--scale", type=float, default=1.0, help="of the data; for a quick try")
    parser.add_argument("--seeds", type=int, default=48)
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
