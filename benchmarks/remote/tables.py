"""The tables of docs/benchmarks.md from remote.json; readme.py writes them."""

from typing import Any

__all__ = ["TABLES"]

Entry = dict[str, Any]
Rows = list[list[str]]

NONE = "–"  # noqa: RUF001


def peers(results: list[Entry]) -> Rows:
    """Every loader from the server, with an empty cache each time."""
    header = ["loader", "first batch", "M tokens/s of the epoch", "requests", "MB"]
    header += ["resume", "its requests", "its MB", "wait in a loop: p99", "longest"]
    found = {(entry["loader"], entry["case"]): entry for entry in results}
    loaders = dict.fromkeys(entry["loader"] for entry in results)
    cases = ("cold", "resume", "loop")
    rows = [(name, *(found.get((name, case), {}) for case in cases)) for name in loaders]
    return [header, *(peer_row(*row) for row in rows)]


def peer_row(name: str, cold: Entry, resume: Entry, loop: Entry) -> list[str]:
    return [
        name,
        cold.get("failed") or figure(cold, "first_batch_s", " s"),
        figure(cold, "epoch_mtok_s"),
        *traffic(cold),
        resume.get("failed") or figure(resume, "first_batch_s", " s"),
        *traffic(resume),
        loop.get("failed") or figure(loop, "wait_p99_ms", " ms"),
        figure(loop, "wait_most_ms", " ms"),
    ]


def own(results: list[Entry]) -> Rows:
    """Every case of tokenfeed."""
    header = ["case", "first batch", "M tokens/s in epoch 1", "M tokens/s after epoch 1"]
    header += ["CPU s for 10^9 tokens", "wait in a loop: p99", "longest wait", "requests", "MB"]
    header += ["requests repeated", "same batches as"]
    return [header, *(own_row(entry) for entry in results if entry["loader"] == "tokenfeed")]


def own_row(entry: Entry) -> list[str]:
    return [
        entry["case"],
        figure(entry, "first_batch_s", " s"),
        figure(entry, "epoch_mtok_s"),
        figure(entry, "mtok_s"),
        figure(entry, "cpu_s_per_gtok"),
        figure(entry, "wait_p99_ms", " ms"),
        figure(entry, "wait_most_ms", " ms"),
        *traffic(entry),
        f"{entry.get('retries', 0):,}",
        {True: "the folder", False: "none", None: NONE}[entry.get("same_batches")],
    ]


def figure(entry: Entry, name: str, unit: str = "") -> str:
    """A median, and what it lies between."""
    if name not in entry:
        return NONE
    median, least, most = (short(entry[name][each]) for each in ("median", "min", "max"))
    return f"{median}{unit} [{least}, {most}]"


def short(number: float) -> str:
    return (
        f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )


def traffic(entry: Entry) -> list[str]:
    if "requests" not in entry:
        return [NONE, NONE]
    return [f"{entry['requests']:,}", f"{entry['bytes'] / 1e6:.0f}"]


TABLES = {"remote/peers": peers, "remote/own": own}
"""Name of a block -> its table; what stands before the slash is the file of results."""
