"""How fast does torchtitan get its batches from its own data layer, and from this loader?

Both read the same documents, which `pretokenize` has tokenized: lines of about 13 tokens, groups of
20 lines (180) and files (4,500). torchtitan reads them as its README shows for tokens in a memory
map, packed by `ConcatThenSplitPackingConfig` and by `FirstFitPackingConfig`; tokenfeed reads its
shards through `tokenfeed.integrations.torchtitan`, with the same settings of a batch: 8 rows of
2,048 tokens. A label is a token that the model learns to predict; a document of n tokens has n - 1.

Measured, each system in a process of its own, repeats interleaved: labels per second, first batch,
slots of a batch without a label (padding and ends of documents), labels that one epoch does not
deliver, and the time to the first batch of a state of 1 rank on 1, 2 and 4 ranks. torchtitan's
epoch is that of the first 100,000 tokens, because it is slow. Refuted if torchtitan delivers more
than a 20th of the labels per second of short rows, or a third of documents.

    pip install . "git+https://github.com/pytorch/torchtitan@b5bcd76"
    python -m benchmarks.torchtitan [--rows short] [--repeats 3] [--scale 0.25] [--data FOLDER]
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.text_loaders.data import make_data
from benchmarks.text_loaders.peers import SEQUENCE, Rows, open_torchtitan
from benchmarks.text_loaders.processes import run

SYSTEMS = {
    "tokenfeed, concatenated": None,
    "tokenfeed, whole documents": None,
    "torchtitan, concat then split": "ConcatThenSplitPackingConfig",
    "torchtitan, first fit": "FirstFitPackingConfig",
}
"""torchtitan's systems have a config of packing."""
ROWS = ("short", "medium", "documents")
BATCH_ROWS, WORKERS, IGNORED = 8, 2, -100
STATE_BATCHES, EPOCH_TOKENS = 3, 100_000

Entry = dict[str, Any]


def open_system(name: str, data: Path, kind: str, ranks: int = 1, **settings: Any) -> Any:
    """Open the loader of the first rank, as torchtitan's trainer does."""
    part = settings.pop("part", 1)
    sizes = {"max_context_length": SEQUENCE, "num_tokens_per_batch": BATCH_ROWS * SEQUENCE}
    sizes |= {"dp_rank": 0, "dp_world_size": ranks, "tokenizer": None}
    if packing := SYSTEMS[name]:
        return open_torchtitan([Rows(data, kind, part, whole=True)], packing, sizes, **settings)
    from tokenfeed.integrations.torchtitan import ShardDataLoader

    settings |= {"num_workers": WORKERS, "whole_documents": name.endswith("documents")}
    return ShardDataLoader.Config(path=str(data / kind / "shards"), **settings).build(**sizes)


def speed(name: str, data: Path, kind: str, seconds: float) -> Entry:
    """Take batches for some seconds after the first one."""
    started = time.perf_counter()
    loader = open_system(name, data, kind)
    batches = iter(loader)
    next(batches)
    first = now = time.perf_counter()
    found = slots = 0
    while now - first < seconds:
        _, labels = next(batches)
        found += int((labels != IGNORED).sum())
        slots += labels.numel()
        now = time.perf_counter()
    loader.close()
    return {
        "mlabels_s": found / (now - first) / 1e6,
        "first_batch_s": first - started,
        "without_label": 1 - found / slots,
    }


def dropped(name: str, data: Path, kind: str) -> float:
    """Return the share of labels that an epoch does not deliver."""
    whole = Rows(data, kind, whole=True)
    part = max(1, len(whole.ids) // EPOCH_TOKENS) if SYSTEMS[name] else 1
    rows = Rows(data, kind, part, whole=True)
    loader = open_system(name, data, kind, repeat=False, part=part)
    found = sum(int((labels != IGNORED).sum()) for _, labels in loader)
    loader.close()
    return 1 - found / (len(rows.ids) - len(rows))


def resumes(name: str, data: Path, kind: str) -> dict[str, float | str]:
    """Return the seconds from a state of one rank to the first batch, by number of ranks."""
    loader = open_system(name, data, kind)
    batches = iter(loader)
    for _ in range(STATE_BATCHES):
        next(batches)
    state = loader.state_dict()
    expected = next(batches)[0]["input"]
    loader.close()
    found: dict[str, float | str] = {}
    for ranks in (1, 2, 4):
        started = time.perf_counter()
        again = open_system(name, data, kind, ranks)
        try:
            again.load_state_dict(state)
        except ValueError as error:
            found[str(ranks)] = f"refused: {error}"
            continue
        got = next(iter(again))[0]["input"]
        found[str(ranks)] = round(time.perf_counter() - started, 3)
        again.close()
        assert ranks > 1 or got.equal(expected), "the first batch after the resume is another one"
    return found


def case(options: argparse.Namespace) -> None:
    """Measure one system, and print one line of JSON."""
    found: Entry = {}
    for kind in options.rows:
        found[kind] = speed(options.case, options.data, kind, options.seconds)
        if options.counts:
            found[kind]["dropped"] = dropped(options.case, options.data, kind)
            found[kind]["resume_s"] = resumes(options.case, options.data, kind)
    print(json.dumps(found), flush=True)


def compare(options: argparse.Namespace) -> list[Entry]:
    """Run all systems, repeats interleaved; return medians."""
    runs: dict[str, list[Entry]] = {name: [] for name in SYSTEMS}
    for repeat in range(options.repeats):
        for name in SYSTEMS:
            print(f"repeat {repeat + 1}: {name}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.torchtitan", "--case", name]
            command += ["--data", options.data, "--seconds", options.seconds]
            command += ["--rows", *options.rows, *(["--counts"] if repeat == 0 else [])]
            with tempfile.TemporaryDirectory() as home:
                runs[name].append(run(command, Path(home))[0])
    results = []
    for kind in options.rows:
        speeds = {name: [each[kind]["mlabels_s"] for each in runs[name]] for name in SYSTEMS}
        theirs = [speeds[name] for name, packing in SYSTEMS.items() if packing]
        best = [max(pair) for pair in zip(*theirs, strict=True)]
        for name in SYSTEMS:
            first = runs[name][0][kind]
            ratios = [ours / peer for ours, peer in zip(speeds[name], best, strict=True)]
            results.append(
                {
                    "rows": kind,
                    "case": name,
                    "mlabels_s": summary(speeds[name], digits=3),
                    "times_best_of_torchtitan": round(statistics.median(ratios), 2),
                    "first_batch_s": summary(
                        [each[kind]["first_batch_s"] for each in runs[name]], digits=3
                    ),
                    "without_label": round(first["without_label"], 5),
                    "dropped": round(first["dropped"], 6),
                    "resume_s": first["resume_s"],
                }
            )
    return results


def table(results: list[Entry]) -> list[list[str]]:
    """The rows of the table in docs/benchmarks.md."""
    header = ["rows", "loader", "M labels/s", "times torchtitan's best", "first batch"]
    header += ["slots without label", "labels dropped", "resume on 1, 2, 4 ranks"]
    body = []
    for each in results:
        speeds = each["mlabels_s"]
        resumed = [
            "refused" if isinstance(seconds, str) else f"{seconds:.2f} s"
            for seconds in each["resume_s"].values()
        ]
        body.append(
            [
                each["rows"],
                each["case"],
                f"{speeds['median']:.3g} [{speeds['min']:.3g}, {speeds['max']:.3g}]",
                f"{each['times_best_of_torchtitan']:.3g}",
                f"{each['first_batch_s']['median']:.2f} s",
                f"{each['without_label']:.2%}",
                f"{each['dropped']:.3%}",
                ", ".join(resumed),
            ]
        )
    return [header, *body]


def main() -> None:
    """Measure, print the table and write results/torchtitan.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--scale", type=float, default=0.25, help="of the data")
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--case", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case(options)
        return
    with tempfile.TemporaryDirectory() as name:
        options.data = options.data or Path(name)
        options.scale = make_data(options.data, options.scale)
        results = compare(options)
    for row in table(results):
        print(" | ".join(row))
    peers = {name: importlib.metadata.version(name) for name in ("torchtitan", "grain")}
    more = {"peers": peers, "scale": options.scale}
    path = write_result("torchtitan", results, options.results, **more)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
