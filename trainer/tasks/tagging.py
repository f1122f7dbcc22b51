"""Tagging: a tag for each word, as for named entities, and the F1 of the spans that tags form.

The scheme is IOB as evaluation scripts read it. A span begins at B-, and at an I- that does not
continue a span of its kind. E- and S- (IOBES) end and make spans.

    B-PER I-PER O I-LOC B-LOC      spans: PER 0..1, LOC 3..3, LOC 4..4

The scores are accuracy beside the accuracy of the most frequent tag and, if the tags form spans,
span F1. A span counts only if both ends and its kind are right. Tagging all words O has a span F1
of 0.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.tasks.classification import ClassScores
from tokenfeed.trainer.tasks.task import BestBy, Scores, Task

__all__ = ["SpanScores", "Tag", "TagScheme", "spans"]

_TAG = re.compile(r"(?P<place>[BIES])-(?P<kind>.+)", re.DOTALL)
_OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class TagScheme:
    """The role of each tag in spans, by the tag's number."""

    kind: np.ndarray
    """The kind of span that a tag is in; -1 outside of spans. Shape (C,)."""
    begins: np.ndarray
    """Whether a span always begins at the tag. Shape (C,)."""
    ends: np.ndarray
    """Whether a span always ends at the tag. Shape (C,)."""

    @classmethod
    def from_names(cls, names: tuple[str, ...]) -> "TagScheme | None":
        """Return the scheme of tags with these names; None if the tags do not form spans."""
        matches = [_TAG.fullmatch(name) for name in names if name != _OUTSIDE]
        if len(matches) == len(names) or not matches or not all(matches):
            return None
        kinds: dict[str, int] = {}
        found = [_TAG.fullmatch(name) for name in names]
        kind = [kinds.setdefault(tag["kind"], len(kinds)) if tag else -1 for tag in found]
        begins = [tag is not None and tag["place"] in "BS" for tag in found]
        ends = [tag is not None and tag["place"] in "ES" for tag in found]
        return cls(np.array(kind), np.array(begins), np.array(ends))


def spans(tags: np.ndarray, row_ends: np.ndarray, scheme: TagScheme) -> np.ndarray:
    """Return first word, last word and kind of every span, shape (spans, 3), in order.

    Args:
        tags: Tags of the words of all rows, concatenated, shape (W,).
        row_ends: Whether a word is the last of its row, shape (W,). Spans end there.
        scheme: The role of each tag.
    """
    kind = scheme.kind[tags]
    cut = np.ones(len(tags) + 1, np.bool_)  # between a word and the one before
    cut[1:-1] = (
        (kind[1:] != kind[:-1]) | scheme.begins[tags[1:]] | scheme.ends[tags[:-1]] | row_ends[:-1]
    )
    inside = kind >= 0
    first = np.flatnonzero(inside & cut[:-1])
    last = np.flatnonzero(inside & cut[1:])
    return np.stack((first, last, kind[first]), axis=1)


class SpanScores:
    """Scores of words, and F1 of spans."""

    def __init__(self, words: ClassScores, scheme: TagScheme) -> None:
        self._words, self._scheme = words, scheme
        self._spans = torch.zeros(3, dtype=torch.int64)  # right, true and predicted

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add predictions for words, (B, T, C), and their tags, (B, T). Waits for the device."""
        self._words.add(logits, targets)
        targets_BT, predicted_BT = targets.cpu().numpy(), logits.argmax(-1).cpu().numpy()
        is_word_BT = targets_BT != IGNORED
        row = np.nonzero(is_word_BT)[0]
        row_ends = np.append(row[1:] != row[:-1], True)[: len(row)]
        true = spans(targets_BT[is_word_BT], row_ends, self._scheme)
        predicted = spans(predicted_BT[is_word_BT], row_ends, self._scheme)
        _, in_true, in_predicted = np.intersect1d(true[:, 0], predicted[:, 0], return_indices=True)
        right = int((true[in_true] == predicted[in_predicted]).all(axis=1).sum())
        self._spans += torch.tensor([right, len(true), len(predicted)])

    def sums(self, world: World) -> list[Tensor]:
        """Return the sums of the words and of the spans."""
        return [*self._words.sums(world), self._spans]

    def result(self) -> dict[str, float]:
        """Return the scores of the words, and span_f1."""
        right, *found = self._spans.tolist()
        return self._words.result() | {"span_f1": 2 * right / sum(found) if sum(found) else 0.0}


class Tag(Task):
    """Predict the tag of each word, at its first token."""

    name = "tag"
    kind = "token"
    causal = False
    packs = False

    def __init__(self, manifest: Manifest, seed: int) -> None:
        super().__init__(manifest, seed)
        self._scheme = TagScheme.from_names(manifest.label_names)

    @property
    def best_by(self) -> BestBy:  # type: ignore[override]
        """Span F1 if the tags form spans, else accuracy."""
        return BestBy("span_f1" if self._scheme else "accuracy", less_is_better=False)

    def scores(self, device: torch.device) -> Scores:
        """Return accuracy, and span F1 if the tags form spans."""
        counts = ClassScores(self.outputs, device)
        return SpanScores(counts, self._scheme) if self._scheme else counts
