"""The tables of docs/benchmarks.md with figures of a GPU."""

from collections.abc import Callable
from typing import Any

__all__ = ["beside_table", "speed_table", "stall_table", "train_table"]

Entry = dict[str, Any]


def beside_table(results: list[Entry]) -> list[list[str]]:
    """Return the trainers beside each other, with all runs of each."""
    runs: dict[str, list[Entry]] = {}
    for entry in results:
        runs.setdefault(entry["trainer"], []).append(entry)
    slowest = min(entry["tokens_per_s"] for entry in results)
    return [
        ["trainer", "tokens/s, run by run", "times the slowest", "kernels a step", "peak memory"],
        *(
            [
                name,
                ", ".join(f"{entry['tokens_per_s']:,}" for entry in found),
                f"{found[-1]['tokens_per_s'] / slowest:.1f}",
                last("kernels", found, lambda count: f"{count:,.0f}"),
                last("peak_memory_bytes", found, lambda count: f"{count / 1e9:.0f} GB"),
            ]
            for name, found in runs.items()
        ),
    ]


def last(name: str, runs: list[Entry], form: Callable[[float], str]) -> str:
    """Return a figure of the latest run that has it."""
    found = [entry[name] for entry in runs if entry.get(name) is not None]
    return form(found[-1]) if found else "not counted"


def speed_table(results: list[Entry]) -> list[list[str]]:
    """Return a step beside the same step without each of its rewrites, and other steps."""
    rows = [["step", "tokens/s", "milliseconds", "kernels a step", "outcome"]]
    for entry in results:
        speed, tokens = entry.get("tokens_per_s"), entry.get("tokens_per_step")
        kernels = entry.get("kernels")
        rows.append(
            [
                entry["part"].removeprefix("speed").strip() or "now",
                f"{speed:,}" if speed else "",
                f"{1e3 * tokens / speed:.1f}" if speed and tokens else "",
                f"{kernels:,.0f}" if kernels else "",
                entry["outcome"],
            ]
        )
    return rows


def train_table(results: list[Entry]) -> list[list[str]]:
    """Return the runs of `train`."""
    header = ["run", "tokens/s", "MFU", "stall", "interval", "padding", "peak memory"]
    return [header, *(train_row(entry) for entry in results if entry["part"].startswith("train "))]


def train_row(entry: Entry) -> list[str]:
    """Return the row of one run."""
    stall = entry["stall"]
    return [
        entry["part"].removeprefix("train "),
        f"{entry['tokens_per_s']:,}",
        f"{stall['mfu']:.0%}",
        f"{'at least ' * (stall['at_most'] > stall['stall'] + 0.001)}{stall['stall']:.1%}",
        " to ".join(f"{end:.1%}" for end in stall["interval"]),
        f"{entry['padding']:.1%}",
        f"{entry['peak_memory_bytes'] / 1e9:.1f} GB",
    ]


def stall_table(results: list[Entry]) -> list[list[str]]:
    """Return what the meter finds for each fault and loop, beside a full trace."""
    header = ["loop", "stall", "interval", "main cause", "expected", "trace", "at usual speed"]
    header += ["predicted gain", "measured gain"]
    return [header, *(stall_row(entry) for entry in results if "trace_idle" in entry)]


def stall_row(entry: Entry) -> list[str]:
    """Return the row of one loop."""
    interval, gain = entry["interval"], entry.get("measured_gain")
    return [
        entry["part"].removeprefix("stall "),
        f"{entry['stall']:.1%}",
        " to ".join(f"{end:.1%}" for end in interval) if interval else entry["unmeasured"],
        entry["main_cause"] or "none",
        entry["expected_cause"],
        f"{entry['trace_idle']:.1%}",
        f"{entry['trace_idle_at_usual_speed']:.1%}",
        f"{entry['predicted_gain']:.2f}",
        f"{gain:.2f}" if gain else "no such loop",
    ]
