"""Evaluation: the loss and the scores of a split, in the order of the plan, each time alike."""

import contextlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.data_sets import DataSets
from tokenfeed.trainer.feeds import Feeds
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.precision import Precision
from tokenfeed.trainer.ranks.shares import reshard
from tokenfeed.trainer.ranks.world import World
from tokenfeed.trainer.tasks.task import Loss, Scores, Task

__all__ = ["Evaluator", "Metrics", "evaluate", "over_all"]

Metrics = dict[str, float]
"""By name; `loss` is the mean per target, in nats."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    micro_batches: Iterable[tuple[int, MicroBatch]],
    precision: Precision,
    world: World,
) -> Metrics:
    """What a model makes of a split; waits for the device at its end, and where scores do. Nothing
    where the split has no target: a mean of nothing would look like the best of all.

    Args:
        model: In training, as it is again afterwards.
        task: Says what is asked of it.
        micro_batches: This rank's, with their numbers.
        precision: What the model computes in.
        world: Whose ranks have the rest of the split.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    targets = torch.zeros((), dtype=torch.int64, device=device)
    scores = task.scores(device)
    model.eval()
    for number, shown in micro_batches:
        micro_batch = task.prepare(shown, number)
        with precision.autocast():
            loss = _loss(model, task, micro_batch, scores)
        total += loss.sum
        targets += loss.targets
    model.train()
    reshard(model)
    world.add_up([total, targets, *(scores.sums(world) if scores else [])])
    if not int(targets):
        return {}
    mean = float(total) / int(targets)
    found = scores.result() if scores else {}
    if math.isnan(mean):  # so are predictions, and they are worth nothing
        found = dict.fromkeys(found, math.nan)
    return {"loss": mean} | task.of_loss(mean) | found


def over_all(found: Mapping[str, Metrics], data: DataSets, task: Task) -> Metrics:
    """The metrics of several data sets as one: the mean of each by weight, and with names behind a
    stroke those of each data set; of one alone its own.

    Args:
        found: By folder. A data set without metrics does not count.
        data: Has weights and names.
        task: Says what follows from the mean loss.
    """
    known = {folder: metrics for folder, metrics in found.items() if metrics}
    if len(found) == 1 or not known:
        return next(iter(known.values()), {})
    shares = {folder: data.weights[folder] for folder in known}
    means = {
        metric: sum(shares[folder] * known[folder][metric] for folder in known)
        / sum(shares.values())
        for metric in next(iter(known.values()))
    }
    names = data.names
    each = {f"{m}/{names[folder]}": value for folder in known for m, value in known[folder].items()}
    return means | task.of_loss(means["loss"]) | each


def _loss(model: nn.Module, task: Task, micro_batch: MicroBatch, scores: Scores | None) -> Loss:
    """The loss; logits are asked for only where they are scored."""
    if scores is None:
        return task.loss(model, micro_batch)
    logits = model(micro_batch)
    scores.add(logits, task.targets(micro_batch.labels))
    return task.loss_of(logits, micro_batch)


class Evaluator:
    """Evaluate the splits of a run's data sets."""

    def __init__(self, config: TrainConfig, feeds: Feeds, learner: Learner, world: World) -> None:
        self._data, self._most = DataSets.read(config.shards), config.eval_batches
        self._feeds, self._learner, self._world = feeds, learner, world

    def has(self, split: str) -> bool:
        """Whether any data set has this split."""
        return bool(self._data.having(split))

    def metrics_of(self, split: str) -> Metrics:
        """The metrics of a split of all data sets that have it, as one."""
        found = {folder: self._metrics_on(folder, split) for folder in self._data.having(split)}
        return over_all(found, self._data, self._learner.task)

    def _metrics_on(self, folder: str, split: str) -> Metrics:
        learner = self._learner
        with contextlib.closing(self._feeds.numbered(split, self._most, folder)) as shown:
            return evaluate(learner.model, learner.task, shown, learner.precision, self._world)
