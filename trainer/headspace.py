"""`--headspace N`: how fast training would be if nothing had to be waited for.

N steps over batches that are ready on the device, without loading, logging, saving or evaluating,
on a learner of its own that is thrown away: training then goes on as if nothing had been. Feeding
cannot make a run faster than this; what is left is the model's own arithmetic.
"""

import contextlib
import dataclasses
import logging
import time

import torch

from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.course import Course, Lesson
from tokenfeed.trainer.feeds import feeds_by_task
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.precision import Precision
from tokenfeed.trainer.ranks.world import World
from tokenfeed.trainer.tasks.registry import learnt_by
from tokenfeed.trainer.tasks.several import Learnt

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
    task = learnt_by(config, device)
    precision = Precision(config.precision, device)
    feeds = feeds_by_task(config, task, device, precision.dtype)
    learner = Learner(config, task, precision, device)
    if config.compile:
        learner.compile([blank for each in feeds.values() for blank in each.blanks()])
    begun = dataclasses.replace(config, resume=False)
    with contextlib.closing(Course(begun, feeds, learner)) as course:
        ready = _ready_steps(course, config)
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


def _ready_steps(course: Course, config: TrainConfig) -> list[_Step]:
    """The first steps of the run on the device; with more, they come again."""
    most = max(1, min(config.headspace, _MOST_READY // config.accumulation))
    return [_ready_step(course.lesson(step)) for step in range(1, most + 1)]


def _ready_step(lesson: Lesson) -> _Step:
    found, ends_step = [], False
    while not ends_step:
        batch, _, ends_step = next(lesson.feed)
        found.append((lesson.shape(batch), batch.num_tokens))
    return found


def _step(learner: Learner, task: Learnt, shown: _Step, step: int) -> None:
    targets = torch.zeros((), dtype=torch.int64, device=shown[0][0].ids_BT.device)
    for number, (micro_batch, _) in enumerate(shown):
        targets = targets + learner.add_gradients(task.prepare(micro_batch, number)).targets
    learner.step(step + 1, targets)


def _wait(device: torch.device) -> None:
    """Until the device has done all that was queued."""
    if device.type != "cpu":
        accelerator(device).module.synchronize(device)
