"""What does it cost that shards are 30 ms away? Documents from a server, from a folder, by peers.

A server in a process of its own (the client has the rest of the cores) answers each request 30 ms
late. Each repeat runs, in new processes: the folder; the server with an empty cache; the same with
the cache that this left (`warm`); the server without a cache; a resume in the middle of the epoch
with an empty cache; a loop that uses a batch in 20 ms, of the folder and of the server with an
empty cache; and that loop where the server answers nothing for a minute, with a cache of half of
the data (`outage`). Then peers, from the same server, which speaks enough of S3 for them:
peers.py says how. Speed is that of the first epoch after its first window, and of the
seconds after it; times are from before the loader is made, without imports. Refuted by an epoch
below 100 M tokens/s, a first batch after 1 s, a resume after 1.5 s, a 99th percentile of waits
above 1 ms in a loop, a wait above a step's 20 ms in the outage, other batches than the folder's, a
warm cache more than 20 % slower than the folder, or a peer that is faster.

    pip install torch mosaicml-streaming litdata boto3     # /tmp/peers
    python -m benchmarks.remote [--peer-python /tmp/peers/bin/python] [--repeats 3] [--data FOLDER]
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
from benchmarks.remote import peers
from benchmarks.text_loaders.data import (
    VOCABULARY,
    pretokenize,
    read_back,
    standard_library,
    write_json_lines,
)
from benchmarks.text_loaders.processes import CaseError, find_peers, prepare, run

TOKENS = 160_000_000
CASES = ("folder", "cold", "warm", "memory", "resume", "folder loop", "loop", "outage")
OWN = "tokenfeed"
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
Run = dict[tuple[str, str], Entry]
"""Of each loader and case."""


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
    shards = Path(peers.KIND) / "shards"
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


def run_peer(python: str, loader: str, case: str, setting: Setting) -> Entry:
    """A case of a peer; where it failed, how. Its cache has one path, for states name it."""
    own = setting.kept / loader
    own.mkdir(exist_ok=True)
    cache, state = own / "cache", own / "state.pickle"
    if case == "resume" and not state.exists():
        return {"failed": "saved no state"}
    command = [python, "-m", "benchmarks.remote.peers", loader, case, setting.data, cache, state]
    environment = s3_environment(setting.url) | {"TMPDIR": str(own)}  # some leave locks there
    try:
        return run([*command, setting.workers], own, **environment)[0]
    except CaseError as error:
        return {"failed": str(error)}
    finally:
        if cache.exists():
            cache.rename(own / f"cache of {case}")


def s3_environment(url: str) -> dict[str, str]:
    """What says to each client of S3 where it is, and who asks."""
    return {
        "S3_ENDPOINT_URL": url,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def measure(setting: Setting, cases: Sequence[str], pythons: dict[str, str]) -> Run:
    """Everything once; `warm` and `resume` need what those before leave."""
    found: Run = {}
    todo = [(OWN, case) for case in cases]
    todo += [(name, case) for name in pythons for case in peers.CASES]
    for loader, case in todo:
        print(f"{loader}: {case}", file=sys.stderr, flush=True)
        before = count(setting.url)
        if loader == OWN:
            entry = run_own(case, setting)
        else:
            entry = run_peer(pythons[loader], loader, case, setting)
        after = count(setting.url)
        found[loader, case] = entry | {key: after[key] - before[key] for key in after}
    return found


def describe(runs: list[Run]) -> list[Entry]:
    """Medians of the repeats, and what was counted in the last."""
    results = []
    for loader, case in runs[0]:
        of_case = [run[loader, case] for run in runs]
        entry: Entry = {"loader": loader, "case": case}
        results.append(entry)
        if failed := [run["failed"] for run in of_case if "failed" in run]:
            entry["failed"] = failed[0]
            continue
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
    parser.add_argument("--peer-python", help="an interpreter that has the peers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--tokens", type=float, default=TOKENS)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    homes, versions = find_peers([sys.executable, *filter(None, [options.peer_python])])
    pythons = {name: homes[name] for name in peers.NAMES if name in homes}
    runs = []
    with tempfile.TemporaryDirectory() as name:
        data = options.data or Path(name) / "data"
        make_documents(data / peers.KIND, options.tokens)
        for peer, python in pythons.items():
            prepare(python, peer, peers.KIND, data)
        for number in range(options.repeats):
            with serving(data, options.delay_ms) as (url, server):
                kept = Path(name) / str(number)
                kept.mkdir()
                setting = Setting(data, options.workers, url, server, kept)
                runs.append(measure(setting, options.cases, pythons))
    results = describe(runs)
    show(results)
    more = {"delay_ms": options.delay_ms, "workers": options.workers, "tokens": options.tokens}
    path = write_result("remote", results, options.results, peers=versions, **more)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
