"""A ShardLoader under Accelerate.

    accelerator = Accelerator()
    batches = {"batching": Packed(2048, 8), "micro_batches_per_step": 8}
    loader = accelerated_loader(accelerator, "out/", **batches)
    model, optimizer = accelerator.prepare(model, optimizer)  # the loader is ready as it is
    for step in steps(loader):
        for batch in step.accumulate(model):
            accelerator.backward(model(**batch, num_items_in_batch=step.divisor).loss)
        optimizer.step()
        optimizer.zero_grad()

Do not pass the loader to `prepare`: it would deal its batches a second time. Leave the
Accelerator's `gradient_accumulation_steps` at 1: `backward` divides the loss by it, and
`step.divisor` has done that.
"""

from typing import Any

from accelerate import Accelerator

from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.store import StorePath
from tokenfeed.pipeline.planning.mixture import Mixture
from tokenfeed.pipeline.planning.policy import Batching

__all__ = ["accelerated_loader"]


def accelerated_loader(
    accelerator: Accelerator, path: StorePath | Mixture, *, batching: Batching, **settings: Any
) -> ShardLoader:
    """Make a loader on the accelerator's device, dealt to its ranks.

    If its split is `train`, `save_state` and `load_state` keep its position. Loaders of other
    splits begin anew with every loop, so they have none to keep.

    Args:
        accelerator: Make it before, because it starts torch.distributed.
        path: See `ShardLoader`.
        batching: See `ShardLoader`.
        settings: Other settings of `ShardLoader`.
    """
    loader = ShardLoader(path, batching=batching, device=accelerator.device, **settings)
    if settings.get("split", "train") == "train":
        accelerator.register_for_checkpointing(loader)
    return loader
