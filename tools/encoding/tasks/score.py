"""Regression: one or two texts and a number become ids and the number."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tokenfeed.pipeline.format.schema import SCORE, Task
from tokenfeed.tools.corpus.records import FieldKind, Fields
from tokenfeed.tools.encoding.tasks.base import FieldValues, OfTexts


@dataclass(frozen=True, kw_only=True)
class ScoreEncoder(OfTexts):
    """Regression of texts or of pairs of texts."""

    name: ClassVar[Task] = "score"
    record: ClassVar[str] = "one or two texts and a number"
    kinds: ClassVar[Fields] = {
        "text": FieldKind.TEXT,
        "pair": FieldKind.TEXT,
        "score": FieldKind.NUMBER,
    }
    score: str = "score"

    def per_row(self, values: FieldValues) -> dict[str, np.ndarray]:
        """The number of each record."""
        return {SCORE: np.array(values[self.score], np.float32)}
