"""One loader in one process: what benchmarks/text_loaders/ starts for each of its measurements.

It prints one line of JSON. `write` makes the loader's own copy of the rows; `speed` drains it for
some seconds, and saves its state in the middle of an epoch; `resume` goes on from that state;
`check` counts every row of one epoch, unbroken or resumed; `mix` measures the shares of the tokens
that a mixture delivers. Imports are not part of any time.

usage: case.py write|speed|resume|check|mix|versions LOADER KIND DATA [--seconds 4] [--workers 2]
"""

import argparse
import collections
import contextlib
import importlib
import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import installed
from benchmarks.text_loaders.peers import (
    MIXED,
    PEERS,
    SEQUENCE,
    Rows,
    Stream,
    import_streaming,
    rows_of,
)

OURS: dict[str, tuple[str, tuple[int, ...]]] = {
    "tokenfeed padded": ("Padded", (16_384,)),
    "tokenfeed padded, multiples of 8": ("Padded", (16_384, 8)),
    "tokenfeed packed": ("Packed", (SEQUENCE, 8)),
}
"""Name of the policy, and its arguments."""
MODULES = (
    *("datasets", "litdata", "grain", "webdataset", "torchdata.stateful_dataloader"),
    *("torchtitan.components.data", "lancedb.streaming"),
)


def own_folder(data: Path, kind: str, loader: str) -> Path:
    """Where a loader keeps its copy of the rows, and all else it writes."""
    return data / kind / loader.replace(" ", "-").replace(":", "")


def open_loader(data: Path, kind: str, name: str, workers: int, endless: bool) -> Stream:
    """Any loader by its name."""
    if name not in OURS:
        rows = rows_of(data, kind, name)
        return PEERS[name].read(rows, own_folder(data, kind, name), workers, endless)
    import tokenfeed

    policy, arguments = OURS[name]
    loader = tokenfeed.ShardLoader(
        data / kind / "shards",
        batching=getattr(tokenfeed, policy)(*arguments),
        num_workers=workers,
        epochs=None if endless else 1,
    )
    return Stream(loader, loader.state_dict, loader.load_state_dict)


def import_all(name: str) -> None:
    """Import what the loader needs, so that no time includes it."""
    if name in OURS:
        from tokenfeed import Packed, Padded, ShardLoader  # noqa: F401
    elif name == "mosaicml-streaming":
        import_streaming()
    else:
        for module in MODULES:
            if module.split(".")[0] in PEERS[name].packages:
                importlib.import_module(module)


def count(batch: Any, *, is_chat: bool) -> tuple[int, int]:
    """Real tokens and slots of a batch, from which everything that a model takes is asked."""
    ids = batch["input_ids"]
    if is_chat:
        batch["labels"]
    mask = batch.get("attention_mask")
    assert ids.dtype == torch.int64
    if hasattr(batch, "num_tokens"):  # ours, which builds only what is asked for
        if mask is None:
            batch["position_ids"]
        return batch.num_tokens, batch.num_slots
    return ids.numel() if mask is None else int(mask.sum()), ids.numel()


def real_ids(batch: Any) -> np.ndarray:
    """The tokens of a batch without its padding; our packed batches have no mask."""
    ids, mask = batch["input_ids"].numpy(), batch.get("attention_mask")
    if hasattr(batch, "lengths"):
        return ids[np.arange(ids.shape[1]) < batch.lengths[:, None]]
    return ids.reshape(-1) if mask is None else ids[mask.numpy()]


def epochs_of(stream: Stream) -> Iterator[Any]:
    """Batches without end."""
    return itertools.chain.from_iterable(itertools.repeat(stream.batches))


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def processor_s() -> float:
    """Processor time of this process and of all below it, in seconds; 0 where it is unknown."""
    ticks = 0
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, after_name[11:15]))  # own and ended children's, user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def speed(
    open_stream: Callable[[], Stream], seconds: float, rows: Rows, state_file: Path
) -> dict[str, float]:
    """Drain for some seconds after the first batch, which stands apart."""
    started = time.perf_counter()
    stream = open_stream()
    batches = epochs_of(stream)
    next(batches)
    first = now = time.perf_counter()
    processor = processor_s()
    tokens = slots = 0
    state = None
    for batch in batches:
        more_tokens, more_slots = count(batch, is_chat=rows.is_chat)
        tokens += more_tokens
        slots += more_slots
        now = time.perf_counter()
        is_over = now - first > seconds
        if stream.state and state is None and (is_over or tokens >= len(rows.ids) // 2):
            state = pickle.dumps(stream.state())
        if is_over:
            break
    processor = processor_s() - processor
    if state:
        state_file.write_bytes(state)
    return {
        "mtok_s": tokens / (now - first) / 1e6,
        "cpu_s_per_mtok": processor / tokens * 1e6,
        "padding": 1 - tokens / slots,
        "first_batch_s": first - started,
    }


def resume(open_stream: Callable[[], Stream], state_file: Path) -> dict[str, float]:
    """From nothing to the first batch after a saved state."""
    state = pickle.loads(state_file.read_bytes())
    started = time.perf_counter()
    stream = open_stream()
    assert stream.load
    stream.load(state)
    next(iter(stream.batches))
    return {"resume_s": time.perf_counter() - started}


def check(
    open_stream: Callable[[], Stream], rows: Rows, end_id: int, part: str, state_file: Path
) -> dict[str, int]:
    """Count the rows of one epoch: `whole`, or its `first` half and in another process its `rest`.

    Every row ends with `end_id`, so the rows of padded and of packed batches can be told.
    """
    stream = open_stream()
    got: collections.Counter[bytes] = collections.Counter()
    if part == "rest":
        state, got = pickle.loads(state_file.read_bytes())
        assert stream.load
        stream.load(state)
    for batch in stream.batches:
        real = real_ids(batch)
        ends = np.flatnonzero(real == end_id) + 1
        got.update(row.tobytes() for row in np.split(real, ends) if len(row))
        if part == "first" and got.total() > len(rows) / 2:
            assert stream.state
            state_file.write_bytes(pickle.dumps((stream.state(), got)))
            break
    wanted = collections.Counter(row.astype(np.int64).tobytes() for row in rows)
    return {
        "rows": len(rows),
        "lost": (wanted - got).total(),
        "repeated": (got - wanted).total(),
    }


def mix(name: str, data: Path, workers: int, seconds: float) -> dict[str, float]:
    """Return the share of the tokens that comes from documents, and the speed."""
    if name in OURS:
        import tokenfeed

        mixture = tokenfeed.Mixture({data / kind / "shards": MIXED[kind] for kind in MIXED})
        policy, arguments = OURS[name]
        batching = getattr(tokenfeed, policy)(*arguments)
        loader = tokenfeed.ShardLoader(mixture, batching=batching, num_workers=workers, epochs=None)
        stream = Stream(loader)
        documents = len(np.load(data / "documents" / "lengths.npy", mmap_mode="r"))
    else:
        parts = {kind: (rows_of(data, kind, name), own_folder(data, kind, name)) for kind in MIXED}
        open_mixture = PEERS[name].mix
        assert open_mixture
        stream = open_mixture(parts, workers)
    batches = epochs_of(stream)
    next(batches)
    started = now = time.perf_counter()
    tokens = of_documents = 0
    while now - started < seconds:
        batch = next(batches)
        lengths, is_document = pieces(batch)
        if is_document is None:
            is_document = batch.rows < documents
        tokens += int(lengths.sum())
        of_documents += int(lengths[is_document].sum())
        now = time.perf_counter()
    return {"mtok_s": tokens / (now - started) / 1e6, "share": of_documents / tokens}


def pieces(batch: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens of each row of a batch, and whether it is a part of a document; None: ask the batch.

    A peer's parts of documents are rows of `SEQUENCE`, which no line reaches. Rows of torchtitan
    end where positions begin again.
    """
    if hasattr(batch, "piece_lengths"):
        return batch.piece_lengths, None
    if "positions" in batch:
        starts = np.flatnonzero(batch["positions"].numpy() == 0)
        lengths = np.diff(starts, append=batch["positions"].numel())
        return lengths, lengths > SEQUENCE // 8  # a batch may end in a document
    lengths = batch["attention_mask"].sum(1).numpy()
    return lengths, lengths == SEQUENCE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=["write", "speed", "resume", "check", "mix", "versions"])
    parser.add_argument("loader", nargs="?", choices=[*OURS, *PEERS])
    parser.add_argument("kind", nargs="?")
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", default="whole", choices=["whole", "first", "rest"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.action == "versions":
        print(json.dumps(installed(PEERS)))
        return
    name, kind, data = options.loader, options.kind, options.data
    import_all(name)
    peer = PEERS.get(name)
    if options.action == "mix":
        print("\n" + json.dumps(mix(name, data, options.workers, options.seconds)), flush=True)
        return
    rows = rows_of(data, kind, name)
    own = own_folder(data, kind, name)
    result: dict[str, Any] = {"tokens": len(rows.ids)}

    def open_stream(endless: bool = True) -> Stream:
        return open_loader(data, kind, name, options.workers, endless)

    if options.action == "write" and peer:
        peer.write(rows, own)
    elif options.action == "speed":
        result |= speed(open_stream, options.seconds, rows, own / "state.pickle")
    elif options.action == "resume":
        result |= resume(open_stream, own / "state.pickle")
    elif options.action == "check":
        end_id = json.loads((data / "data.json").read_text())["end_id"]
        state_file = own / "half.pickle"
        once = partial(open_stream, endless=False)
        result |= check(once, rows, end_id, options.part, state_file)
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
