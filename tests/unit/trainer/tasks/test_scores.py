"""What predictions are worth: counted by plain loops, and compared."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.tasks.label_tasks import Tag, TagScheme, class_scores, spans
from tokenfeed.trainer.tasks.task import Answers

TAGS = ("O", *(f"{place}-{kind}" for place in "BIES" for kind in ("PER", "LOC")))
SCHEME = TagScheme.from_names(TAGS)
assert SCHEME is not None

Span = tuple[int, int, str]
Pairs = list[tuple[int, int]]
"""True and predicted number of each."""

numbers = st.integers(0, len(TAGS) - 1)
rows_of_tags = st.lists(st.lists(numbers, min_size=1, max_size=12), max_size=5)
rows_of_pairs = st.lists(st.lists(st.tuples(numbers, numbers), max_size=9), min_size=1, max_size=5)


def classes(count: int) -> st.SearchStrategy[Pairs]:
    return st.lists(
        st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), min_size=1, max_size=40
    )


def answers_of(pairs: Pairs) -> Answers:
    true, predicted = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return Answers.of(true, predicted)


def f1(right: int, true: int, predicted: int) -> float:
    """The harmonic mean of precision and recall, by its definition."""
    if right == 0:
        return 0.0
    precision, recall = right / predicted, right / true
    return 2 * precision * recall / (precision + recall)


def slow_class_scores(pairs: Pairs) -> dict[str, float]:
    seen = sorted({number for pair in pairs for number in pair})
    of_class = []
    for each in seen:
        right = sum(pair == (each, each) for pair in pairs)
        true = sum(first == each for first, _ in pairs)
        of_class.append(f1(right, true, sum(second == each for _, second in pairs)))
    total = max(1, len(pairs))
    return {
        "accuracy": sum(first == second for first, second in pairs) / total,
        "majority_accuracy": max(
            (sum(first == each for first, _ in pairs) / total for each in seen), default=0.0
        ),
        "macro_f1": sum(of_class) / max(1, len(seen)),
    }


@given(classes(5), st.integers(0, 3))
def test_class_scores_are_those_of_plain_counting(pairs: Pairs, unused: int) -> None:
    expected = pytest.approx(slow_class_scores(pairs))
    assert class_scores(answers_of(pairs), 5 + unused) == expected
    ignored = [(IGNORED, k % 5) for k in range(unused)]
    assert class_scores(answers_of(pairs + ignored), 5) == expected


def conll_spans(row: list[str]) -> Iterator[Span]:
    """By the rules of conlleval and seqeval: pairs of neighbours that end or begin a chunk."""
    before, kind_before, first = "O", "", 0
    for place, tag in enumerate([*row, "O"]):
        where, _, kind = tag.partition("-")
        differs = kind != kind_before
        ends = before in "ES" or before + where in ("BB", "BS", "BO", "IB", "IS", "IO")
        if before != "O" and (ends or differs):
            yield first, place - 1, kind_before
        begins = where in "BS" or before + where in ("EE", "EI", "SE", "SI", "OE", "OI")
        if where != "O" and (begins or differs):
            first = place
        before, kind_before = where, kind


def fast_spans(rows: list[list[int]]) -> list[list[Span]]:
    """Of all rows at once, and told apart again."""
    lengths = [len(row) for row in rows]
    ends = np.zeros(sum(lengths), np.bool_)
    ends[np.cumsum(lengths, dtype=np.int64) - 1] = True
    tags = np.array([tag for row in rows for tag in row], dtype=np.int64)
    starts = np.cumsum([0, *lengths])
    found: list[list[Span]] = [[] for _ in rows]
    kind_of = {int(SCHEME.kind[k]): TAGS[k][2:] for k in range(1, len(TAGS))}
    for first, last, kind in spans(tags, ends, SCHEME).tolist():
        row = int(np.searchsorted(starts, first, side="right")) - 1
        found[row].append((first - starts[row], last - starts[row], kind_of[kind]))
    return found


def names(row: list[int]) -> list[str]:
    return [TAGS[number] for number in row]


@given(rows_of_tags)
def test_spans_are_those_that_published_scores_count(rows: list[list[int]]) -> None:
    assert fast_spans(rows) == [list(conll_spans(names(row))) for row in rows]


def span_f1(rows: list[Pairs]) -> float:
    """By sets of spans that know their row."""
    true, predicted = (
        {
            (number, *span)
            for number, row in enumerate(rows)
            for span in conll_spans(names([pair[side] for pair in row]))
        }
        for side in (0, 1)
    )
    return f1(len(true & predicted), len(true), len(predicted))


def laid_out(rows: list[Pairs], gaps: list[int]) -> Answers:
    """Answers to rows as a batch has them: words stand apart, by pieces of words without a tag."""
    width = max(1, 10 * len(gaps))
    targets = torch.full((len(rows), width), IGNORED)
    predicted = torch.ones((len(rows), width), dtype=torch.int64)  # to be ignored: B-PER
    for number, row in enumerate(rows):
        place = 0
        for word, (true, said) in enumerate(row):
            place += gaps[word % len(gaps)]
            targets[number, place], predicted[number, place] = true, said
            place += 1
    return Answers.of(targets, predicted)


class Tagging(Tag):
    """The task on `TAGS`, without a data set."""

    outputs = len(TAGS)  # type: ignore[assignment]

    def __init__(self) -> None:
        self._scheme = SCHEME


@pytest.mark.slow
@given(
    st.lists(rows_of_pairs, min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_span_f1_is_that_of_sets_of_spans_wherever_words_stand_and_batches_end(
    batches: list[list[Pairs]], gaps: list[int]
) -> None:
    batches = [*batches, [[(0, 0)]]]
    parts = zip(*(laid_out(rows, gaps) for rows in batches), strict=True)
    rows = [row for batch in batches for row in batch]
    words = [pair for row in rows for pair in row]
    expected = slow_class_scores(words) | {"span_f1": span_f1(rows)}
    assert Tagging().scores(Answers(*map(np.concatenate, parts))) == pytest.approx(expected)


@pytest.mark.parametrize(
    "tags", [("NN", "VB"), ("O",), (), ("B-", "O"), ("X-PER", "O"), ("B-PER", "NN")]
)
def test_other_tags_than_those_of_spans_have_no_spans(tags: tuple[str, ...]) -> None:
    assert TagScheme.from_names(tags) is None


def test_bilou_tags_form_the_spans_of_iobes() -> None:
    iobes = ("O", "B-X", "I-X", "E-X", "S-X")
    bilou = ("O", "B-X", "I-X", "L-X", "U-X")
    schemes = [TagScheme.from_names(names) for names in (iobes, bilou)]
    tags, ends_row = np.array([1, 3, 1, 2, 3, 4, 4, 0, 4]), np.zeros(9, bool)
    found = [spans(tags, ends_row, scheme).tolist() for scheme in schemes if scheme]
    assert found[0] == found[1] == [[0, 1, 0], [2, 4, 0], [5, 5, 0], [6, 6, 0], [8, 8, 0]]
