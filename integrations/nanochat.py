"""(inputs, targets, state) from shards, as the `base_train` of nanochat takes them.

In `scripts/base_train.py`, replace the loaders:

    from tokenfeed.integrations.nanochat import shard_loader, shard_loader_with_state
    train_loader = shard_loader_with_state("shards/", args.device_batch_size, args.max_seq_len,
        split="train", device=device, resume_state_dict=dataloader_resume_state_dict)
    build_val_loader = lambda: shard_loader("shards/", args.device_batch_size, args.max_seq_len,
        split="val", device=device)

To begin every row and every document with a token, as nanochat's own loader does, pass
`batching=Packed(T, B, last="fill", begin_token=ID)`.

All batches have one shape, as `torch.compile(dynamic=False)` needs it. Rows are full: a document
that does not fit into the rest of a row goes on in another row. The first token of a document or of
its rest is not a target. Only the last batch of a window may have padding. A resumed run continues
with exactly the batch that it had fetched and not trained on.
"""

from collections.abc import Iterator
from typing import Any

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.policies import Packed

_SPLITS = {"train": "train", "val": "validation"}
_IGNORED = -1  # of nanochat's loss


def shard_loader_with_state(
    path: StorePath,
    B: int,
    T: int,
    split: str,
    device: Any = "cuda",
    resume_state_dict: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield inputs [B, T], targets [B, T] and the state before this batch, by default without an
    end.

    nanochat fetches a batch before it saves a checkpoint, and trains on the batch afterwards. So
    the state is the one from which a loader delivers this batch again.

    Args:
        path: Output folder of `pretokenize`, or its URL in a store.
        B: Number of rows.
        T: Tokens of a row.
        split: "train" or "val".
        device: Device of the batches.
        resume_state_dict: A state that this function yielded.
        settings: Other settings of `ShardLoader`.

    Raises:
        ResumeError: The state is of other data, or of nanochat's own loader.
    """
    split = _SPLITS[checks.choice("split", split, tuple(_SPLITS))]
    settings = {"batching": Packed(T, B, last="fill", split=True), "epochs": None} | settings
    loader = ShardLoader(path, split=split, device=device, ignore_index=_IGNORED, **settings)
    if resume_state_dict is not None:
        loader.load_state_dict(resume_state_dict.get("loader", {}))
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
