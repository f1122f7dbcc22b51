"""What a task is: the head it asks for, the loss it sums, the scores it is judged by.

A task knows nothing of steps: the loop sums losses and targets over the micro-batches of a step,
and divides once. So every target weighs the same, however unequal the micro-batches are.

Shapes: B rows, T slots, V vocabulary, C outputs.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import IGNORED, TOKEN_TYPE_IDS
from tokenfeed.trainer.data.head import HasHidden, Head, HeadKind, has_hidden
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.tasks.chunked_loss import (
    is_worth_chunks,
    most_chunk_tokens,
    vocabulary_loss,
)

__all__ = ["BestBy", "Loss", "Metrics", "Scores", "Task"]


Metrics = dict[str, float]
"""By name; `loss` is the mean per target, in nats."""


class Loss(NamedTuple):
    """A loss on the device, to be divided by its targets once all of them are known."""

    sum: Tensor
    """fp32, with gradients."""
    targets: Tensor
    """int64: how many targets were summed over."""


class Scores(Protocol):
    """Adds up what predictions are worth."""

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add a micro-batch; `targets` has the shape of the logits but for the last."""
        ...

    def sums(self, world: World) -> list[Tensor]:
        """What `add` adds to: the sums of all ranks, added up, are those of the whole split. All
        ranks call this together, and `add` no more."""
        ...

    def result(self) -> dict[str, float]:
        """The scores by name; waits for the device."""
        ...


class BestBy(NamedTuple):
    """The metric that weights are judged by, and which way it is better."""

    metric: str
    less_is_better: bool
    """Else it is a score of which 1 is the best."""

    def lack(self, metrics: Mapping[str, float]) -> float:
        """What is left to learn; the less, the better. Of a score, what it lacks of 1."""
        value = metrics[self.metric]
        return value if self.less_is_better else 1 - value


class Task:
    """What a model is trained for, on one data set."""

    name: ClassVar[str]
    kind: ClassVar[HeadKind]
    causal: ClassVar[bool]
    """Whether a token sees only those before it."""
    packs: ClassVar[bool]
    """Whether rows are packed unless the user says otherwise."""
    apart: ClassVar[bool] = True
    """Whether packed documents are kept apart unless the user says otherwise."""
    best_by: ClassVar[BestBy] = BestBy("loss", less_is_better=True)
    """How the best checkpoint is known."""

    def __init__(self, manifest: Manifest, seed: int) -> None:
        self.manifest = manifest
        self.seed = seed

    @property
    def head(self) -> Head:
        """What a model has to give."""
        tokenizer = self.manifest.tokenizer
        pairs = any(column.name == TOKEN_TYPE_IDS for column in self.manifest.columns)
        return Head(
            kind=self.kind,
            outputs=self.outputs,
            vocabulary_size=self.vocabulary_size,
            causal=self.causal,
            pairs=pairs,
            labels=self.manifest.label_names,
            pad_id=None if tokenizer.end_id in (None, tokenizer.pad_id) else tokenizer.pad_id,
        )

    @property
    def vocabulary_size(self) -> int:
        """Ids that a model is shown are below this."""
        return self.manifest.tokenizer.vocabulary_size

    @property
    def outputs(self) -> int:
        """Logits of a token or row."""
        if self.kind == "vocabulary":
            return self.vocabulary_size
        return len(self.manifest.label_names)

    def prepare(self, micro_batch: MicroBatch, number: int) -> MicroBatch:
        """What is shown to the model; `number` counts the micro-batches since the first step."""
        return micro_batch

    def targets(self, labels: Tensor) -> Tensor:
        """What each logit is compared with, or `IGNORED`."""
        return labels

    @property
    def logits_at_once(self) -> int:
        """Tokens of a micro-batch from which on its loss takes no more memory."""
        return most_chunk_tokens(self.vocabulary_size) if self.kind == "vocabulary" else 1

    def most_targets(self, slots: int) -> int:
        """How many targets so many slots can have: a shape that does not depend on the draw."""
        return slots

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Loss:
        """Cross-entropy summed over targets; where logits of all tokens would be large, and the
        model hands out what its head sees, they never exist."""
        if (
            self.kind == "vocabulary"
            and has_hidden(model)
            and is_worth_chunks(micro_batch.num_slots, len(model.head_weight))
        ):
            return self._loss_in_chunks(model, micro_batch)
        return self.loss_of(model(micro_batch), micro_batch)

    def _loss_in_chunks(self, model: HasHidden, micro_batch: MicroBatch) -> Loss:
        hidden_ND = model.hidden(micro_batch).flatten(0, 1)
        targets_N = self.targets(micro_batch.labels).flatten()
        most = self.most_targets(len(targets_N))
        if most < len(targets_N):
            chosen = (targets_N == IGNORED).sort(stable=True).indices[:most]
            hidden_ND, targets_N = hidden_ND.index_select(0, chosen), targets_N[chosen]
        summed = vocabulary_loss(hidden_ND, model.head_weight, targets_N)
        return Loss(summed, (targets_N != IGNORED).sum())

    def loss_of(self, logits: Tensor, micro_batch: MicroBatch) -> Loss:
        """The same of logits that are there: a softmax in fp32."""
        targets = self.targets(micro_batch.labels)
        summed = F.cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return Loss(summed, (targets != IGNORED).sum())

    def scores(self, device: torch.device) -> Scores | None:
        """Counts, besides the loss, what predictions are worth; None: the loss says it all."""
        return None

    def of_loss(self, loss: float) -> dict[str, float]:
        """Metrics that follow from the mean loss per target, in nats."""
        return {}
