"""Classification: one or two texts and a label become ids and the number of the label."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tokenfeed.pipeline.format.schema import Task
from tokenfeed.tools.corpus.records import FieldKind, Fields
from tokenfeed.tools.encoding.tasks.base import FieldValues, Labelled, OfTexts


@dataclass(frozen=True, kw_only=True)
class ClassifyEncoder(OfTexts, Labelled):
    """Classification of texts or of pairs of texts."""

    name: ClassVar[Task] = "classify"
    record: ClassVar[str] = "one or two texts and a class"
    kinds: ClassVar[Fields] = {
        "text": FieldKind.TEXT,
        "pair": FieldKind.TEXT,
        "label": FieldKind.LABEL,
    }
    label: str = "label"

    def per_row(self, values: FieldValues) -> dict[str, np.ndarray]:
        """The number of each record's label."""
        return self.numbered(values[self.label])
