"""The largest micro-batch that fits the device, found by trial: `--micro-batch-tokens auto`."""

import dataclasses
import logging
from collections.abc import Callable

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.batch_policy import possible_sizes
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.optim.train_state import Learner, is_out_of_memory

_SPARE_SHARE = 0.05
"""Share of the device's memory to leave free, for gaps between blocks and for libraries."""
_ON_CPU = 2048
"""Most tokens of a micro-batch on a CPU. More gain nothing, and do not fit the caches."""

_log = logging.getLogger(__name__)


def choose_micro_batch(
    config: TrainConfig,
    learner: Learner,
    loaders_of: Callable[[TrainConfig], SplitLoaders],
    world: World,
) -> TrainConfig:
    """Return the settings with a number for `micro_batch_tokens` in place of `auto`.

    All ranks get the same number, and each rank has at least one micro-batch of every step.

    Args:
        config: The settings. A resumed run keeps its number, since its saved position counts
            micro-batches.
        learner: The model of the run. It does not change.
        loaders_of: Returns the loaders of settings with a number.
        world: The ranks.

    Raises:
        ConfigError: Not even the smallest micro-batch fits.
    """
    if config.micro_batch_tokens != "auto":
        return config
    begun = world.from_rank_0(lambda: TrainConfig.of_run(config.run_dir)) if config.resume else None
    if begun is not None:
        return _with_size(config, begun.micro_batch_slots, "as when the run began")
    if config.shard_model and world.size > 1:
        raise ConfigError(
            "`--micro-batch-tokens`=auto does not work with --shard-model. Give a number, or leave "
            "--shard-model out."
        )
    sized = [
        dataclasses.replace(config, micro_batch_tokens=size)
        for size in possible_sizes(config, learner.task)
    ]
    sized = [each for each in sized if each.accumulation >= world.size] or sized[:1]
    if world.device.type == "cpu":
        sized = [each for each in sized if each.micro_batch_slots <= _ON_CPU] or sized[:1]
    for each in reversed(sized):
        peak = peak_of_step(learner, loaders_of(each))
        if all(fits is not None for fits in world.all_gather(peak)):
            reason = f"a step takes {peak / 1e9:.1f} GB" if peak else "on a CPU, more gains nothing"
            return _with_size(config, each.micro_batch_slots, reason)
    raise ConfigError(
        f"`--micro-batch-tokens`=auto: {sized[0].micro_batch_tokens} tokens, the fewest that "
        "divide a step, do not fit into memory. Try --recompute, a smaller --sequence-length or "
        "a smaller --model."
    )


def peak_of_step(learner: Learner, loaders: SplitLoaders) -> int | None:
    """Try a step with the largest micro-batches of training. The learner does not change.

    Returns:
        The memory of a GPU in bytes, with moments, that tensors take; 0 on a CPU; None if the step
        does not fit.
    """
    device, spare = learner.device, 0
    on_gpu = device.type != "cpu"
    if on_gpu:
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(device)
        spare = int(_SPARE_SHARE * cuda.mem_get_info(device)[1])
    shown = loaders.first().blank_like(*loaders.largest_shape())
    try:
        learner.rehearse([shown, shown], spare_bytes=learner.moment_bytes + spare)
        return cuda.max_memory_allocated(device) - spare if on_gpu else 0
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        if on_gpu:
            cuda.empty_cache()


def _with_size(config: TrainConfig, tokens: int, reason: str) -> TrainConfig:
    _log.info("--micro-batch-tokens %d: %s", tokens, reason)
    return dataclasses.replace(config, micro_batch_tokens=tokens)
