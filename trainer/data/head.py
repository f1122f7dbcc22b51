"""The output that a task needs from a model: kind and number of logits, and the attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenfeed.trainer.data.micro_batch import MicroBatch

__all__ = ["HasHidden", "Head", "HeadKind", "has_hidden"]

HeadKind = Literal["vocabulary", "token", "row"]
"""What a model predicts.

    vocabulary   an id of the vocabulary for each token
    token        a tag for each token
    row          a class, or a number, for each row
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a task needs from a model."""

    kind: HeadKind
    outputs: int
    """Logits per token or row. A head of the vocabulary may have more."""
    vocabulary_size: int
    """Upper bound of the ids that the model is shown."""
    causal: bool
    """Whether a token attends only to itself and the tokens before it."""
    pairs: bool = False
    """Whether rows are pairs of texts. Then the model receives token types."""
    labels: tuple[str, ...] = ()
    """Names of tags or classes, by number."""
    pad_id: int | None = None
    """The id of padding; None if the tokenizer has no id for it alone."""
    end_id: int | None = None
    """The id at the end of a document; None if the tokenizer has none."""


class HasHidden(Protocol):
    """A model with a vocabulary head that offers the head's input, so that the loss needs no
    logits.

    The logits must equal `hidden @ head_weight.T`, with nothing added.
    """

    @property
    def head_weight(self) -> "Tensor":
        """The head's weight, a parameter of shape (V, D). None or missing: only logits are
        offered."""
        ...

    def hidden(self, micro_batch: "MicroBatch") -> "Tensor":
        """Return the input of the head, shape (B, T, D)."""
        ...

    def __call__(self, micro_batch: "MicroBatch") -> "Tensor":
        """Return the logits, shape (B, T, V)."""
        ...


def has_hidden(model: "nn.Module") -> TypeGuard[HasHidden]:
    """Return whether a model offers the input of its head."""
    return getattr(model, "head_weight", None) is not None
