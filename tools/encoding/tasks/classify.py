"""Classification: one or two texts and a label become ids and the number of the label."""

from typing import ClassVar

import numpy as np

from tokenfeed.tools.corpus.records import FieldKind
from tokenfeed.tools.encoding.tasks.base import OfTexts, Values


class ClassifyEncoder(OfTexts):
    """Classification of texts or of pairs of texts."""

    option = "classify"
    record = "one or two texts and a class"
    kinds: ClassVar = {"text": FieldKind.TEXT, "pair": FieldKind.TEXT, "label": FieldKind.LABEL}

    def per_row(self, values: Values) -> dict[str, np.ndarray]:
        """Return the number of each record's label."""
        return self.numbered(values["label"])
