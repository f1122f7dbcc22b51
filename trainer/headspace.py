"""`--headspace N`: how fast training would be if nothing had to be waited for.

N steps over batches that are ready on the device, without loading, logging, saving or evaluating,
on a learner of its own that is thrown away: training then goes on as if nothing had been. Feeding
cannot make a run faster than this; what is left is the model's own arithmetic.
"""

import logging
import time

import torch

from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.data_sets import run_manifest
from tokenfeed.trainer.feeds import Feeds
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.phases import phases_of
from tokenfeed.trainer.precision import Precision
from tokenfeed.trainer.ranks.world import World
from tokenfeed.trainer.step_feed import step_feed
from tokenfeed.trainer.tasks.registry import make_task
from tokenfeed.trainer.tasks.task import Task

__all__ = ["ready_tokens_per_s"]

_WARM_UP = 3
_MOST_READY = 64
"""Micro-batches that are kept on the device."""

_Step = list[tuple[MicroBatch, int]]
"""Micro-batches, with their real tokens."""

_log = logging.getLogger(__name__)


def ready_tokens_per_s(config: TrainConfig, world: World) -> float | None:
    """Real tokens per second of all ranks in `config.headspace` steps on ready batches, each rank
    by itself; None without steps."""
    if not config.headspace:
        return None
    device = world.device
    task = make_task(config, run_manifest(config), device)
    precision = Precision(config.precision, device)
    feeds = Feeds(config, task, device, precision.dtype)
    learner = Learner(config, task, precision, device)
    if config.compile:
        learner.compile(feeds.blanks())
    ready = _ready_steps(feeds, config)
    for step in range(_WARM_UP):
        _step(learner, task, ready[step % len(ready)], step)
    _wait(device)
    started_s, tokens = time.perf_counter(), 0
    for step in range(config.headspace):
        shown = ready[step % len(ready)]
        _step(learner, task, shown, step)
        tokens += sum(count for _, count in shown)
    _wait(device)
    found = sum(world.gathered(tokens / (time.perf_counter() - started_s)))
    _log.info("headspace: %s real tok/s where every batch is ready", f"{found:,.0f}")
    return found


def _ready_steps(feeds: Feeds, config: TrainConfig) -> list[_Step]:
    """The first steps of the run on the device; with more, they come again."""
    found: list[_Step] = [[]]
    most = max(1, min(config.headspace, _MOST_READY // config.accumulation))
    with feeds.training(phases_of(config)[0], goes_on=False) as loader:
        for batch, _, ends_step in step_feed(loader, config.accumulation):
            found[-1].append((feeds.shape(batch), batch.num_tokens))
            if ends_step and len(found) == most:
                return found
            if ends_step:
                found.append([])
    raise AssertionError("the training split ends")


def _step(learner: Learner, task: Task, shown: _Step, step: int) -> None:
    targets = torch.zeros((), dtype=torch.int64, device=shown[0][0].ids_BT.device)
    for number, (micro_batch, _) in enumerate(shown):
        targets = targets + learner.add_gradients(task.prepare(micro_batch, number)).targets
    learner.step(step + 1, targets)


def _wait(device: torch.device) -> None:
    """Until the device has done all that was queued."""
    if device.type != "cpu":
        accelerator(device).module.synchronize(device)
