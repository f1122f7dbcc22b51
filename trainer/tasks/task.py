"""The base class of tasks: the head that a task needs, its loss, and its scores.

The loop sums losses and targets over the micro-batches of a step, and divides once. So every target
has the same weight, even if micro-batches have different numbers of targets.

Example: loss sums 6 and 16 over 2 and 4 targets make a mean loss of 22 / 6 = 3.67, not (3 + 4) / 2.

Shapes: B rows, T slots, V vocabulary, C outputs.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import IGNORED, TOKEN_TYPE_IDS
from tokenfeed.trainer.data.micro_batch import Head, HeadKind, MicroBatch

_LARGEST_EXPONENT = 700.0  # of a float


Metrics = dict[str, float]
"""Metrics by name. `loss` is the mean per target, in nats."""


class Loss(NamedTuple):
    """The loss of a micro-batch, on the device. It is divided by the targets of the whole step."""

    sum: Tensor
    """fp32, with gradients."""
    targets: Tensor
    """int64, the number of targets in the sum."""


def losses_of(logits_NC: Tensor, targets_N: Tensor) -> Tensor:
    """Return the fp32 cross-entropy of each target, 0 without one."""
    return F.cross_entropy(logits_NC.float(), targets_N, ignore_index=IGNORED, reduction="none")


class Answers(NamedTuple):
    """The true and the predicted values of a split, row after row, each of shape (N,)."""

    true: np.ndarray
    predicted: np.ndarray
    ends_row: np.ndarray
    """Whether a value is the last one of its row."""

    @classmethod
    def of(cls, targets: Tensor, predicted: Tensor) -> "Answers":
        """Return the values of a micro-batch that have a target. Waits for the device."""
        targets_, predicted_ = targets.cpu().numpy(), predicted.cpu().numpy()
        is_number = targets.is_floating_point()
        counted = ~np.isnan(targets_) if is_number else targets_ != IGNORED
        row = np.nonzero(counted)[0]
        ends_row = np.append(row[1:] != row[:-1], True)[: len(row)]
        return cls(targets_[counted], predicted_[counted], ends_row)


class BestBy(NamedTuple):
    """The metric that selects the best weights."""

    metric: str
    less_is_better: bool
    """Whether less is better. Otherwise the metric is a score, and 1 is the best."""

    def lack(self, metrics: Mapping[str, float]) -> float:
        """Return the distance from the best possible value. Less is better."""
        value = metrics[self.metric]
        return value if self.less_is_better else 1 - value


class Task:
    """A task, on the data sets that `manifest` describes."""

    name: ClassVar[str]
    kind: ClassVar[HeadKind]
    apart: ClassVar[bool] = True
    """Whether packed documents are separate by default."""
    best_by: ClassVar[BestBy] = BestBy("loss", less_is_better=True)
    """The metric that selects the best checkpoint."""

    is_compiled = False
    """Whether the loss of chunks is compiled."""
    has_graphs = False
    """Whether the model runs as CUDA graphs."""
    factor: Tensor | None = None
    """Factor of the loss before its backward pass, if the scale for fp16 is part of it."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @property
    def head(self) -> Head:
        """The output that the task needs from a model."""
        tokenizer = self.manifest.tokenizer
        pairs = any(column.name == TOKEN_TYPE_IDS for column in self.manifest.columns)
        return Head(
            kind=self.kind,
            outputs=self.outputs,
            vocabulary_size=tokenizer.vocabulary_size,
            pairs=pairs,
            labels=self.manifest.label_names,
            pad_id=None if tokenizer.end_id in (None, tokenizer.pad_id) else tokenizer.pad_id,
            end_id=tokenizer.end_id,
        )

    @property
    def outputs(self) -> int:
        """Number of logits per token or row."""
        if self.kind == "vocabulary":
            return self.manifest.tokenizer.vocabulary_size
        return len(self.manifest.label_names)

    def begin_pass(self) -> None:
        """Prepare a forward pass. With CUDA graphs, it may overwrite what the pass before made."""
        if self.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def bytes_of_targets(self, micro_batch: MicroBatch) -> Tensor | int:
        """Return the bytes of text that the targets stand for; 0 if the task does not know."""
        return 0

    def loss(self, model: Any, micro_batch: MicroBatch) -> Loss:
        """Return the loss summed over targets."""
        return self.loss_of(model(micro_batch), micro_batch)

    def loss_of(self, logits: Tensor, micro_batch: MicroBatch) -> Loss:
        """Return the loss of existing logits, summed over targets, with a softmax in fp32."""
        targets = micro_batch.targets
        summed = F.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return Loss(summed, (targets != IGNORED).sum())

    def losses(self, model: Any, micro_batch: MicroBatch) -> Tensor:
        """Return the loss of each target, 0 without one, in the shape of the targets. Without
        gradients."""
        return self.losses_of(model(micro_batch), micro_batch)

    def losses_of(self, logits: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return the loss of each target of existing logits; see `losses`."""
        targets = micro_batch.targets
        return losses_of(logits.flatten(0, -2), targets.flatten()).view_as(targets)

    def predict(self, logits: Tensor) -> Tensor:
        """Return the answer to each target of logits; the likeliest class, unless overridden."""
        return logits.argmax(-1)

    def scores(self, answers: Answers) -> dict[str, float]:
        """Return scores besides the loss. Not called for tasks of a vocabulary."""
        return {}

    def of_loss(self, loss: float) -> dict[str, float]:
        """Return metrics that are functions of the mean loss per target, in nats: for a vocabulary
        the perplexity, the number of equally likely choices that would have this loss."""
        if self.kind != "vocabulary":
            return {}
        return {"perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}
