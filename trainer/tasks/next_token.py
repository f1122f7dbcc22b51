"""The next token: of whole documents (`lm`), or of completions after their prompts (`complete`).

Both learn to predict the token after each position. They differ in what has a label at all, and the
loader has seen to that: prompts have none.
"""

import math

import torch.nn.functional as F
from torch import Tensor

from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.tasks.task import Task

__all__ = ["Completion", "LanguageModelling", "perplexity"]

_LARGEST_EXPONENT = 700.0  # of a float


class LanguageModelling(Task):
    """Each token given those before it; in a packed row also those of other documents, which costs
    no quality and saves a mask."""

    name = "lm"
    kind = "vocabulary"
    causal = True
    packs = True
    apart = False

    def targets(self, labels: Tensor) -> Tensor:
        """The label behind each position.

        Shifting the labels copies 8 bytes a token; shifting the logits would copy V floats.
        """
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def of_loss(self, loss: float) -> dict[str, float]:
        """Perplexity."""
        return perplexity(loss)


class Completion(LanguageModelling):
    """Each token of a completion given its prompt and those before it, and nothing else."""

    name = "complete"
    apart = True


def perplexity(loss: float) -> dict[str, float]:
    """The number of equally likely choices that would have this loss."""
    return {"perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}
