"""Evaluate a split: its loss and scores, in the order of the plan, the same each time.

The results go to the metrics file and the progress lines; the best step is kept.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from tokenfeed.trainer.checkpoints.metadata import Best
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import DataSets
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.fsdp import reshard
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.feeding.loaders import SplitLoaders
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.report.metrics_file import MetricsFile
from tokenfeed.trainer.tasks.task import BestBy, Loss, Metrics, Scores, Task

__all__ = ["Evaluator", "Judge", "evaluate", "over_all"]

_SECONDS_BETWEEN = 10.0
"""Between two lines of progress."""

_log = logging.getLogger(__name__)


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
    world.all_reduce([total, targets, *(scores.sums(world) if scores else [])])
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
    """Evaluate the splits of a run's data sets.

    Args:
        config: How many tokens an evaluation may have.
        loaders: Gives the micro-batches of a split.
        learner: Has the model.
        world: The ranks, which share a split.
        should_stop: Asked before each micro-batch of a split, by all ranks alike; True ends the
            evaluation.
    """

    def __init__(
        self,
        config: TrainConfig,
        loaders: SplitLoaders,
        learner: Learner,
        world: World,
        should_stop: Callable[[str], bool],
    ) -> None:
        self._data, self._config = DataSets.read(config.shards), config
        self._loaders, self._learner, self._world = loaders, learner, world
        self._should_stop = should_stop
        self._is_new = True
        self.was_stopped = False
        """Whether an evaluation was ended before its last micro-batch."""

    def has(self, split: str) -> bool:
        """Whether any data set has this split."""
        return bool(self._data.having(split))

    def metrics_of(self, split: str) -> Metrics:
        """The metrics of a split of all data sets that have it, as one; empty if stopped."""
        folders = self._data.having(split)
        found = {folder: self._metrics_on(folder, split, len(folders)) for folder in folders}
        self._is_new = False
        return {} if self.was_stopped else over_all(found, self._data, self._learner.task)

    def _metrics_on(self, folder: str, split: str, folders: int) -> Metrics:
        learner, info = self._learner, self._data.manifest_of(folder).split(split)
        limit = self._most_tokens(split)
        tokens = info.tokens if limit is None else min(info.tokens, max(1, limit // folders))
        due = self._loaders.micro_batches_of(tokens, info)
        most = due if tokens < info.tokens else None
        if self._is_new:
            _log.info("evaluating about %s tokens of %s in %s", f"{tokens:,}", split, folder)
        with contextlib.closing(self._loaders.evaluation_batches(split, most, folder)) as shown:
            watched = self._watched(shown, split, due)
            return evaluate(learner.model, learner.task, watched, learner.precision, self._world)

    def _most_tokens(self, split: str) -> int | None:
        """The test split, evaluated once, may have as many tokens as all other evaluations."""
        config = self._config
        if config.eval_tokens is None or split != "test":
            return config.eval_tokens
        return config.eval_tokens * (1 + math.ceil(config.steps / config.eval_every))

    def _watched(
        self, micro_batches: Iterable[tuple[int, MicroBatch]], split: str, due: int
    ) -> Iterator[tuple[int, MicroBatch]]:
        """Yield the micro-batches until the run is to stop; log progress now and then.

        Args:
            micro_batches: This rank's.
            split: Of which split, for the log.
            due: About how many all ranks have together.
        """
        logged_s = time.monotonic()
        for nth, numbered in enumerate(micro_batches):
            if self._should_stop(split):
                self.was_stopped = True
                return
            if time.monotonic() - logged_s > _SECONDS_BETWEEN:
                logged_s = time.monotonic()
                done = min(0.99, nth * self._world.size / due)
                _log.info("evaluating %s: %.0f %% done", split, 100 * done)
            yield numbered


class Judge:
    """Judges the weights of a run.

    Args:
        evaluator: Knows the splits.
        best_by: The metric that decides, and how.
    """

    def __init__(self, evaluator: Evaluator, best_by: BestBy) -> None:
        self._evaluator, self._best_by = evaluator, best_by
        self.best: Best | None = None
        """Of all steps so far."""

    def metrics_of(self, split: str, step: int, told: MetricsFile | None) -> Metrics:
        """The metrics of a split at a step; nothing where there is no such split, or no target.

        Args:
            split: Of all data sets that have it.
            step: The latest one.
            told: Receives the metrics as a line, which is also logged; None on ranks other than 0.
        """
        if not self._evaluator.has(split):
            return {}
        metrics = self._evaluator.metrics_of(split)
        if self._evaluator.was_stopped:
            _log.info("step %d | the evaluation of %s was stopped", step, split)
        elif not metrics:
            _log.warning("the split %s has no target: nothing to evaluate", split)
        elif told is not None:
            told.write({"step": step} | {f"{split}_{name}": v for name, v in metrics.items()})
            shown = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            _log.info("step %d | %s %s", step, split, shown)
        return metrics

    def note(self, step: int, metrics: Metrics) -> None:
        """Take a step that will be saved for the best one, if none did better before."""
        lack, before = self._best_by.lack(metrics), self.best
        if math.isfinite(lack) and (before is None or lack < self._best_by.lack(before.metrics)):
            self.best = Best(step=step, metric=self._best_by.metric, metrics=metrics)
