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

__all__ = ["batch_loss", "evaluate", "loss_sum"]


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


def batch_loss(model: nn.Module, batch: Batch, least_slots: int = 0) -> Tensor:
    """The loss of a micro-batch, summed over its targets.

    Args:
        model: Token ids to logits.
        batch: The micro-batch.
        least_slots: Fewer are filled up with empty rows: a compiled model that meets another shape
            is compiled again, for a minute.
    """
    ids_BT, labels_BT = batch["input_ids"], batch["labels"]
    missing_rows = (least_slots - batch.num_slots) // ids_BT.shape[1]
    if missing_rows > 0:
        ids_BT = F.pad(ids_BT, (0, 0, 0, missing_rows))
        labels_BT = F.pad(labels_BT, (0, 0, 0, missing_rows), value=IGNORED)
    return loss_sum(model(ids_BT), labels_BT)


@torch.no_grad()
def evaluate(
    model: nn.Module, feed: Iterable[Batch], precision: Precision, least_slots: int = 0
) -> float:
    """Mean loss per target token of all of `feed`, in nats; `least_slots` as in `batch_loss`."""
    total: Tensor | float = 0.0
    targets = 0
    for batch in feed:
        with precision.autocast():
            total += batch_loss(model, batch, least_slots).double()
        targets += batch.num_targets
    return float(total) / max(1, targets)
