"""Tasks on labelled rows and words: a class or a number for each row, or a tag for each word.

| task | scores |
|---|---|
| `classify` | accuracy, the accuracy of always predicting the most frequent class, macro-F1 |
| `score` | rmse, the rmse of always predicting the mean, Pearson's correlation |
| `tag` | the scores of `classify` and, if the tags form spans, the F1 of spans |

Macro-F1 is the mean F1 of the classes. Pearson's correlation is 0 for a constant prediction. The
scheme of spans is IOB as evaluation scripts read it. A span begins at B-, and at an I- that does
not continue a span of its kind. E- and S- (IOBES), or L- and U- (BILOU), end and make spans.

    B-PER I-PER O I-LOC B-LOC      spans: PER 0..1, LOC 3..3, LOC 4..4

A span counts only if both ends and its kind are right. Tagging all words O has a span F1 of 0.

Shapes: N rows or words of a split, C classes.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.tasks.task import Answers, BestBy, Loss, Task


class Classify(Task):
    """Predict the class of each row."""

    name = "classify"
    kind = "row"
    best_by = BestBy("macro_f1", less_is_better=False)

    def scores(self, answers: Answers) -> dict[str, float]:
        """Return accuracy, majority_accuracy and macro_f1."""
        return class_scores(answers, self.outputs)


class Score(Task):
    """Predict the score of each row. The loss is the squared error."""

    name = "score"
    kind = "row"

    @property
    def outputs(self) -> int:
        """One number."""
        return 1

    def loss_of(self, logits: Tensor, micro_batch: MicroBatch) -> Loss:
        """Return the squared error summed over rows with a score, in fp32."""
        return Loss(self.losses_of(logits, micro_batch).sum(), (~micro_batch.targets.isnan()).sum())

    def losses_of(self, logits: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return the squared error of each row, 0 without a score, in fp32."""
        scores_B = micro_batch.targets
        counted_B = ~scores_B.isnan()
        # NaN times 0 is NaN, also in a gradient. So rows without a score are compared with 0.
        error_B = logits.squeeze(-1).float() - torch.where(counted_B, scores_B, 0.0)
        return error_B.square() * counted_B

    def predict(self, logits: Tensor) -> Tensor:
        """Return the number of each row."""
        return logits.squeeze(-1).to(torch.float32, copy=True)  # of a CUDA graph

    def scores(self, answers: Answers) -> dict[str, float]:
        """Return rmse, mean_rmse and pearson."""
        return number_scores(answers)


class Tag(Task):
    """Predict the tag of each word, at its first token."""

    name = "tag"
    kind = "token"

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._scheme = TagScheme.from_names(manifest.label_names)

    @property
    def best_by(self) -> BestBy:  # type: ignore[override]
        """Span F1 if the tags form spans, else accuracy."""
        return BestBy("span_f1" if self._scheme else "accuracy", less_is_better=False)

    def scores(self, answers: Answers) -> dict[str, float]:
        """Return the scores of classes, and span_f1 if the tags form spans."""
        found = class_scores(answers, self.outputs)
        if self._scheme is None:
            return found
        true, predicted = (
            set(map(tuple, spans(tags, answers.ends_row, self._scheme).tolist()))
            for tags in (answers.true, answers.predicted)
        )
        total = len(true) + len(predicted)
        return found | {"span_f1": 2 * len(true & predicted) / total if total else 0.0}


def class_scores(answers: Answers, classes: int) -> dict[str, float]:
    """Return accuracy, majority_accuracy and macro_f1. Classes without rows are left out."""
    pairs = answers.true * classes + answers.predicted
    counts_CC = np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    right_C, true_C, predicted_C = counts_CC.diagonal(), counts_CC.sum(1), counts_CC.sum(0)
    seen_C = true_C + predicted_C > 0
    f1_C = 2 * right_C[seen_C] / (true_C + predicted_C)[seen_C]
    return {
        "accuracy": float(right_C.sum() / len(pairs)),
        "majority_accuracy": float(true_C.max() / len(pairs)),
        "macro_f1": float(f1_C.mean()),
    }


@np.errstate(invalid="ignore", over="ignore")  # of predictions that are not finite
def number_scores(answers: Answers) -> dict[str, float]:
    """Return rmse, mean_rmse and pearson.

    The first numbers are subtracted from all, so that equal numbers have a deviation of exactly 0.
    """
    true_N, guess_N = answers.true.astype(np.float64), answers.predicted.astype(np.float64)
    error2 = ((guess_N - true_N) ** 2).mean()
    true_N, guess_N = true_N - true_N[0], guess_N - guess_N[0]
    scale = true_N.std() * guess_N.std()
    covariance = ((true_N - true_N.mean()) * (guess_N - guess_N.mean())).mean()
    pearson = covariance / scale if scale else 0.0
    return {
        "rmse": float(error2**0.5),
        "mean_rmse": float(true_N.std()),
        "pearson": float(np.clip(pearson, -1.0, 1.0)),
    }


_TAG = re.compile(r"(?P<place>[BIESLU])-(?P<kind>.+)", re.DOTALL)
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
        found = [_TAG.fullmatch(name) for name in names]
        others = {name for name, tag in zip(names, found, strict=True) if not tag}
        if not any(found) or others - {_OUTSIDE}:
            return None
        kinds: dict[str, int] = {}
        kind = [kinds.setdefault(tag["kind"], len(kinds)) if tag else -1 for tag in found]
        begins = [tag is not None and tag["place"] in "BSU" for tag in found]
        ends = [tag is not None and tag["place"] in "ESLU" for tag in found]
        return cls(np.array(kind), np.array(begins), np.array(ends))


def spans(tags: np.ndarray, ends_row: np.ndarray, scheme: TagScheme) -> np.ndarray:
    """Return first word, last word and kind of every span, shape (spans, 3), in order.

    Args:
        tags: Tags of the words of all rows, concatenated, shape (N,).
        ends_row: Whether a word is the last of its row, shape (N,). Spans end there.
        scheme: The role of each tag.
    """
    kind = scheme.kind[tags]
    cut = np.ones(len(tags) + 1, np.bool_)  # between a word and the one before
    cut[1:-1] = (
        (kind[1:] != kind[:-1]) | scheme.begins[tags[1:]] | scheme.ends[tags[:-1]] | ends_row[:-1]
    )
    inside = kind >= 0
    first = np.flatnonzero(inside & cut[:-1])
    last = np.flatnonzero(inside & cut[1:])
    return np.stack((first, last, kind[first]), axis=1)
