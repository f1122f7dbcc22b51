"""What a model is asked for: which logits, how many, and which tokens may see which."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenfeed.trainer.data.micro_batch import MicroBatch

__all__ = ["HasHidden", "Head", "HeadKind", "has_hidden"]

HeadKind = Literal["vocabulary", "token", "row"]
"""Of what there are logits.

    vocabulary   an id of the vocabulary for each token
    token        a tag for each token
    row          a class for each row
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a task asks of a model."""

    kind: HeadKind
    outputs: int
    """Logits of a token or row; those of the vocabulary may be more."""
    vocabulary_size: int
    """Ids that a model is shown are below this."""
    causal: bool
    """Whether a token sees only those before it."""
    pairs: bool = False
    """Whether rows are pairs of texts, so that the model is told which text a token is of."""
    labels: tuple[str, ...] = ()
    """Names of tags or classes, by their number."""
    pad_id: int | None = None
    """Fills rows, where the tokenizer has an id that does nothing else."""


class HasHidden(Protocol):
    """What a model with a head of the vocabulary may offer, so that the loss needs no logits.

    These are `hidden @ head_weight.T`, and nothing else is done to them.
    """

    @property
    def head_weight(self) -> "Tensor":
        """(V, D), a parameter; None, or no such attribute: it offers logits alone."""
        ...

    def hidden(self, micro_batch: "MicroBatch") -> "Tensor":
        """(B, T, D): what the head sees."""
        ...

    def __call__(self, micro_batch: "MicroBatch") -> "Tensor":
        """(B, T, V): logits."""
        ...


def has_hidden(model: "nn.Module") -> TypeGuard[HasHidden]:
    """Whether a model offers them."""
    return getattr(model, "head_weight", None) is not None
