"""One body for several tasks: the built-in transformer with a head for each.

    embedding, blocks, norm    the body's, as in a model of one task
    heads.NAME.pick, .head     of one task alone; a head of the vocabulary is the embedding

Shapes: B rows, T tokens, D width, V vocabulary, C outputs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.models.head import Head
from tokenfeed.trainer.models.transformer import INITIAL_STD, ModelSize, Pick, Transformer

__all__ = ["HEADS", "Branched", "weights_of_task"]

HEADS = "heads"
"""`heads.NAME.` begins the names of the weights that only one task uses."""


def weights_of_task(model: nn.Module, task: str) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that a task of several uses: all but those of other tasks' heads."""
    own = f"{HEADS}.{task}."
    for name, weight in model.named_parameters():
        if not name.startswith(f"{HEADS}.") or name.startswith(own) or not task:
            yield name, weight


class Branched(Transformer):
    """Token ids to the logits that a micro-batch's task asks for."""

    def __init__(self, size: ModelSize, heads: Mapping[str, Head], dropout: float = 0.0) -> None:
        """
        Args:
            size: How deep and how wide.
            heads: What the logits are of, by task.
            dropout: As in `Transformer`; whole tokens are dropped where rows have one label.
        """
        super().__init__(size, _of_body(heads), dropout)
        self.token_dropout = nn.Dropout1d(dropout)
        self.heads = _Heads({name: _Branch(size, head) for name, head in heads.items()})
        self._size, self._asked = size, dict(heads)
        self._predicts_tokens = any(head.kind == "vocabulary" for head in heads.values())

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Logits: (B, T, V) with V padded up, (B, T, C), or (B, C)."""
        branch = self.heads[micro_batch.task]
        return self._logits(self.hidden(micro_batch), micro_batch, branch.pick, branch.head)

    @property
    def head_weight(self) -> Tensor | None:
        """(V, D): what makes logits of `hidden` for tasks of the vocabulary; None without them."""
        return self.embedding.weight if self._predicts_tokens else None

    @torch.no_grad()
    def of_task(self, name: str) -> Transformer:
        """A model of one task, with a copy of the body and of that head."""
        alone = Transformer(self._size, self._asked[name])
        own, state = f"{HEADS}.{name}.", self.state_dict()
        found = {key.removeprefix(own): value for key, value in state.items()}
        alone.load_state_dict({key: found[key] for key in alone.state_dict()})
        return alone

    def _dropped(self, x_BTD: Tensor, micro_batch: MicroBatch) -> Tensor:
        if self._asked[micro_batch.task].kind == "row":
            return super()._dropped(x_BTD, micro_batch)
        dropped: Tensor = self.dropout(x_BTD)
        return dropped


class _Heads(nn.Module):
    """Heads by the names of tasks, whatever these are: a ModuleDict refuses `train`."""

    def __init__(self, branches: "Mapping[str, _Branch]") -> None:
        super().__init__()
        self._modules.update(branches)

    def __getitem__(self, task: str) -> "_Branch":
        branch = self._modules[task]
        assert isinstance(branch, _Branch)
        return branch


class _Branch(nn.Module):
    """What one task puts on the body; nothing, where it predicts tokens."""

    def __init__(self, size: ModelSize, head: Head) -> None:
        super().__init__()
        self.pick = Pick(size) if head.kind == "row" else None
        self.head = None if head.kind == "vocabulary" else nn.Linear(size.width, head.outputs)
        if self.pick is not None:
            nn.init.zeros_(self.pick.interest.weight)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=INITIAL_STD)


def _of_body(heads: Mapping[str, Head]) -> Head:
    """A head that adds no weights; all tasks know the same ids."""
    return replace(next(iter(heads.values())), kind="vocabulary")
