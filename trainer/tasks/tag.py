"""Tagging: a tag for each word, as of named entities.

Scores: accuracy beside that of always guessing the most frequent tag; where tags are those of spans
(B-PER, I-PER, O), also span F1, where a span counts only with both ends and its kind right. To tag
all words O gets a span F1 of 0.
"""

import torch

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.tasks.classify import ClassScores
from tokenfeed.trainer.tasks.spans import SpanScores, TagScheme
from tokenfeed.trainer.tasks.task import BestBy, Scores, Task

__all__ = ["Tag"]


class Tag(Task):
    """The tag of a word, at its first token."""

    name = "tag"
    kind = "token"
    causal = False
    packs = False

    def __init__(self, manifest: Manifest, seed: int) -> None:
        super().__init__(manifest, seed)
        self._scheme = TagScheme.from_names(manifest.label_names)

    @property
    def best_by(self) -> BestBy:  # type: ignore[override]
        """Span F1, where tags are of spans."""
        return BestBy("span_f1" if self._scheme else "accuracy", less_is_better=False)

    def scores(self, device: torch.device) -> Scores:
        """Accuracy, and span F1 where tags are of spans."""
        counts = ClassScores(self.outputs, device)
        return SpanScores(counts, self._scheme) if self._scheme else counts
