"""What a model is trained for: the next token, summed over targets.

A sum, not a mean: micro-batches hold different numbers of targets, and a mean of means would weigh
their tokens differently. Who divides, and by what, is the loop's business.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.precision import Precision

__all__ = ["evaluate", "loss_sum"]


def loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Cross-entropy of every target given the tokens before it, summed; a softmax in fp32.

    Args:
        logits_BTV: Position t predicts token t + 1.
        labels_BT: The tokens themselves, not shifted, or `IGNORED`.
    """
    # Shifting the labels copies 8 bytes a token; shifting the logits would copy V floats.
    targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        targets_BT.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


@torch.no_grad()
def evaluate(model: nn.Module, feed: Iterable[Batch], precision: Precision) -> float:
    """Mean loss per target token of all of `feed`, in nats."""
    total: Tensor | float = 0.0
    targets = 0
    for batch in feed:
        with precision.autocast():
            total += loss_sum(model(batch["input_ids"]), batch["labels"]).double()
        targets += batch.num_targets
    return float(total) / max(1, targets)
