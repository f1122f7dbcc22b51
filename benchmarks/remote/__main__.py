"""What does it cost that shards are 30 ms away? Documents from a server and from a folder.

A server in a process of its own (the client has the rest of the cores) answers each request 30 ms
late. Each repeat runs, in new processes: the folder; the server with an empty cache; the same with
the cache that this left (`warm`); the server without a cache; a resume in the middle of the epoch
with an empty cache; a loop that uses a batch in 20 ms, of the folder and of the server with an
empty cache; and that loop where the server answers nothing for a minute, with a cache of half of
the data (`outage`). Speed is that of the first epoch after its first window, and of the seconds
after it; times are from before the loader is made, without imports. Refuted by an epoch below
100 M tokens/s, a first batch after 1 s, a resume after 1.5 s, a 99th percentile of waits above 1 ms
in a loop, a wait above a step's 20 ms in the outage, other batches than the folder's, or a warm
cache more than 20 % slower than the folder. The results keep the figures of mosaicml-streaming and
litData from the same server (commit 027df8e4, `remote/peers.py`).

    python -m benchmarks.remote [--repeats 3] [--data FOLDER]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.protocol import RESULTS, summary, write_result
from benchmarks.text_loaders.data import (
    VOCABULARY,
    pretokenize,
    read_back,
    standard_library,
    write_json_lines,
)
from benchmarks.text_loaders.processes import run

TOKENS = 160_000_000
CASES = ("folder", "cold", "warm", "memory", "resume", "folder loop", "loop", "outage")
OWN = "tokenfeed"
KIND = "documents"
"""Of rows; the folder of the data is named so, too."""
MEASURED = {
    "first_batch_s": 3,
    "epoch_mtok_s": 1,
    "mtok_s": 1,
    "cpu_s_per_gtok": 2,
    "wait_p99_ms": 3,
    "wait_most_ms": 2,
}
COUNTED = ("requests", "bytes", "retries", "outage_s", "lost_rows", "same_batches")
"""Of the last repeat."""

Entry = dict[str, Any]
Run = dict[str, Entry]
"""Of each case."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases of a repeat have in common."""

    data: Path
    """The folder of all data; what the server gives."""
    workers: int
    url: str
    server: int
    """Its process."""
    kept: Path
    """What cases leave to others. It stays to the end: ext4 is slow to make files within seconds of
    others' removal."""


def make_documents(folder: Path, tokens: float) -> None:
    """The standard library's files again and again, as shards and as ids, unless they are there."""
    if (folder / "ids.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    corpus, trained_in = folder / "corpus.jsonl", folder / "tokenizer"
    texts = list(standard_library())
    write_json_lines(corpus, texts, len("".join(texts)))
    trained = pretokenize(corpus, trained_in, "--vocab-size", VOCABULARY)
    write_json_lines(corpus, texts, int(tokens * trained["text_bytes_per_token"]))
    pretokenize(corpus, folder / "shards", "--tokenizer", trained_in / "tokenizer.json")
    corpus.unlink()
    read_back(folder)


@contextmanager
def serving(folder: Path, delay_ms: float) -> Iterator[tuple[str, int]]:
    """The URL of a folder, and the server's process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.remote.server", str(folder), str(delay_ms)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
    finally:
        process.kill()
        process.wait()


def count(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/__count") as answer:
        found: dict[str, int] = json.load(answer)
    return found


def run_own(case: str, setting: Setting) -> Entry:
    """A case of tokenfeed."""
    shards = Path(KIND) / "shards"
    folder = str(setting.data / shards)
    told = {
        "name": case,
        "path": folder if case.startswith("folder") else f"{setting.url}/{shards}",
        "folder": folder,
        "cache": str(setting.kept / ("cold" if case == "warm" else case)),
        "state": str(setting.kept / "state.json"),
        "workers": setting.workers,
        "server": setting.server,
    }
    return run([sys.executable, "-m", "benchmarks.remote.case", json.dumps(told)], Path.home())[0]


def measure(setting: Setting, cases: Sequence[str]) -> Run:
    """Everything once; `warm` and `resume` need what those before leave."""
    found: Run = {}
    for case in cases:
        print(case, file=sys.stderr, flush=True)
        before = count(setting.url)
        entry = run_own(case, setting)
        after = count(setting.url)
        found[case] = entry | {key: after[key] - before[key] for key in after}
    return found


def describe(runs: list[Run]) -> list[Entry]:
    """Medians of the repeats, and what was counted in the last."""
    results = []
    for case in runs[0]:
        of_case = [run[case] for run in runs]
        entry: Entry = {"loader": OWN, "case": case}
        results.append(entry)
        entry |= {
            key: summary([run[key] for run in of_case], digits=digits)
            for key, digits in MEASURED.items()
            if key in of_case[0]
        }
        entry |= {key: of_case[-1][key] for key in COUNTED if key in of_case[-1]}
    return results


def show(results: list[Entry]) -> None:
    """The table a person reads."""
    table = Table("loader", "case", *MEASURED, "requests", "MB", "retries")
    console = Console(width=150)
    for entry in results:
        if "failed" in entry:
            table.add_row(entry["loader"], entry["case"], "failed")
            continue
        cells = [f"{entry[key]['median']:,}" if key in entry else "" for key in MEASURED]
        counts = [f"{entry['requests']:,}", f"{entry['bytes'] / 1e6:.1f}"]
        table.add_row(
            entry["loader"], entry["case"], *cells, *counts, f"{entry.get('retries', '')}"
        )
    console.print(table)
    for entry in results:
        if "failed" in entry:
            console.print(escape(f"{entry['loader']}, {entry['case']}: {entry['failed']}"))
        if not entry.get("same_batches", True):
            console.print(f"{entry['case']}: other batches than those of the folder")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--tokens", type=float, default=TOKENS)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        data = options.data or Path(name) / "data"
        make_documents(data / KIND, options.tokens)
        for number in range(options.repeats):
            with serving(data, options.delay_ms) as (url, server):
                kept = Path(name) / str(number)
                kept.mkdir()
                setting = Setting(data, options.workers, url, server, kept)
                runs.append(measure(setting, options.cases))
    old = json.loads((RESULTS / "remote.json").read_text())
    results = describe(runs) + [each for each in old["results"] if each["loader"] != OWN]
    show(results)
    more: Entry = {
        "delay_ms": options.delay_ms,
        "workers": options.workers,
        "tokens": options.tokens,
    }
    path = write_result(
        "remote", results, options.results, peers=old["environment"].get("peers", {}), **more
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
