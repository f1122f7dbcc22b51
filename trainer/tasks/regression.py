"""Regression: predict a number for each row, such as the similarity of two texts.

The loss is the squared error. The scores are its root (rmse), the rmse of always predicting the
mean, and Pearson's correlation, which is 0 for a constant prediction.
"""

import torch
from torch import Tensor

from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.tasks.task import Loss, Scores, Task

__all__ = ["Score"]


class Score(Task):
    """Predict the score of each row."""

    name = "score"
    kind = "row"
    causal = False
    packs = False

    @property
    def outputs(self) -> int:
        """One number."""
        return 1

    def loss_of(self, logits: Tensor, micro_batch: MicroBatch) -> Loss:
        """Return the squared error summed over rows with a score, in fp32."""
        scores_B = micro_batch.labels
        counted_B = ~scores_B.isnan()
        # NaN times 0 is NaN, also in a gradient. So rows without a score are compared with 0.
        error_B = logits.squeeze(-1).float() - torch.where(counted_B, scores_B, 0.0)
        return Loss((error_B.square() * counted_B).sum(), counted_B.sum())

    def scores(self, device: torch.device) -> Scores:
        """Return an accumulator of rmse, mean_rmse and pearson."""
        return ScoreScores(device)


class ScoreScores:
    """Sums over true and predicted numbers, on the device, in double precision.

    The first label and the first prediction are subtracted from all numbers. Otherwise sums of
    squares would lose the digits of small differences between large numbers.

    Example: the labels 1e9 and 1e9 + 1 have a variance of 0.25. Their squares near 1e18 are
        rounded to multiples of 128. Relative to the first label, the numbers are 0 and 1.
    """

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.zeros(2, dtype=torch.float64, device=device)
        self._has_origin = torch.zeros((), dtype=torch.bool, device=device)
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        """Count, true, predicted, true^2, predicted^2, true * predicted, error^2."""

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add predictions, shape (B, 1). Targets that are NaN are left out."""
        if not len(targets):
            return
        counted_B = ~targets.isnan()
        true_B = torch.where(counted_B, targets, 0.0).double()
        guess_B = torch.where(counted_B, logits.squeeze(-1), 0.0).double()
        first = counted_B.int().argmax(0, keepdim=True)
        begins = counted_B.any() & ~self._has_origin
        numbers_2B = torch.stack((true_B, guess_B))
        self._origin = torch.where(begins, numbers_2B.index_select(1, first)[:, 0], self._origin)
        self._has_origin |= counted_B.any()
        true_B, guess_B = (numbers_2B - self._origin[:, None]) * counted_B
        products = (true_B, guess_B, true_B**2, guess_B**2, true_B * guess_B)
        error2_B = (numbers_2B[1] - numbers_2B[0]) ** 2
        self._sums += torch.stack(
            [each.sum() for each in (counted_B.double(), *products, error2_B)]
        )

    def sums(self, world: World) -> list[Tensor]:
        """Return the sums relative to one origin on all ranks. Waits for the device."""
        origins = world.all_gather(self._origin.tolist() if self._has_origin else None)
        common = next((origin for origin in origins if origin is not None), None)
        if common is not None and self._has_origin:
            count, true, guess, true2, guess2, both, error2 = self._sums.tolist()
            by, guess_by = (
                own - other for own, other in zip(self._origin.tolist(), common, strict=True)
            )
            moved = (
                count,
                true + count * by,
                guess + count * guess_by,
                true2 + 2 * by * true + count * by**2,
                guess2 + 2 * guess_by * guess + count * guess_by**2,
                both + by * guess + guess_by * true + count * by * guess_by,
                error2,
            )
            self._sums = self._sums.new_tensor(moved)
        return [self._sums]

    def result(self) -> dict[str, float]:
        """Return rmse, mean_rmse and pearson; all are 0 without targets."""
        count, *sums = self._sums.tolist()
        true, guess, true2, guess2, both, error2 = (value / max(1.0, count) for value in sums)
        spread, guess_spread = max(true2 - true**2, 0.0), max(guess2 - guess**2, 0.0)
        scale = (spread * guess_spread) ** 0.5
        pearson = (both - true * guess) / scale if scale else 0.0
        return {
            "rmse": error2**0.5,
            "mean_rmse": spread**0.5,
            "pearson": min(max(pearson, -1.0), 1.0),
        }
