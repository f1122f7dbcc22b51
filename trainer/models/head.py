"""What a model is asked for: which logits, how many, and which tokens may see which."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Head", "HeadKind"]

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
