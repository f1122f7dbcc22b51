"""(inputs, targets, state) from shards, for nanochat and nanoGPT. Copy this file into the checkout,
and change the lines of docs/how/projects.md.

All batches have one shape, as `torch.compile(dynamic=False)` needs it. Rows are full: a document
that does not fit into the rest of a row goes on in another row. The first token of a document or of
its rest is not a target. Only the last batch of a window may have padding. For rows that begin with
a token, as in nanochat's own loader, pass `batching=Packed(T, B, last="fill", begin_token=ID)`.
"""

from collections.abc import Iterator
from typing import Any

from tokenfeed import Packed, ShardLoader

SPLITS = {"train": "train", "val": "validation"}


def shard_loader_with_state(
    path: str,
    B: int,
    T: int,
    split: str,
    device: Any = "cuda",
    resume_state_dict: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield inputs [B, T], targets [B, T] and the state before this batch, without an end.

    These projects fetch a batch before they save, and train on it afterwards. So the state is the
    one from which a loader delivers this batch again.
    """
    settings = {"batching": Packed(T, B, last="fill", split=True), "epochs": None} | settings
    settings |= {"split": SPLITS[split], "device": device, "ignore_index": -1}
    loader = ShardLoader(path, **settings)
    if resume_state_dict is not None:
        loader.load_state_dict(resume_state_dict["loader"])
    with loader:
        batches = iter(loader)
        while True:
            epoch, window, micro_batch = loader.position
            # nanochat's progress line prints the epoch, from 1, and two positions in it
            place = {"epoch": epoch + 1, "pq_idx": window, "rg_idx": micro_batch}
            state = {"loader": loader.state_dict(), **place}
            if (batch := next(batches, None)) is None:
                return
            yield batch["input_ids"], batch.targets, state


def shard_loader(*args: Any, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the inputs and targets of `shard_loader_with_state`."""
    for inputs, targets, _ in shard_loader_with_state(*args, **settings):
        yield inputs, targets
