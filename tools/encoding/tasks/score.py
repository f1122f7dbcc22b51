"""Regression: one or two texts and a number become ids and the number."""

from typing import ClassVar

import numpy as np

from tokenfeed.pipeline.format.schema import SCORE
from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.encoding.tasks.base import OfTexts, Values


class ScoreEncoder(OfTexts):
    """Regression of texts or of pairs of texts."""

    option = "score"
    record = "one or two texts and a number"
    kinds: ClassVar = {"text": FieldKind.TEXT, "pair": FieldKind.TEXT, "score": FieldKind.NUMBER}

    def per_row(self, values: Values) -> dict[str, np.ndarray]:
        """Return the number of each record."""
        return {SCORE: np.array(values["score"], np.float32)}
