"""Evaluation: the loss and the scores of a split, in the order of the plan, each time alike."""

import contextlib
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from tokenfeed.trainer.by_task import config_by_task
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.data_sets import DataSets
from tokenfeed.trainer.feeds import Feeds
from tokenfeed.trainer.learner import Learner
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.precision import Precision
from tokenfeed.trainer.ranks.shares import reshard
from tokenfeed.trainer.ranks.world import World
from tokenfeed.trainer.tasks.several import LEFT
from tokenfeed.trainer.tasks.task import Loss, Scores, Task

__all__ = [
    "Evaluator",
    "Metrics",
    "evaluate",
    "metrics_by_task",
    "over_all",
    "over_tasks",
]

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
    world.add_up([total, targets, *(scores.sums() if scores else [])])
    if not int(targets):
        return {}
    mean = float(total) / int(targets)
    return {"loss": mean} | task.of_loss(mean) | (scores.result() if scores else {})


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


def over_tasks(found: Mapping[str, Metrics], left: Mapping[str, float]) -> Metrics:
    """The metrics of several tasks as those of one: with each task's name behind a stroke, and
    `left`, the mean of what is left to learn of each.

    Args:
        found: By task. One without metrics does not count.
        left: By task; of none there is no mean.
    """
    overall = {LEFT: sum(left.values()) / len(left)} if left else {}
    return overall | {
        _of_task(name, task): value
        for task, metrics in found.items()
        for name, value in metrics.items()
    }


def metrics_by_task(metrics: Metrics, names: Collection[str]) -> dict[str, Metrics]:
    """What `over_tasks` has made one, apart again; those of one task without a name are its own."""
    if [*names] == [""]:
        return {"": metrics}
    return {
        name: {
            key.replace(f"/{name}", "", 1): value
            for key, value in metrics.items()
            if "/" in key and key.split("/")[1] == name
        }
        for name in names
    }


def _of_task(metric: str, task: str) -> str:
    """The task's name before that of a data set."""
    name, stroke, data_set = metric.partition("/")
    return f"{name}/{task}{stroke}{data_set}"


def _loss(model: nn.Module, task: Task, micro_batch: MicroBatch, scores: Scores | None) -> Loss:
    """The loss; logits are asked for only where they are scored."""
    if scores is None:
        return task.loss(model, micro_batch)
    logits = model(micro_batch)
    scores.add(logits, task.targets(micro_batch.labels))
    return task.loss_of(logits, micro_batch)


class Evaluator:
    """Evaluates the splits of a run's tasks.

    `first` is what each of several tasks lacked when it was evaluated first; a run that goes on has
    it from its checkpoint.
    """

    def __init__(
        self, config: TrainConfig, feeds: Mapping[str, Feeds], learner: Learner, world: World
    ) -> None:
        configs = config_by_task(config)
        self._data = {name: DataSets.read(own.shards) for name, own in configs.items()}
        self._most, self._feeds = config.eval_batches, feeds
        self._learner, self._world = learner, world
        self.first: dict[str, float] = {}

    def has(self, split: str) -> bool:
        """Whether there is anything to evaluate."""
        return any(data.having(split) for data in self._data.values())

    def metrics_of(self, split: str) -> Metrics:
        """The metrics of a split of all data sets that have it, as one."""
        found = {name: self._of_one_task(name, split) for name in self._data}
        if len(found) == 1:
            return found[""]
        return over_tasks(found, self._left(found) if split == "validation" else {})

    def _left(self, found: Mapping[str, Metrics]) -> dict[str, float]:
        """What each task lacks, as a part of what it lacked at first: no task counts for more
        because its losses are larger."""
        parts = self._learner.task.parts
        lacks = {
            name: parts[name].best_by.lack(metrics) for name, metrics in found.items() if metrics
        }
        self.first = lacks | self.first
        return {name: lack / (self.first[name] or 1.0) for name, lack in lacks.items()}

    def _of_one_task(self, name: str, split: str) -> Metrics:
        data, task = self._data[name], self._learner.task.parts[name]
        found = {folder: self._metrics_on(name, folder, split) for folder in data.having(split)}
        return over_all(found, data, task)

    def _metrics_on(self, name: str, folder: str, split: str) -> Metrics:
        learner, task = self._learner, self._learner.task.parts[name]
        with contextlib.closing(self._feeds[name].numbered(split, self._most, folder)) as shown:
            return evaluate(learner.model, task, shown, learner.precision, self._world)
