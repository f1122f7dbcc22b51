"""tokenfeed in one process: what benchmarks/remote/ starts for each of its measurements.

It prints one line of JSON; times are from before the loader is made, without imports.

usage: case.py JSON
"""

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Timer
from typing import Any

import xxhash

from benchmarks.remote.loop import STEP_S, loop
from tokenfeed import Batch, Padded, ShardLoader

SECONDS = 3.0
BEFORE_S, OUTAGE_S, AFTER_S = 10.0, 60.0, 20.0
"""Of the loop with an outage."""
CACHED_SHARE = 0.5
"""Of the data, in that loop."""
PLENTY = 1 << 30

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure."""

    name: str
    path: str
    """Of the data set, or its address."""
    folder: str
    """The same data set on this disk."""
    cache: str
    state: str
    """A file: `folder` writes it, `resume` reads it."""
    workers: int
    server: int
    """Its process."""


def open_loader(case: Case) -> ShardLoader:
    """As the case has it; endless."""
    return ShardLoader(
        case.path,
        batching=Padded(16_384),
        epochs=None,
        num_workers=case.workers,
        cache_dir=case.cache,
        cache_bytes=cache_bytes(case),
    )


def cache_bytes(case: Case) -> int:
    """0 for none; less than the data in the loop with an outage, or all would be there by then."""
    if case.name == "outage":
        shards = Path(case.folder).glob("train/*")
        return int(CACHED_SHARE * sum(shard.stat().st_size for shard in shards))
    return 0 if case.name == "memory" else PLENTY


def measure(case: Case) -> Entry:
    """One case."""
    started = time.perf_counter()
    loader = open_loader(case)
    if case.name == "resume":
        loader.load_state_dict(json.loads(Path(case.state).read_text()))
    batches = iter(loader)
    next(batches)
    found: Entry = {"first_batch_s": time.perf_counter() - started}
    if case.name == "outage":
        found |= outage(case, batches)
    elif case.name.endswith("loop"):
        found |= loop(batches)
    elif case.name != "resume":
        found |= epoch(case, loader, batches) | speed(batches)
    if remote := loader.stats().remote:
        found |= {"retries": remote.retries, "outage_s": remote.outage_s}
    loader.close()
    return found


def epoch(case: Case, loader: ShardLoader, batches: Iterator[Batch]) -> Entry:
    """The first epoch after its first window; `folder` saves its state in the middle."""
    while loader.position.window == 0:
        next(batches)
    middle = loader._plan.num_windows // 2
    began, tokens = time.perf_counter(), 0
    while loader.position.epoch == 0:
        tokens += next(batches).num_tokens
        if loader.position[:2] == (0, middle) and case.name == "folder":
            Path(case.state).write_text(json.dumps(loader.state_dict()))
    return {"epoch_mtok_s": tokens / (time.perf_counter() - began) / 1e6}


def speed(batches: Iterator[Batch]) -> Entry:
    """The seconds after that, and their processor time."""
    began, tokens, cpu = time.perf_counter(), 0, cpu_seconds()
    while time.perf_counter() < began + SECONDS:
        tokens += next(batches).num_tokens
    return {
        "mtok_s": tokens / (time.perf_counter() - began) / 1e6,
        "cpu_s_per_gtok": (cpu_seconds() - cpu) / tokens * 1e9,
    }


def cpu_seconds() -> float:
    """Of this process and its workers."""
    total = sum(os.times()[:2])
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rsplit(") ", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def outage(case: Case, batches: Iterator[Batch]) -> Entry:
    """A loop; a minute of it the server answers nothing. Are the batches of the epoch those of the
    folder?"""
    steps = int((BEFORE_S + OUTAGE_S + AFTER_S) / STEP_S)
    local = ShardLoader(case.folder, batching=Padded(16_384), num_workers=case.workers)
    expected, digest = xxhash.xxh3_64(), xxhash.xxh3_64()
    with local:
        count = sum(1 for _ in digested(islice(local, 1, None), expected))
    batches = digested(islice(batches, count), digest)
    with suspended(case.server):
        found: Entry = loop(batches, steps)
    deque(batches, maxlen=0)
    return found | {"same_batches": digest.digest() == expected.digest()}


def digested(batches: Iterator[Batch], digest: xxhash.xxh3_64) -> Iterator[Batch]:
    """The same batches; the digest of their tokens."""
    for batch in batches:
        digest.update(batch["input_ids"].numpy())
        yield batch


@contextmanager
def suspended(process: int) -> Iterator[None]:
    """Stop a process some seconds from now, for a minute: connections hang, as in a network that
    drops what it is given."""
    timers = [
        Timer(BEFORE_S, os.kill, (process, signal.SIGSTOP)),
        Timer(BEFORE_S + OUTAGE_S, os.kill, (process, signal.SIGCONT)),
    ]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        os.kill(process, signal.SIGCONT)


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
