"""The tables of docs/mixing.md, from shuffle.json and learning.json; readme.py writes them."""

from typing import Any

__all__ = ["TABLES"]

Entry = dict[str, Any]
Rows = list[list[str]]

NONE = "–"  # noqa: RUF001
LARGE = ("documents by source", "documents by length", "short rows by source")
"""Corpora that the page shows; the results also have documents by date, like those by source."""
LEFT_OUT = ("window_tokens 4M", "py1br", "fixed", ", 16 nodes")
"""Orders that only the results have."""
SMALL = ("2,000 documents", "two classes")
FEW = ("tokenfeed", "full shuffle", "transformers")
"""Whose large corpora the page shows beside the small sets."""
STEPS = ("64k", "1M", "4M")


def mixing(results: list[Entry]) -> Rows:
    """Every order of the large corpora."""
    header = ["corpus", "order", *(f"{step} tokens" for step in STEPS), "correlation, 64k and 1M"]
    header += ["within 1/1000", "padding"]
    chosen = [
        entry
        for entry in results
        if entry["rows"] in LARGE and not any(part in entry["case"] for part in LEFT_OUT)
    ]
    return [header, *(mixing_row(entry) for entry in chosen)]


def mixing_row(entry: Entry) -> list[str]:
    if "failed" in entry:
        return [entry["rows"], entry["case"], entry["failed"], *[NONE] * 6]
    correlation = [signed(entry["correlation"].get(step)) for step in ("64k", "1M")]
    return [
        entry["rows"],
        entry["case"],
        *(short(entry["deviation"].get(step)) for step in STEPS),
        ", ".join(correlation),
        short(entry["neighbours"]["near"]),
        f"{entry['padding']:.1%}",
    ]


def again(results: list[Entry]) -> Rows:
    """What comes again in the next epoch, and labels where length goes with them."""
    header = ["set", "order", "pairs again", "by chance", "whole batches again"]
    header += ["variance of labels", "padding"]
    measured = [
        entry
        for entry in results
        if entry["rows"] in SMALL or ("again" in entry and entry["case"].startswith(FEW))
    ]
    return [header, *(again_row(entry) for entry in measured)]


def again_row(entry: Entry) -> list[str]:
    if "failed" in entry:
        return [entry["rows"], entry["case"], entry["failed"], *[NONE] * 4]
    repeated = entry["again"]
    return [
        entry["rows"],
        entry["case"],
        percent(repeated["pairs"]),
        percent(repeated["chance"]),
        percent(repeated["batches"]),
        short(entry.get("labels")),
        f"{entry['padding']:.1%}",
    ]


def mixture(results: list[Entry]) -> Rows:
    """How evenly a small source comes."""
    chosen = [entry for entry in results if entry["rows"] == "mixture"]
    rows = [[entry["case"], short(entry["least"]), short(entry["most"])] for entry in chosen]
    return [["order", "least", "most"], *rows]


def costs(results: list[Entry]) -> Rows:
    """What ours take."""
    header = ["corpus", "order", "deviation at 1M", "M tokens/s", "first batch", "MB of memory"]
    spread = {(entry["rows"], entry["case"]): entry.get("deviation", {}) for entry in results}
    rows = []
    for entry in results:
        corpus = entry["rows"].removeprefix("cost, ")
        if corpus == entry["rows"]:
            continue
        of_order = spread.get((corpus, entry["case"]), {})
        row = [corpus, entry["case"], short(of_order.get("1M"))]
        if "failed" in entry:
            rows.append([*row, entry["failed"], NONE, NONE])
            continue
        row += [f"{entry['mtok_s']:.0f}", f"{entry['first_batch_s']:.2f} s"]
        rows.append([*row, f"{entry['memory_mb']:.0f}"])
    return [header, *rows]


def short(number: float | None) -> str:
    return NONE if number is None else f"{number:.0f}" if number >= 100 else f"{number:.2g}"


def signed(number: float | None) -> str:
    return NONE if number is None else f"{number:.2f}"


def percent(part: float) -> str:
    return f"{part:.3%}" if part < 0.001 else f"{part:.2%}" if part < 0.1 else f"{part:.0%}"


TABLES = {
    "shuffle/mixing": mixing,
    "shuffle/again": again,
    "shuffle/mixture": mixture,
    "shuffle/costs": costs,
}
"""Name of a block -> its table; what stands before the slash is the file of results."""
