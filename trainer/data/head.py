"""The output that a task needs from a model: kind and number of logits, and the attention."""

from dataclasses import dataclass
from typing import Literal

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
    pairs: bool = False
    """Whether rows are pairs of texts. Then the model receives token types."""
    labels: tuple[str, ...] = ()
    """Names of tags or classes, by number."""
    pad_id: int | None = None
    """The id of padding; None if the tokenizer has no id for it alone."""
    end_id: int | None = None
    """The id at the end of a document; None if the tokenizer has none."""

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and the tokens before it."""
        return self.kind == "vocabulary"
