"""Classification: predict a class for each row, such as the emotion of a tweet.

The scores are accuracy, the accuracy of always predicting the most frequent class, and macro-F1,
the mean F1 of the classes.
"""

from typing import Any

import torch
from torch import Tensor

from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.tasks.task import BestBy, Scores, Task

__all__ = ["Classify"]


class Classify(Task):
    """Predict the class of each row."""

    name = "classify"
    kind = "row"
    causal = False
    packs = False
    best_by = BestBy("macro_f1", less_is_better=False)

    def scores(self, device: torch.device) -> Scores:
        """Return an accumulator of accuracy and macro-F1."""
        return ClassScores(self.outputs, device)


class ClassScores:
    """Counts pairs of a true and a predicted class, on the device."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self._counts_CC = torch.zeros((classes, classes), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add predictions. Targets that are `IGNORED` are left out."""
        counted = (targets != IGNORED).flatten()
        pair = targets.flatten().clamp(min=0) * self._classes + logits.argmax(-1).flatten()
        self._counts_CC.view(-1).index_add_(0, pair, counted.long())

    def sums(self, world: World) -> list[Tensor]:
        """Return the counts."""
        return [self._counts_CC]

    def result(self) -> dict[str, float]:
        """Return accuracy, majority_accuracy and macro_f1; all are 0 without targets."""
        counts_CC = self._counts_CC.double().cpu()
        right_C, true_C, predicted_C = counts_CC.diag(), counts_CC.sum(1), counts_CC.sum(0)
        total = max(1.0, true_C.sum().item())
        f1_C = 2 * right_C / (true_C + predicted_C).clamp(min=1)
        seen_C = true_C + predicted_C > 0  # classes that do not occur are left out
        scores: dict[str, Any] = {
            "accuracy": right_C.sum() / total,
            "majority_accuracy": true_C.max() / total,
            "macro_f1": f1_C.sum() / seen_C.sum().clamp(min=1),
        }
        return {name: float(value) for name, value in scores.items()}
