"""A loader's batches with their places in the steps of the optimizer.

A step is a step of the loader: `accumulation` micro-batches over all ranks, of which a rank has its
share. A resumed run keeps the loader's steps; where --step-tokens was raised, several of them make
a step.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader

__all__ = ["Dealt", "step_feed"]


class Dealt(NamedTuple):
    """A batch, and where it stands."""

    batch: Batch
    part: int
    """Which micro-batch of its step, over all ranks."""
    ends_step: bool


def step_feed(loader: ShardLoader, accumulation: int) -> Iterator[Dealt]:
    """The batches of a loader, from the beginning of a step on.

    Raises:
        ConfigError: The ranks are more than the micro-batches, or these make no whole step.
    """
    of_loader = loader.micro_batches_per_step
    if accumulation % of_loader:
        raise ConfigError(
            f"`--step-tokens`: makes steps of {accumulation} micro-batches, and the run was begun "
            f"with {of_loader}. Give a multiple, or start a new run in another --run-dir."
        )
    if loader.world_size > of_loader:
        raise ConfigError(
            f"`--micro-batch-tokens`: {loader.world_size} ranks share {of_loader} micro-batches of "
            "a step, so some would have none. Lower it, as auto does, or start "
            f"at most {of_loader} ranks."
        )
    return _dealt(loader, accumulation // of_loader, of_loader)


def _dealt(loader: ShardLoader, together: int, of_loader: int) -> Iterator[Dealt]:
    batches = iter(loader)
    while True:
        for nth in range(together):
            part, ends = nth * of_loader + loader.rank, False
            while not ends:
                batch = next(batches)
                ends = batch.ends_step
                yield Dealt(batch, part, ends and nth + 1 == together)
                part += loader.world_size
