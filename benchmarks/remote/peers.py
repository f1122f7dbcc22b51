"""A peer in one process: what benchmarks/remote/ starts for each of its measurements.

Each is set up as its documentation says for S3: the address of a bucket, a folder for its cache,
the server's address and the keys in the environment, a loader with workers, shuffled. The rows are
those of benchmarks/text_loaders/: documents cut beforehand into rows of 2,048 tokens, 8 a batch.

`cold` is an epoch with an empty cache: the first batch, then the speed from where as many tokens
are delivered as the first window of tokenfeed has, to the end of the epoch; on the way its state is
saved. `resume` goes on from that state with an empty cache, `loop` uses a batch in 20 ms. It prints
one line of JSON.

usage: peers.py LOADER CASE DATA CACHE STATE WORKERS
"""

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.remote.loop import loop
from benchmarks.text_loaders.peers import (
    SEQUENCE,
    Rows,
    Stream,
    import_streaming,
    open_litdata,
    open_mosaic,
)

__all__ = ["CASES", "FIRST_TOKENS", "KIND", "NAMES"]

CASES = ("cold", "resume", "loop")
KIND = "documents"
"""Of rows; the bucket is named so, too."""
FIRST_TOKENS = 8_000_000
"""About what a window of tokenfeed has here."""

Entry = dict[str, Any]


def mosaic(rows: Rows, cache: Path, workers: int) -> Stream:
    """Its workers inherit the connection by which their parent fetched the index: without TLS they
    get each other's bytes. So the parent lets go of it."""
    remote = f"s3://{KIND}/mosaicml-streaming/rows"
    stream = open_mosaic(rows, workers, remote=remote, local=str(cache))
    loader: Any = stream.batches
    for each in loader.dataset.streams:
        each._downloader.clean_up()
    return stream


def litdata(rows: Rows, cache: Path, workers: int) -> Stream:
    """Its client speaks HTTPS alone, and no setting tells it that this server does not."""
    import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    return open_litdata(rows, workers, input_dir=f"s3://{KIND}/litdata/rows", cache_dir=str(cache))


OPENED: dict[str, Callable[[Rows, Path, int], Stream]] = {
    "mosaicml-streaming": mosaic,
    "litdata": litdata,
}
NAMES = tuple(OPENED)


def measure(open_stream: Callable[[], Stream], case: str, rows: Rows, state: Path) -> Entry:
    """One case."""
    started = time.perf_counter()
    stream = open_stream()
    if case == "resume":
        assert stream.load
        stream.load(pickle.loads(state.read_bytes()))
    batches = iter(stream.batches)
    first = next(batches)
    found: Entry = {"first_batch_s": time.perf_counter() - started}
    if case == "loop":
        found |= loop(batches)
    elif case == "cold":
        found |= epoch(stream, batches, first["input_ids"].numel(), rows, state)
    return found


def epoch(stream: Stream, batches: Iterator[Any], tokens: int, rows: Rows, state: Path) -> Entry:
    """The rest of an epoch, of which `tokens` came already."""
    half = len(rows) * SEQUENCE // 2
    began, before = time.perf_counter(), tokens
    for batch in batches:
        more = batch["input_ids"].numel()
        if tokens < FIRST_TOKENS <= tokens + more:
            began, before = time.perf_counter(), tokens + more
        if stream.state and tokens < half <= tokens + more:
            state.write_bytes(pickle.dumps(stream.state()))
        tokens += more
    speed = (tokens - before) / (time.perf_counter() - began)
    return {"epoch_mtok_s": speed / 1e6, "lost_rows": len(rows) - tokens // SEQUENCE}


def main() -> None:
    name, case, data, cache, state, workers = sys.argv[1:]
    torch.set_num_threads(1)
    import_module("litdata") if name == "litdata" else import_streaming()  # no time has it in it
    rows = Rows(Path(data), KIND)
    opened = partial(OPENED[name], rows, Path(cache), int(workers))
    print("\n" + json.dumps(measure(opened, case, rows, Path(state))), flush=True)


if __name__ == "__main__":
    main()
