"""What evaluations find: told where all figures go, and which step did best by them."""

import logging
import math

from tokenfeed.trainer.checkpoints.meta import Best
from tokenfeed.trainer.evaluation import Evaluator, Metrics
from tokenfeed.trainer.metrics_file import MetricsFile
from tokenfeed.trainer.tasks.task import BestBy

__all__ = ["Judge"]

_log = logging.getLogger(__name__)


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
