"""How many real tokens per second reach the training loop as int64 CPU batches, beside the peers?

Rows: the standard library's own source (vocabulary 32,768), by line (`short`, about 13 tokens), by
20 lines (`medium`, about 180) and by file (`documents`, about 4,500). tokenfeed reads its
compressed shards, padded (budget 16,384; also lengths rounded up to 8) and packed into rows of
2,048. Every peer does what its users do: random batches of 256 short or 32 medium rows, padded to
the longest; documents cut beforehand into rows of 2,048, 8 a batch, so without any padding.
Peers that write row by row get an eighth of the short rows. The bound is one gather a batch from
an uncompressed memory map of rows of one length, without workers.

Measured beside speed: padding; first batch; time from nothing to the first batch after a state
saved in the middle of an epoch; memory (PSS of all processes, page cache they map included); disk,
second copies included; and the rows that one epoch loses or repeats, unbroken and resumed.
One process per measurement, repeats interleaved, page cache warm; ratios are within a repeat.
Refuted by a peer that shuffles as much and delivers more, or by a row lost or repeated.

Peers live where they are installed: the interpreter at hand, else --peer-python.

    pip install torch datasets mosaicml-streaming litdata webdataset torchdata grain array-record
    python -m benchmarks.text_loaders --peer-python peers/bin/python [--repeats 3] [--data FOLDER]
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.text_loaders.case import OURS, own_folder
from benchmarks.text_loaders.data import KINDS, make_data
from benchmarks.text_loaders.peers import PEERS
from benchmarks.text_loaders.plot import plot
from benchmarks.text_loaders.processes import CaseError, bytes_in, find_peers, prepare, run_case

BOUND = "bound: memmap gather"
MEASURED = ("mtok_s", "padding", "first_batch_s", "resume_s", "peak_memory_mb")

Entry = dict[str, Any]


def measure(python: str, loader: str, kind: str, options: argparse.Namespace) -> Entry:
    """One repeat: speed, then resuming where the loader can."""
    settings = ("--workers", options.workers, "--seconds", options.seconds)
    own = own_folder(options.data, kind, loader)
    (own / "state.pickle").unlink(missing_ok=True)
    result = run_case(python, "speed", loader, kind, options.data, *settings)
    if (own / "state.pickle").exists():
        resumed = run_case(python, "resume", loader, kind, options.data, *settings)
        result["resume_s"] = resumed["resume_s"]
    return result


def count_rows(python: str, loader: str, options: argparse.Namespace) -> Entry:
    """Rows lost and repeated in one epoch of the small set, unbroken and resumed halfway."""

    def check(part: str) -> Entry:
        settings = ("--workers", options.workers, "--part", part)
        result = run_case(python, "check", loader, "check", options.data, *settings)
        return {name: result[name] for name in ("rows", "lost", "repeated")}

    prepare(python, loader, "check", options.data)
    counts = {"unbroken": check("whole")}
    own = own_folder(options.data, "*", loader).relative_to(options.data)
    if list(options.data.glob(f"{own}/state.pickle")):
        check("first")
        counts["resumed"] = check("rest")
    return counts


def disk_bytes(loader: str, kind: str, data: Path) -> int:
    """What the loader reads, and what it wrote meanwhile."""
    folder = data / kind
    if loader in OURS:
        return bytes_in(folder / "shards")
    own = bytes_in(own_folder(data, kind, loader))
    reads_the_arrays = PEERS[loader].write.__name__ == "write_nothing"
    return own + ((folder / "ids.npy").stat().st_size if reads_the_arrays else 0)


def ratios(runs: dict[str, list[Entry]], loader: str) -> Entry:
    """Times the best peer, and part of the bound: medians of the ratios within a repeat."""
    peers = [name for name in runs if name in PEERS and name not in (BOUND, loader)]
    found: Entry = {}
    speeds = {name: [run["mtok_s"] for run in results] for name, results in runs.items()}
    if peers:
        best = map(max, zip(*(speeds[name] for name in peers), strict=False))
        pairs = zip(speeds[loader], best, strict=False)
        found["times_best_other_peer"] = round(statistics.median(a / b for a, b in pairs), 3)
    if BOUND in runs:
        pairs = zip(speeds[loader], speeds[BOUND], strict=False)
        found["part_of_bound"] = round(statistics.median(a / b for a, b in pairs), 4)
    return found


def compare(homes: dict[str, str], options: argparse.Namespace) -> list[Entry]:
    """All cases, repeats interleaved so that a slow minute of the machine hits them all."""
    cases = [(kind, loader) for kind in options.kinds for loader in options.loaders]
    runs: dict[str, dict[str, list[Entry]]] = {kind: {} for kind in options.kinds}
    failed = {case: "not installed" for case in cases if case[1] not in homes}
    for repeat in range(options.repeats):
        for kind, loader in cases:
            if (kind, loader) in failed:
                continue
            print(f"repeat {repeat + 1}: {kind}, {loader}", file=sys.stderr, flush=True)
            try:
                prepare(homes[loader], loader, kind, options.data)
                result = measure(homes[loader], loader, kind, options)
                runs[kind].setdefault(loader, []).append(result)
            except CaseError as error:
                failed[kind, loader] = f"failed: {error}"
                runs[kind].pop(loader, None)
    counted = {}
    for loader in options.loaders:
        if loader in homes and loader != BOUND:
            print(f"counting rows: {loader}", file=sys.stderr, flush=True)
            try:
                counted[loader] = count_rows(homes[loader], loader, options)
            except CaseError as error:
                counted[loader] = {"failed": str(error)}
    results = []
    for kind, loader in cases:
        entry: Entry = {"rows": kind, "case": loader, "workers": options.workers}
        entry["order"] = PEERS[loader].order if loader in PEERS else "rows of a random window"
        if (kind, loader) in failed:
            entry["failed"] = failed[kind, loader]
        else:
            entry |= describe(runs[kind], loader)
            size = disk_bytes(loader, kind, options.data) / runs[kind][loader][0]["tokens"]
            entry["disk_bytes_per_token"] = round(size, 3)
            entry["row_counts"] = counted.get(loader, {})
        results.append(entry)
    return results


def describe(runs: dict[str, list[Entry]], loader: str) -> Entry:
    """Medians of the repeats."""
    results = runs[loader]
    medians = {
        field: summary([run[field] for run in results], digits=4)
        for field in MEASURED
        if all(field in run for run in results)
    }
    return {"tokens": results[0]["tokens"], **medians, **ratios(runs, loader)}


def show(results: list[Entry]) -> None:
    """The table a person reads."""
    columns = ("M tokens/s", "least, most", "x best", "padding", "first", "resume", "MB", "B/tok")
    table = Table("rows", "loader", *columns, "lost+repeated")
    for entry in results:
        if "failed" in entry:
            table.add_row(entry["rows"], entry["case"], entry["failed"].split(":")[0])
            continue
        speed, resumed = entry["mtok_s"], entry.get("resume_s")
        counts = entry["row_counts"].values()
        table.add_row(
            entry["rows"],
            entry["case"],
            f"{speed['median']:.2f}",
            f"{speed['min']:.2f}, {speed['max']:.2f}",
            f"{entry['times_best_other_peer']:.2f}" if "times_best_other_peer" in entry else "",
            f"{entry['padding']['median']:.2%}",
            f"{entry['first_batch_s']['median']:.2f} s",
            f"{resumed['median']:.2f} s" if resumed else "none",
            f"{entry['peak_memory_mb']['median']:.0f}",
            f"{entry['disk_bytes_per_token']:.2f}",
            ", ".join(str(each["lost"] + each["repeated"]) for each in counts)
            if "failed" not in entry["row_counts"]
            else "failed",
        )
    console = Console(width=150)
    console.print(table)
    for entry in results:
        if "failed" in entry:
            console.print(escape(f"{entry['rows']}, {entry['case']}: {entry['failed']}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    every = [*OURS, *PEERS]
    parser.add_argument("--peer-python", help="an interpreter that has the peers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--scale", type=float, default=1.0, help="of the data; for a quick try")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--loaders", nargs="+", default=every, choices=every, metavar="NAME")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    homes, versions = find_peers([sys.executable, *filter(None, [options.peer_python])])
    with tempfile.TemporaryDirectory() as name:
        options.data = options.data or Path(name)
        options.scale = make_data(options.data, options.scale)
        results = compare(homes, options)
    show(results)
    path = write_result(
        "text_loaders", results, options.results, peers=versions, scale=options.scale
    )
    print(f"written to {path} and {plot(path)}")


if __name__ == "__main__":
    main()
