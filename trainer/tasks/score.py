"""Regression: a number for each row, as of how alike two texts are.

The loss is the squared error. Scores: its root (rmse) beside that of always guessing the mean, and
Pearson's correlation, which no such guess has.
"""

import torch
from torch import Tensor

from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.tasks.task import Loss, Scores, Task

__all__ = ["Score"]


class Score(Task):
    """The score of a row."""

    name = "score"
    kind = "row"
    causal = False
    packs = False

    @property
    def outputs(self) -> int:
        """One number."""
        return 1

    def loss_of(self, logits: Tensor, micro_batch: MicroBatch) -> Loss:
        """Squared error summed over rows that have a score; in fp32."""
        scores_B = micro_batch.labels
        counted_B = ~scores_B.isnan()
        # A NaN times 0 is a NaN, also in a gradient: rows without a score are compared with 0.
        error_B = logits.squeeze(-1).float() - torch.where(counted_B, scores_B, 0.0)
        return Loss((error_B.square() * counted_B).sum(), counted_B.sum())

    def scores(self, device: torch.device) -> Scores:
        """rmse, mean_rmse and pearson."""
        return ScoreScores(device)


class ScoreScores:
    """Sums over true and predicted numbers, on the device, in double precision."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add predictions, shape (B, 1); targets that are NaN count for nothing."""
        counted_B = ~targets.isnan()
        true_B = torch.where(counted_B, targets, 0.0).double()
        guess_B = logits.squeeze(-1).double() * counted_B
        products = (counted_B.double(), true_B, guess_B, true_B**2, guess_B**2, true_B * guess_B)
        self._sums += torch.stack([product.sum() for product in products])

    def sums(self) -> list[Tensor]:
        """The sums."""
        return [self._sums]

    def result(self) -> dict[str, float]:
        """rmse, mean_rmse, pearson; of nothing all are 0."""
        count, *sums = self._sums.tolist()
        true, guess, true2, guess2, both = (value / max(1.0, count) for value in sums)
        spread, guess_spread = max(0.0, true2 - true**2), max(0.0, guess2 - guess**2)
        scale = (spread * guess_spread) ** 0.5
        return {
            "rmse": max(0.0, true2 - 2 * both + guess2) ** 0.5,
            "mean_rmse": spread**0.5,
            "pearson": (both - true * guess) / scale if scale else 0.0,
        }
