"""How many real tokens per second reach the training loop as int64 CPU batches, beside the peers?

README.md in this folder describes the tasks, the columns and how to add a loader.

    python -m benchmarks.text_loaders --peer-python peers/bin/python [--rows short] [--only NAME]
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.readme import loader_table, markdown, mixture_table
from benchmarks.text_loaders.case import OURS, own_folder
from benchmarks.text_loaders.data import KINDS, make_data
from benchmarks.text_loaders.peers import MIXED, PEERS
from benchmarks.text_loaders.plot import plot
from benchmarks.text_loaders.processes import CaseError, bytes_in, find_peers, prepare, run_case

BOUND, MIXTURE = "bound: memmap gather", "mixture"
MEASURED = ("mtok_s", "cpu_s_per_mtok", "padding", "first_batch_s", "resume_s", "peak_memory_mb")

Entry = dict[str, Any]


def measure(
    python: str, loader: str, kind: str, options: argparse.Namespace, *, resumes: bool
) -> Entry:
    """One repeat: speed, then resuming where the loader can."""
    settings = ("--workers", options.workers, "--seconds", options.seconds)
    own = own_folder(options.data, kind, loader)
    (own / "state.pickle").unlink(missing_ok=True)
    result = run_case(python, "speed", loader, kind, options.data, *settings)
    if resumes and (own / "state.pickle").exists():
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


def measure_mixture(homes: dict[str, str], options: argparse.Namespace) -> list[Entry]:
    """The shares that mixtures deliver, of the loaders that have mixtures."""
    results = []
    for loader in options.only:
        if loader not in homes or not (loader in OURS or PEERS[loader].mix):
            continue
        entry: Entry = {"rows": "mixture", "case": loader, "workers": options.workers}
        try:
            for kind in MIXED:
                prepare(homes[loader], loader, kind, options.data)
            settings = ("--workers", options.workers, "--seconds", options.seconds)
            runs = [
                run_case(homes[loader], "mix", loader, "mixture", options.data, *settings)
                for _ in range(options.repeats)
            ]
            entry |= {"asked": MIXED["documents"], "share": runs[0]["share"]}
            entry["speed_mtok_s"] = summary([each["mtok_s"] for each in runs], digits=4)
        except CaseError as error:
            entry["failed"] = f"failed: {error}"
        results.append(entry)
    return results


def disk_bytes(loader: str, kind: str, data: Path) -> int:
    """What the loader reads, and what it wrote meanwhile."""
    folder = data / kind
    if loader in OURS:
        return bytes_in(folder / "shards")
    own = bytes_in(own_folder(data, kind, loader))
    reads_the_arrays = PEERS[loader].write.__name__ == "write_nothing"
    return own + ((folder / "ids.npy").stat().st_size if reads_the_arrays else 0)


def ratios(runs: dict[str, list[Entry]], loader: str) -> Entry:
    """Times the best peer: the median of the ratios within a repeat."""
    peers = [name for name in runs if name in PEERS and name not in (BOUND, loader)]
    found: Entry = {}
    speeds = {name: [run["mtok_s"] for run in results] for name, results in runs.items()}
    if peers:
        best = map(max, zip(*(speeds[name] for name in peers), strict=False))
        pairs = zip(speeds[loader], best, strict=False)
        found["times_best_other_peer"] = round(statistics.median(a / b for a, b in pairs), 3)
    return found


def compare(homes: dict[str, str], options: argparse.Namespace) -> list[Entry]:
    """All cases, repeats interleaved so that a slow minute of the machine hits them all."""
    kinds = [kind for kind in KINDS if kind in options.rows]
    cases = [
        (kind, loader)
        for kind in kinds
        for loader in options.only
        if kind != "chat" or loader in OURS or PEERS[loader].whole_rows
    ]
    runs: dict[str, dict[str, list[Entry]]] = {kind: {} for kind in kinds}
    failed = {case: "not installed" for case in cases if case[1] not in homes}
    for repeat in range(options.repeats):
        for kind, loader in cases:
            if (kind, loader) in failed:
                continue
            print(f"repeat {repeat + 1}: {kind}, {loader}", file=sys.stderr, flush=True)
            try:
                prepare(homes[loader], loader, kind, options.data)
                resumes = not (options.quick and repeat)
                result = measure(homes[loader], loader, kind, options, resumes=resumes)
                runs[kind].setdefault(loader, []).append(result)
            except CaseError as error:
                failed[kind, loader] = f"failed: {error}"
                runs[kind].pop(loader, None)
    counted = {}
    for loader in options.only:
        if kinds and loader in homes and (loader in OURS or PEERS[loader].whole_rows):
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
    found = {field: [run[field] for run in results if field in run] for field in MEASURED}
    medians = {field: summary(values, digits=4) for field, values in found.items() if values}
    return {"tokens": results[0]["tokens"], **medians, **ratios(runs, loader)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    every = [*OURS, *PEERS]
    parser.add_argument("--peer-python", help="an interpreter that has the peers")
    parser.add_argument("--quick", action="store_true", help="25 minutes: less of all by a half")
    parser.add_argument("--repeats", type=int, help="default: 3; quick: 2")
    parser.add_argument("--seconds", type=float, help="default: 4; quick: 2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--scale", type=float, help="of the data. Default: 1; quick: 0.5")
    tasks = [*KINDS, MIXTURE]
    parser.add_argument("--rows", nargs="+", default=tasks, choices=tasks)
    parser.add_argument("--only", nargs="+", default=every, choices=every, metavar="LOADER")
    parser.add_argument("--add", action="store_true", help="keep other rows of the results file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    sizes = {"repeats": (3, 2), "seconds": (4.0, 2.0), "scale": (1.0, 0.5)}
    for name, (usual, quick) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    homes, versions = find_peers([sys.executable, *filter(None, [options.peer_python])])
    with tempfile.TemporaryDirectory() as name:
        options.data = options.data or Path(name)
        options.scale = make_data(options.data, options.scale)
        results = compare(homes, options)
        if MIXTURE in options.rows:
            results += measure_mixture(homes, options)
    print(markdown(loader_table(results)) + markdown(mixture_table(results)))
    written = options.results / "text_loaders.json"
    if options.add and written.exists():
        former = json.loads(written.read_text())["results"]
        results = [each for each in former if each["rows"] not in options.rows] + results
    path = write_result(
        "text_loaders", results, options.results, peers=versions, scale=options.scale
    )
    print(f"written to {path} and {plot(path)}")


if __name__ == "__main__":
    main()
