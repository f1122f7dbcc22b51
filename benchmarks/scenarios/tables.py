"""The tables of benchmarks/scenarios/ in docs/benchmarks.md: what each optimization gains."""

import itertools
import json
from typing import Any

from benchmarks.protocol import RESULTS

__all__ = ["TABLES"]

Entry = dict[str, Any]
Rows = list[list[str]]

NONE = "–"  # noqa: RUF001


def optimizations_table(results: list[Entry]) -> Rows:
    """Return a row for each optimization: its figure before and after."""
    rows = [["optimization", "figure", "before", "after", "times"]]
    situations = json.loads((RESULTS / "scenarios.json").read_text())["results"]
    for before, after in zip(situations[::2], situations[1::2], strict=True):
        times = after["times_tokens_s"]["median"]
        figures = [_digits(entry["tokens_s"], 0) for entry in (before, after)]
        said = f"({before['case']}) {before['said']}"
        rows.append([said, "tokens/s, train on a CPU", *figures, f"{times:.1f}"])
    before, after = _of(results, "idle")
    said = "(f) tokenizing in the loop, pageable copies, `.item()`"
    shares = [_percent(entry["idle"]) for entry in (before, after)]
    rows.append([said, "idle share, simulated device of 50 ms a step", *shares, NONE])
    rows.append([said, "ms a batch", *_change(before, after, "ms_a_batch")])
    rungs = _of(results, "ladder")
    for rung, (one, next_) in zip(rungs[1:], itertools.pairwise(rungs), strict=True):
        changes = _change(one, next_, "epoch_s")
        rows.append([f"(g) {rung['rung']}", "seconds an epoch, on a CPU", *changes])
    tokenizes, shards = (_slowest(results, name) for name in _loaders(results))
    shares = [_percent(entry["idle"]) for entry in (tokenizes, shards)]
    rows.append(["(h) shards, 1 worker", "idle share, simulated device", *shares, NONE])
    plain, recomputed = _of(results, "memory")
    sizes = [f"{entry['gb_by_rows']['64']:.2f}" for entry in (plain, recomputed)]
    rows.append(["`--recompute`, 64 rows of 128", "GB, counted", *sizes, NONE])
    by_format = {entry["precision"]: entry for entry in _of(results, "precision")}
    for name in ("bf16", "fp16"):
        sizes = [f"{by_format[each]['gb']:.2f}" for each in ("fp32", name)]
        rows.append([f"`--precision {name}`, 32 rows of 128", "GB, counted", *sizes, NONE])
    parts = _of(results, "accumulation")
    sizes = [f"{parts[at]['gb']:.2f}" for at in (0, -1)]
    rows.append(["4 micro-batches of 16 rows", "GB, counted", *sizes, NONE])
    saves = {(entry["side"], entry["save_every"]): entry for entry in _of(results, "saving")}
    for every in sorted({every for _, every in saves}):
        said = f"saving in the background, every {every} steps"
        pair = saves["before", every], saves["after", every]
        figure = "seconds blocked per 1,000 steps"
        rows.append([said, figure, *_change(*pair, "blocked_s")])
    return rows


def memory_table(results: list[Entry]) -> Rows:
    """Return counted gigabytes by rows of a batch."""
    entries = _of(results, "memory")
    rows = [["`--recompute`", *(f"{rows} rows" for rows in entries[0]["gb_by_rows"])]]
    for entry in entries:
        sizes = [f"{size:.2f}" for size in entry["gb_by_rows"].values()]
        rows.append(["yes" if entry["recompute"] else "no", *sizes])
    return rows


def cards_table(results: list[Entry]) -> Rows:
    """Return the largest batch by memory of the card."""
    entries = _of(results, "memory")
    rows = [["`--recompute`", *(f"{card} GB" for card in entries[0]["largest_batch_by_card_gb"])]]
    for entry in entries:
        batches = [f"{rows:,}" for rows in entry["largest_batch_by_card_gb"].values()]
        rows.append(["yes" if entry["recompute"] else "no", *batches])
    return rows


def _of(results: list[Entry], case: str) -> list[Entry]:
    return [entry for entry in results if entry["case"] == case]


def _loaders(results: list[Entry]) -> list[str]:
    return list(dict.fromkeys(entry["loader"] for entry in _of(results, "workers")))


def _slowest(results: list[Entry], loader: str) -> Entry:
    """Return the entry with one worker whose device was idle most."""
    entries = [e for e in _of(results, "workers") if e["loader"] == loader and e["workers"] == 1]
    return max(entries, key=lambda entry: _median(entry["idle"]))


def _change(before: Entry, after: Entry, name: str) -> list[str]:
    """Return a figure before and after, and how many times smaller it is."""
    values = [_median(entry[name]) for entry in (before, after)]
    times = f"{values[0] / values[1]:.1f}" if values[1] else NONE
    return [*(_digits(entry[name], 1) for entry in (before, after)), times]


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


def _digits(value: Any, digits: int) -> str:
    """Return a number, or the median [least, most] of several."""
    if not isinstance(value, dict):
        return f"{value:,.{digits}f}"
    middle, least, most = (f"{value[name]:,.{digits}f}" for name in ("median", "min", "max"))
    return f"{middle} [{least}, {most}]"


def _percent(value: Any) -> str:
    return f"{_median(value):.1%}"


TABLES = {
    "optimizations": optimizations_table,
    "optimizations/memory": memory_table,
    "optimizations/cards": cards_table,
}
