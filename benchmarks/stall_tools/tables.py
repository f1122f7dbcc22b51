"""The tables of docs/benchmarks.md with `tokenfeed stall` beside TraceML."""

from typing import Any

from benchmarks.protocol import summary

__all__ = ["cost_table", "overhead_table", "share_table"]

Entry = dict[str, Any]

NAMES = {"tokenfeed": "`tokenfeed stall`", "traceml": "TraceML"}


def share_table(results: list[Entry]) -> list[list[str]]:
    """Return verdict and share of both tools beside the stopwatch in the same run."""
    header = ["fault", "tool", "verdict", "its share", "stopwatch", "lines changed + indented"]
    rows = []
    runs = [entry for entry in results if "fault" in entry]
    for fault, tool in dict.fromkeys((entry["fault"], entry["tool"]) for entry in runs):
        found = next(entry for entry in runs if (entry["fault"], entry["tool"]) == (fault, tool))
        if tool != "python":
            share = "not measured" if found["share"] is None else f"{found['share']:.1%}"
            new, indented = found["lines_changed"]
            changes = f"{new} + {indented}"
            rows.append([fault, NAMES[tool], found["verdict"], share, f"{found['truth']:.1%}"])
            rows[-1].append(changes if new else "0")
    return [header, *rows]


def cost_table(results: list[Entry]) -> list[list[str]]:
    """Return what each tool takes more than plain `python`, over pairs of runs side by side."""
    header = ["tool", "pairs", "seconds more", "CPU seconds more"]
    rows = []
    runs = [entry for entry in results if "fault" in entry]
    for tool in NAMES:
        row = [NAMES[tool]]
        for what in ("seconds", "cpu_seconds"):
            pairs = zip(
                (entry[what] for entry in runs if entry["tool"] == "python"),
                (entry[what] for entry in runs if entry["tool"] == tool),
                strict=True,
            )
            more = [used - plain for plain, used in pairs]
            cell = "{median:.1f} [{min:.1f}, {max:.1f}]".format(**summary(more))
            row += [cell] if len(row) > 1 else [str(len(more)), cell]
        rows.append(row)
    return [header, *rows]


def overhead_table(results: list[Entry]) -> list[list[str]]:
    """Return what the hooks cost in steps of some lengths."""
    header = ["a step of", "CPU time of the hooks", "of the step", "of a core, other threads"]
    form = "{median:g} [{min:g}, {max:g}]"
    return [
        header,
        *(
            [
                f"{entry['step_ms']} ms",
                form.format(**entry["microseconds_a_step"]) + " µs",
                form.format(**entry["percent_of_a_step"]) + " %",
                form.format(**entry["percent_of_a_core_in_other_threads"]) + " %",
            ]
            for entry in results
            if "step_ms" in entry
        ),
    ]
