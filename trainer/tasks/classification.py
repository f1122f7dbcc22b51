"""Classification: one class for each row, as of a tweet's emotion.

Scores: accuracy beside that of always guessing the most frequent class, and macro-F1, the mean of
the classes' F1, which such a guess does not get for nothing.
"""

from typing import Any

import torch
from torch import Tensor

from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.tasks.task import BestBy, Scores, Task

__all__ = ["Classify"]


class Classify(Task):
    """The class of a row."""

    name = "classify"
    kind = "row"
    causal = False
    packs = False
    best_by = BestBy("macro_f1", less_is_better=False)

    def scores(self, device: torch.device) -> Scores:
        """Accuracy and macro-F1."""
        return ClassScores(self.outputs, device)


class ClassScores:
    """Counts pairs of true and predicted class, on the device."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self._counts_CC = torch.zeros((classes, classes), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add predictions; targets that are `IGNORED` count for nothing."""
        counted = (targets != IGNORED).flatten()
        pair = targets.flatten().clamp(min=0) * self._classes + logits.argmax(-1).flatten()
        self._counts_CC.view(-1).index_add_(0, pair, counted.long())

    def sums(self, world: World) -> list[Tensor]:
        """The counts."""
        return [self._counts_CC]

    def result(self) -> dict[str, float]:
        """accuracy, majority_accuracy, macro_f1; of nothing all are 0."""
        counts_CC = self._counts_CC.double().cpu()
        right_C, true_C, predicted_C = counts_CC.diag(), counts_CC.sum(1), counts_CC.sum(0)
        total = max(1.0, true_C.sum().item())
        f1_C = 2 * right_C / (true_C + predicted_C).clamp(min=1)
        seen_C = true_C + predicted_C > 0  # a class that is nowhere is no failure
        scores: dict[str, Any] = {
            "accuracy": right_C.sum() / total,
            "majority_accuracy": true_C.max() / total,
            "macro_f1": f1_C.sum() / seen_C.sum().clamp(min=1),
        }
        return {name: float(value) for name, value in scores.items()}
