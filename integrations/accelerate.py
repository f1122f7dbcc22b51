"""A ShardLoader under Accelerate.

    accelerator = Accelerator()
    batches = {"batching": Packed(2048, 8), "micro_batches_per_step": 8}
    loader = accelerated_loader(accelerator, "out/", **batches)
    model, optimizer = accelerator.prepare(model, optimizer)  # without the loader
    for step in steps(loader):
        for batch in step.accumulate(model):
            accelerator.backward(model(**batch, num_items_in_batch=step.divisor).loss)
        optimizer.step()
        optimizer.zero_grad()

Do not pass the loader to `prepare`: it would split the batches over the ranks a second time. Keep
the Accelerator's `gradient_accumulation_steps` at 1: `backward` divides the loss by it, but
`step.divisor` already includes that.
"""

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.policy import Batching
from tokenfeed.pipeline.planning.stages import Stage


def accelerated_loader(
    accelerator: Accelerator,
    path: StorePath | Mixture | Sequence[Stage],
    *,
    batching: Batching,
    **settings: Any,
) -> ShardLoader:
    """Make a loader on the accelerator's device, for its rank.

    With the split `train`, `save_state` and `load_state` include its position. Loaders of other
    splits start from the beginning with every loop, so they have no position to save.

    Args:
        accelerator: The Accelerator. Its constructor starts torch.distributed.
        path: See `ShardLoader`.
        batching: See `ShardLoader`.
        settings: Other settings of `ShardLoader`.

    Raises:
        ConfigError: A setting is out of range or does not fit the data.
    """
    loader = ShardLoader(path, batching=batching, device=accelerator.device, **settings)
    if settings.get("split", "train") == "train":
        accelerator.register_for_checkpointing(loader)
    return loader
