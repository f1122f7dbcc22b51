"""What does it cost that shards are 30 ms away? Documents from a server, and from a folder.

A server in a process of its own (the client has the rest of the cores) answers each request 30 ms
late. Each repeat runs, in new processes: the folder; the server with an empty cache; the same with
the cache that this left (`warm`); the server without a cache; a resume in the middle of the epoch
with an empty cache; and a loop that uses a batch in 20 ms, of the folder and of the server with an
empty cache. Speed is that of the first epoch after its first window, and of the seconds after it;
times are from before the loader is made, without imports. Refuted by an epoch below 100 M tokens/s,
a first batch after 1 s, a resume after 1.5 s, a 99th percentile of waits above 1 ms in the loop, or
a warm cache more than 20 % slower than the folder.

    python benchmarks/remote.py [--repeats 3] [--data FOLDER] [--delay-ms 30]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loader_data import VOCABULARY, pretokenize, standard_library, write_json_lines
from protocol import RESULTS, summary, write_result
from rich.console import Console
from rich.table import Table

TOKENS = 160_000_000
CASES = ("folder", "cold", "warm", "memory", "resume", "folder loop", "loop")
MEASURED = {
    "first_batch_s": 3,
    "epoch_mtok_s": 1,
    "mtok_s": 1,
    "cpu_s_per_gtok": 2,
    "wait_p99_ms": 3,
}
SECONDS, STEPS, STEP_S = 3.0, 400, 0.02

Entry = dict[str, Any]


def make_documents(folder: Path, tokens: float) -> None:
    """The standard library's files again and again, unless they are there."""
    if (folder / "manifest.json").exists():
        return
    corpus = folder.with_name("corpus.jsonl")
    texts = list(standard_library())
    write_json_lines(corpus, texts, len("".join(texts)))
    trained = pretokenize(corpus, folder.with_name("tokenizer"), "--vocab-size", VOCABULARY)
    write_json_lines(corpus, texts, int(tokens * trained["text_bytes_per_token"]))
    pretokenize(corpus, folder, "--tokenizer", folder.with_name("tokenizer") / "tokenizer.json")
    corpus.unlink()


@contextmanager
def serving(folder: Path, delay_ms: float) -> Iterator[str]:
    """The URL of a folder."""
    server = Path(__file__).with_name("remote_server.py")
    process = subprocess.Popen(
        [sys.executable, str(server), str(folder), str(delay_ms)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def count(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/__count") as answer:
        found: dict[str, int] = json.load(answer)
    return found


def run_case(case: str, path: str, cache: Path, state: Path, workers: int) -> Entry:
    """One process; what it printed."""
    command = [sys.executable, __file__, "--case", case, path, str(cache), str(state), str(workers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Entry = json.loads(done.stdout.splitlines()[-1])
    return found


def case(name: str, path: str, cache: str, state: str, workers: str) -> Entry:
    """One measurement in this process."""
    from tokenfeed import Padded, ShardLoader

    started = time.perf_counter()
    loader = ShardLoader(
        path,
        batching=Padded(16_384),
        epochs=None,
        num_workers=int(workers),
        cache_dir=cache,
        cache_bytes=0 if name == "memory" else 1 << 30,
    )
    if name == "resume":
        loader.load_state_dict(json.loads(Path(state).read_text()))
    batches = iter(loader)
    tokens = next(batches).num_tokens
    found: Entry = {"first_batch_s": time.perf_counter() - started}
    if name.endswith("loop"):
        waits = []
        for _ in range(STEPS):
            time.sleep(STEP_S)
            asked = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - asked)
        found["wait_p99_ms"] = sorted(waits)[int(0.99 * STEPS)] * 1000
    elif name != "resume":
        while loader.position.window == 0:
            next(batches)
        windows = len(loader._plan.order.phases) and loader._plan.num_windows
        began, tokens = time.perf_counter(), 0
        while loader.position.epoch == 0:
            tokens += next(batches).num_tokens
            if loader.position[:2] == (0, windows // 2) and name == "folder":
                Path(state).write_text(json.dumps(loader.state_dict()))
        found["epoch_mtok_s"] = tokens / (time.perf_counter() - began) / 1e6
        began, tokens, cpu = time.perf_counter(), 0, cpu_seconds()
        while time.perf_counter() < began + SECONDS:
            tokens += next(batches).num_tokens
        found["mtok_s"] = tokens / (time.perf_counter() - began) / 1e6
        found["cpu_s_per_gtok"] = (cpu_seconds() - cpu) / tokens * 1e9
    if remote := loader.stats().remote:
        found |= {"hits": remote.hits, "retries": remote.retries}
        found["bytes_at_hand_p99_s"] = remote.wait_s.p99
    loader.close()
    return found


def cpu_seconds() -> float:
    """Of this process and its workers."""
    total = sum(os.times()[:2])
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rsplit(") ", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(
    folder: Path, delay_ms: float, workers: int, cases: Sequence[str], kept: Path
) -> dict[str, Entry]:
    """The cases once; `warm` and `resume` need what those before leave.

    Caches stay to the end: ext4 is slow to make files within seconds of others' removal.
    """
    found: dict[str, Entry] = {}
    state = kept / "state.json"
    with serving(folder, delay_ms) as url:
        for each in cases:
            cache = kept / ("cold" if each == "warm" else each)
            before = count(url)
            path = str(folder) if each.startswith("folder") else url
            found[each] = run_case(each, path, cache, state, workers)
            after = count(url)
            found[each] |= {key: after[key] - before[key] for key in after}
    return found


def show(results: list[Entry]) -> None:
    """The table a person reads."""
    table = Table("case", *MEASURED, "requests", "MB")
    for entry in results:
        cells = [f"{entry[key]['median']:,}" if key in entry else "" for key in MEASURED]
        table.add_row(
            entry["case"], *cells, f"{entry['requests']:,}", f"{entry['bytes'] / 1e6:.1f}"
        )
    Console(width=130).print(table)


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="keep the data here, and use what is there")
    parser.add_argument("--tokens", type=float, default=TOKENS)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = (options.data or Path(name)) / "documents"
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_documents(folder, options.tokens)
        settings = (folder, options.delay_ms, options.workers, options.cases)
        runs = []
        for number in range(options.repeats):
            kept = Path(name) / str(number)
            kept.mkdir()
            runs.append(measure(*settings, kept))
    results = []
    for each in options.cases:
        of_case = [run[each] for run in runs]
        medians = {
            key: summary([run[key] for run in of_case], digits=digits)
            for key, digits in MEASURED.items()
            if key in of_case[0]
        }
        last = {key: of_case[-1][key] for key in ("requests", "bytes")}
        results.append({"case": each, **medians, **last})
    show(results)
    more = {"delay_ms": options.delay_ms, "workers": options.workers, "tokens": options.tokens}
    print(f"written to {write_result('remote', results, options.results, **more)}")


if __name__ == "__main__":
    main()
