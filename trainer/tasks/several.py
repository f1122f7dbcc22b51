"""Several tasks as one: a step belongs to one of them, and each micro-batch says to which."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.models.head import Head
from tokenfeed.trainer.tasks.task import BestBy, Loss, Task

__all__ = ["LEFT", "Learnt", "Several"]

LEFT = "left"
"""The metric of several tasks together: 1 at first."""


class Several:
    """Tasks by name, for one model with a head each."""

    best_by = BestBy(LEFT, less_is_better=True)

    def __init__(self, parts: Mapping[str, Task]) -> None:
        self.parts = dict(parts)

    @property
    def name(self) -> str:
        """All of them, like emotion:classify chunks:tag."""
        return " ".join(f"{name}:{task.name}" for name, task in self.parts.items())

    @property
    def manifest(self) -> Manifest:
        """That of the first, whose tokenizer is that of all."""
        return next(iter(self.parts.values())).manifest

    @property
    def head(self) -> dict[str, Head]:
        """What a model has to give for each; all are shown the same ids, and told of pairs."""
        heads = {name: task.head for name, task in self.parts.items()}
        size = max(head.vocabulary_size for head in heads.values())
        pairs = any(head.pairs for head in heads.values())
        return {
            name: replace(head, vocabulary_size=size, pairs=pairs) for name, head in heads.items()
        }

    @property
    def logits_at_once(self) -> int:
        """Tokens of a micro-batch from which on no loss takes more memory."""
        return max(task.logits_at_once for task in self.parts.values())

    def prepare(self, micro_batch: MicroBatch, number: int) -> MicroBatch:
        """What is shown to the model."""
        return self.parts[micro_batch.task].prepare(micro_batch, number)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Loss:
        """That of the micro-batch's task."""
        return self.parts[micro_batch.task].loss(model, micro_batch)


Learnt = Task | Several
"""What a model is trained for."""
