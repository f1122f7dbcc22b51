"""Writes the figures of README.md and docs/ that stand between two marker lines, from the results.

    <!-- benchmark:text_loaders -->
    | rows | loader | ... |
    <!-- end -->

usage: python -m benchmarks.readme            # after a benchmark
       python -m benchmarks.readme --check    # exit 1 if a file says something else
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import tables as gpu_tables
from benchmarks.protocol import RESULTS
from benchmarks.remote import tables as remote_tables
from benchmarks.scenarios import tables as scenarios_tables
from benchmarks.shuffle import tables as shuffle_tables
from benchmarks.stall import simulated
from benchmarks.stall_tools import tables as stall_tables

ROOT = Path(__file__).parents[1]
PAGES = ("benchmarks.md", "mixing.md")
FILES = (ROOT / "README.md", *(ROOT / "docs" / page for page in PAGES))
BLOCK = re.compile(r"(<!-- benchmark:([\w/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

NONE = "–"  # noqa: RUF001

Entry = dict[str, Any]

LEAST_STALL = 0.005
"""Share of the time that a table names by cause."""


IN_FULL = ("documents", "short")
"""Rows that the page shows; the results also have groups of lines and conversations."""
LEFT_OUT = "tokenfeed padded, multiples of 8"


def loader_table(results: list[Entry]) -> list[list[str]]:
    """The loaders on every kind of rows; what could not be measured says why."""
    header = ["rows", "loader", "M tokens/s", "times the best peer", "padding", "first batch"]
    header += ["resume", "GB of memory", "rows lost + repeated"]
    chosen = [entry for entry in results if entry["rows"] in IN_FULL and entry["case"] != LEFT_OUT]
    return [header, *map(loader_row, chosen)]


def mixture_table(results: list[Entry]) -> list[list[str]]:
    """The shares of the tokens that the loaders with mixtures deliver."""
    header = ["loader", "tokens of documents, asked", "delivered", "M tokens/s"]
    return [
        header,
        *(
            [
                entry["case"],
                f"{entry['asked']:.0%}",
                f"{entry['share']:.1%}",
                significant(entry["speed_mtok_s"]["median"]),
            ]
            for entry in results
            if "share" in entry
        ),
    ]


def loader_row(entry: Entry) -> list[str]:
    if "failed" in entry:
        return [entry["rows"], entry["case"], entry["failed"], *[NONE] * 6]
    return [
        entry["rows"],
        entry["case"],
        spread(entry["mtok_s"]),
        significant(entry.get("times_best_other_peer")),
        f"{entry['padding']['median']:.2%}",
        f"{entry['first_batch_s']['median']:.2f} s",
        f"{entry['resume_s']['median']:.2f} s" if "resume_s" in entry else "none",
        f"{entry['peak_memory_mb']['median'] / 1e3:.2f}",
        row_counts(entry["row_counts"]),
    ]


def claims_table(loaders: list[Entry]) -> list[list[str]]:
    """The table of the README: a claim, one number, and the page that has all of them.

    Two figures are of benchmarks that were removed; docs/how/projects.md and docs/benchmarks.md
    have their tables.
    """
    page = "docs/benchmarks.md"
    ranks = _one("ranks", ranks=2, sampler="tokenfeed")
    gpu = {
        name: [
            each["tokens_per_s"]
            for each in _results("gpu-beside-h100")
            if each["trainer"] == name and each["tokens_per_s"]
        ]
        for name in ("tokenfeed", "nanoGPT", "llm.c")
    }
    ours, next_ = (
        significant(_first(loaders, rows="documents", case=name)["mtok_s"]["median"])
        for name in ("tokenfeed padded", "torchdata nodes")
    )
    text = _one("pretokenize", tokenizer="gpt2", corpus="linux-source")
    chat = _results("chat")[:2]
    times = chat[0]["turns_per_s"]["median"] / chat[1]["turns_per_s"]["median"]
    simulated_loops = _one("stall-simulated", case="simulated, all")
    whole, _, resumed = _results("resume")
    differences = [
        abs(one - other)
        for one, other in zip(
            whole["losses"][resumed["first"] - 1 :], resumed["losses"], strict=True
        )
    ]
    return [
        ["claim", "figure", "beside"],
        [
            f"[whole steps in torchtitan]({PROJECTS})",
            "1.12 times the targets/s (tokens that the loss counts)",
            "its own loader",
        ],
        [
            f"[whole steps, rows of unequal length]({page}#trainer)",
            "1.9 times the tokens/s",
            "`transformers.Trainer` in its default order; 1.1 times with `group_by_length`",
        ],
        [
            f"[whole steps on 2 ranks, unequal length]({page}#several-ranks)",
            f"{ranks['of_random']:.1f} times the tokens/s",
            "`DistributedSampler`, padded",
        ],
        [
            f"[GPT-2 124M on an H100]({page}#on-an-h100)",
            f"{min(gpu['tokenfeed']):,} tokens/s",
            f"nanoGPT {min(gpu['nanoGPT']):,}, llm.c {min(gpu['llm.c']):,}",
        ],
        [f"[the loader alone]({page}#loader)", f"{ours} M tokens/s", f"torchdata {next_}, 2 cores"],
        [
            f"[`pretokenize`, gpt2]({page}#pretokenize)",
            f"{text['times_datasets_map']:.0f} times as fast",
            "`datasets.map`, 2 cores, with the same ids",
        ],
        [
            f"[conversations with masks]({page}#conversations)",
            f"{times:.0f} times as fast",
            "`datasets.map` with `apply_chat_template`",
        ],
        [
            "[killed on 2 ranks, resumed on 3](docs/how/checkpoints.md#resume)",
            f"losses within {max(differences):.0e}",
            "a run that was never stopped, fp32",
        ],
        [
            f"[the 95% interval of the stall]({page}#the-stall-meter)",
            f"holds the true stall of {simulated_loops['percent_held']:.1f}% of the loops",
            f"{simulated_loops['loops']:,} simulated loops, whose stall is known",
        ],
    ]


PROJECTS = "docs/how/projects.md#beside-the-projects-own-loaders"


def _results(name: str) -> list[Entry]:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]  # type: ignore[no-any-return]


def _one(name: str, **values: object) -> Entry:
    return _first(_results(name), **values)


def _first(entries: list[Entry], **values: object) -> Entry:
    """Return the first entry with these values."""
    return next(each for each in entries if values.items() <= each.items())


def pretokenize_table(results: list[Entry]) -> list[list[str]]:
    """Every tokenizer on every corpus."""
    header = ["tokenizer", "corpus", "tokenfeed", "map", "times", "engine, one call"]
    header += ["engine, 2 processes", "GB of memory"]
    header += ["bytes a token: tokenfeed / .npy / Parquet zstd / MDS zstd"]
    return [header, *(pretokenize_row(entry) for entry in results)]


def pretokenize_row(entry: Entry) -> list[str]:
    speeds = entry["mb_per_s"]
    others = ("datasets.map", "engine, one call", "engine, 2 processes")
    by_map, one_call, processes = (significant(speeds[name]["median"]) for name in others)
    return [
        entry["tokenizer"],
        f"{entry['corpus']}, {entry['text_mb']:.0f} MB",
        spread(speeds["tokenfeed"]),
        by_map,
        f"{entry['times_datasets_map']:.1f}",
        one_call,
        processes,
        f"{entry['peak_memory_mb'] / 1e3:.2f}",
        " / ".join(f"{size:.2f}" for size in entry["bytes_a_token"].values()),
    ]


def trainer_table(results: list[Entry]) -> list[list[str]]:
    """Every way to train, in every case."""
    header = ["case", "loop", "k tokens/s", "undisturbed", "of the bare loop", "padding"]
    header += ["validation loss", "GB of memory"]
    return [header, *(trainer_row(entry) for entry in results)]


def trainer_row(entry: Entry) -> list[str]:
    best = significant(entry["undisturbed"] / 1e3)
    return [
        entry["case"],
        entry["system"],
        spread(in_thousands(entry["tokens_cpu_s"])),
        best,
        f"{entry['of_bound']:.2f}",
        f"{entry['padding']:.1%}",
        f"{entry['loss']:.3f}",
        f"{entry['peak_memory_mb'] / 1e3:.2f}",
    ]


def scenarios_table(results: list[Entry]) -> list[list[str]]:
    """Both sides of every situation."""
    header = ["situation", "loop", "steps of rows", "k tokens/s", "times", "padding", "stall"]
    return [[*header, "held-out loss"], *(scenario_row(entry) for entry in results)]


def scenario_row(entry: Entry) -> list[str]:
    times = entry.get("times_tokens_s")
    return [
        f"({entry['case']}) {entry['said']}",
        "as it was" if entry["side"] == "before" else "train",
        f"{entry['steps']:,} of {entry['rows'] // entry['steps']}",
        spread(in_thousands(entry["tokens_s"])),
        NONE if times is None else spread(times),
        f"{entry['padding']:.1%}",
        stall_by_cause(entry["stall"]),
        spread(entry["loss"]),
    ]


def stall_by_cause(stall: dict[str, float]) -> str:
    """The sum, and what is worth to be named."""
    named = [f"{cause} {share:.1%}" for cause, share in stall.items() if share >= LEAST_STALL]
    return f"{sum(stall.values()):.1%}" + (f" ({', '.join(named)})" if named else "")


def in_thousands(numbers: dict[str, float]) -> dict[str, float]:
    return {name: number / 1e3 for name, number in numbers.items()}


def row_counts(counts: Entry) -> str:
    """Of one epoch, unbroken; and where it is another number, of one resumed halfway."""
    if "failed" in counts or not counts:
        return "failed" if counts else NONE
    each = {name: f"{count['lost']} + {count['repeated']}" for name, count in counts.items()}
    resumed = each.get("resumed", each["unbroken"])
    return each["unbroken"] + (f"; resumed {resumed}" if resumed != each["unbroken"] else "")


def spread(numbers: dict[str, float]) -> str:
    middle, least, most = (significant(numbers[name]) for name in ("median", "min", "max"))
    return f"{middle} [{least}, {most}]"


def significant(number: float | None) -> str:
    """Three digits, or two decimals of small numbers."""
    if number is None:
        return NONE
    return (
        f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )


def ranks_table(results: list[Entry]) -> list[list[str]]:
    """Speed, padding and idle time of every sampler; the control is not compared."""
    idle = ("clock", "processor", "operations")
    header = ["ranks", "sampler", "real tokens/s", "times random", "padding"]
    header += [f"idle, {name}" for name in idle]
    return [
        header,
        *(
            [
                str(entry["ranks"]),
                entry["sampler"],
                "{median:,.0f} [{min:,.0f}, {max:,.0f}]".format(**entry["tokens_s"]),
                NONE if entry["sampler"] == "control" else f"{entry['of_random']:.2f}",
                f"{entry['padding']:.1%}",
                *(f"{entry['idle'][name]:.1%}" if name in entry["idle"] else NONE for name in idle),
            ]
            for entry in results
            if "sampler" in entry
        ),
    ]


def ratios_table(results: list[Entry], times: str) -> list[list[str]]:
    """Speeds, and the median of the ratios to a peer in the same repeat."""
    return [
        ["compared", "MB/s", "times"],
        *([entry["case"], spread(entry["mb_per_s"]), str(entry[times])] for entry in results),
    ]


def chat_table(results: list[Entry]) -> list[list[str]]:
    """Speed of tokenizing conversations, each beside `datasets.map`."""
    header = ["tokenizer", "tool calls", "tokenfeed, turns/s", "`datasets.map`, turns/s", "ratio"]
    rows = []
    for ours, peer in zip(results[::2], results[1::2], strict=True):
        rates = [entry["turns_per_s"] for entry in (ours, peer)]
        ratio = f"{rates[0]['median'] / rates[1]['median']:.1f}"
        calls = "yes" if ours["tool_calls"] else "no"
        rows.append([ours["tokenizer"], calls, *map(spread, rates), ratio])
    return [header, *rows]


def kinds_table(results: list[Entry]) -> list[list[str]]:
    """The kinds of simulated loops, without the split of the usual kind by its conditions."""
    return [row for row in simulated.table(results) if not (":" in row[0] and row[0][:3] != "new")]


TABLES: dict[str, Callable[[list[Entry]], list[list[str]]]] = {
    "text_loaders": loader_table,
    "text_loaders/front": claims_table,
    "text_loaders/mixture": mixture_table,
    "ranks": ranks_table,
    "families": partial(ratios_table, times="times_datasets_map"),
    "tokens": partial(ratios_table, times="times_zstd"),
    "chat": chat_table,
    "pretokenize": pretokenize_table,
    "trainer": trainer_table,
    "scenarios": scenarios_table,
    "gpu-beside-h100": gpu_tables.beside_table,
    "gpu-h100/train": gpu_tables.train_table,
    "stall-simulated": kinds_table,
    "stall_tools": stall_tables.share_table,
    "stall_tools/cost": stall_tables.cost_table,
    "overhead": stall_tables.overhead_table,
    **remote_tables.TABLES,
    **scenarios_tables.TABLES,
    **shuffle_tables.TABLES,
}


def markdown(rows: list[list[str]]) -> str:
    header, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *body))


def written(block: re.Match[str]) -> str:
    """A block as the results have it."""
    begin, name, end = block.groups()
    path = RESULTS / f"{name.partition('/')[0]}.json"
    if not path.exists():  # not measured yet
        return block[0]
    results = json.loads(path.read_text())["results"]
    return begin + markdown(TABLES[name](results)) + end


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    options = parser.parse_args()
    for file in FILES:
        before = file.read_text(encoding="utf-8")
        after = BLOCK.sub(written, before)
        if options.check and after != before:
            command = "`python -m benchmarks.readme`"
            sys.exit(f"error: {file.name} is not what the results say. Run {command}.")
        if not options.check:
            file.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
