"""Bands: rows meet others in every epoch, at a price in padding that is known."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import order_of_one

from tokenfeed.pipeline.planning.arrangement import sort_by_length, steps_by_length
from tokenfeed.pipeline.planning.policies import Fixed, Padded
from tokenfeed.pipeline.planning.schedule import Draw

REVIEWS = np.random.default_rng(0).lognormal(np.log(650), 0.45, 1_983).astype(np.int64)
"""As many rows as a set of film reviews has, of such lengths."""
TWEETS = np.random.default_rng(1).integers(5, 60, 3_000)


def draw_of(epoch: int, seed: int = 0) -> Draw:
    draw = order_of_one(1, 1, seed=seed, shuffle=True).draw(epoch, 0)
    assert draw is not None
    return draw


def batches_of(
    lengths: np.ndarray,
    batching: Padded | Fixed,
    epoch: int,
    labels: np.ndarray | None = None,
) -> list[np.ndarray]:
    """The rows of each micro-batch of an epoch of one window."""
    pieces, offsets = steps_by_length(
        lengths, batching, step_size=1, draw=draw_of(epoch), labels=labels
    )
    return np.split(pieces, offsets[1:-1])


def padding(lengths: np.ndarray, batches: list[np.ndarray]) -> float:
    slots = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return float(1 - lengths.sum() / slots)


def meeting_again(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """Of the pairs of rows of a micro-batch, those that share one in another epoch too."""
    batch_of = np.empty(sum(map(len, first)), np.int64)
    for number, batch in enumerate(first):
        batch_of[batch] = number
    again = pairs = 0
    for batch in second:
        counts = np.bincount(batch_of[batch])
        again += int((counts * (counts - 1)).sum())
        pairs += len(batch) * (len(batch) - 1)
    return again / pairs


def identical(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    seen = {tuple(sorted(batch)) for batch in first}
    return sum(tuple(sorted(batch)) in seen for batch in second) / len(second)


def label_variance(labels: np.ndarray, batches: list[np.ndarray]) -> float:
    """Of the share of label 1 in a micro-batch, over that of random ones."""
    share = labels.mean()
    found = sum(len(batch) * (labels[batch].mean() - share) ** 2 for batch in batches)
    return float(found / (len(batches) * share * (1 - share)))


def over_epochs(batching: Padded | Fixed, lengths: np.ndarray) -> tuple[float, float, float]:
    epochs = [batches_of(lengths, batching, epoch) for epoch in range(17)]
    pairs = list(itertools.pairwise(epochs))
    return (
        float(np.mean([padding(lengths, epoch) for epoch in epochs])),
        float(np.mean([meeting_again(*pair) for pair in pairs])),
        float(np.mean([identical(*pair) for pair in pairs])),
    )


def test_rows_of_a_small_batch_seldom_meet_again_and_padding_stays_low() -> None:
    padded, again, same = over_epochs(Fixed(8), REVIEWS)
    assert padded < 0.03
    assert again < 3 * 7 / 1982 + 0.05
    assert same < 0.03


def test_no_spread_is_strictly_by_length_and_a_whole_one_a_random_order() -> None:
    padded, again, _ = over_epochs(Fixed(8, spread=0), REVIEWS)
    assert padded < 0.01
    assert again > 0.6
    padded, again, _ = over_epochs(Fixed(8, spread=1), REVIEWS)
    assert padded > 0.3
    assert again < 0.01


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=200).map(np.array),
    batching=st.builds(Padded, st.integers(200, 900), spread=st.floats(0, 1))
    | st.builds(Fixed, st.integers(1, 9), spread=st.floats(0, 1)),
    step_size=st.integers(1, 4),
    epoch=st.integers(0, 20),
    num_windows=st.integers(1, 5),
)
def test_every_row_is_in_one_step_and_no_step_is_over_its_budget(
    lengths: np.ndarray,
    batching: Padded | Fixed,
    step_size: int,
    epoch: int,
    num_windows: int,
) -> None:
    draw = replace(draw_of(epoch), num_windows=num_windows)
    pieces, offsets = steps_by_length(lengths, batching, step_size=step_size, draw=draw)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    steps = np.split(pieces, offsets[1:-1])
    for step in steps:
        assert 1 <= len(step) <= step_size * batching.rows_of(int(lengths[step].max()))
    if isinstance(batching, Fixed):
        assert [len(step) for step in steps[1:]] == [step_size * batching.batch_size] * (
            len(steps) - 1
        )


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_rows_of_a_step_do_not_meet_again_unless_their_strata_are_steps_apart(
    num_steps: int, rows: int, seed: int
) -> None:
    """One band of all rows, over two epochs of a cycle, against the definition."""
    lengths = np.arange(num_steps * rows) + 1
    steps = []
    for epoch in (2, 3):
        pieces, offsets = steps_by_length(
            lengths, Fixed(rows, spread=1), step_size=1, draw=draw_of(epoch, seed)
        )
        steps.append([set(step.tolist()) for step in np.split(pieces, offsets[1:-1])])
    for one, other in itertools.product(*steps):
        for left, right in itertools.combinations(one & other, 2):
            assert (left // num_steps - right // num_steps) % num_steps == 0


def test_batches_of_several_labels_where_length_goes_with_the_label() -> None:
    draw = np.random.default_rng(2)
    labels = np.repeat([0, 1], 1_500)
    lengths = np.where(labels, draw.lognormal(np.log(67), 0.3, 3_000), 0)
    lengths = np.where(labels, lengths, draw.lognormal(np.log(20), 0.3, 3_000)).astype(np.int64) + 1
    for batching in (Padded(4096), Fixed(16), Fixed(64)):
        without = label_variance(labels, batches_of(lengths, batching, 0))
        assert without > 8
        for epoch in range(4):
            batches = batches_of(lengths, batching, epoch, labels)
            assert label_variance(labels, batches) < 3
        strict = replace(batching, spread=0)
        assert label_variance(labels, batches_of(lengths, strict, 0, labels)) > 8


@pytest.mark.parametrize("batching", [Fixed(16), Padded(1024)])
def test_labels_that_do_not_go_with_length_change_nothing(batching: Padded | Fixed) -> None:
    labels = np.random.default_rng(3).integers(0, 4, len(TWEETS))
    with_labels = batches_of(TWEETS, batching, 1, labels)
    assert [batch.tolist() for batch in with_labels] == [
        batch.tolist() for batch in batches_of(TWEETS, batching, 1)
    ]


def test_in_an_epoch_of_many_windows_rows_stay_in_order_of_length() -> None:
    draw = replace(draw_of(0), num_windows=50)
    pieces, _ = steps_by_length(REVIEWS, Fixed(8), step_size=1, draw=draw)
    assert (np.diff(REVIEWS[pieces]) >= 0).all()


@pytest.mark.parametrize("num_lengths", [1, 6, 50])
def test_rows_of_few_lengths_meet_again_no_more_often_than_without_bands(num_lengths: int) -> None:
    lengths = np.random.default_rng(5).integers(10, 10 + num_lengths, 700)
    (_, with_bands, _), (_, without, _) = (
        over_epochs(Fixed(8, spread=spread), lengths) for spread in (0.033, 0)
    )
    assert with_bands < without + 0.01


def test_the_order_by_length_does_not_depend_on_the_blocks_it_is_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 1000)
    whole = sort_by_length(lengths, 5)
    monkeypatch.setattr("tokenfeed.pipeline.planning.permutation.BLOCK", 7)
    assert sort_by_length(lengths, 5).tolist() == whole.tolist()
    assert (np.diff(lengths[whole]) >= 0).all()
    assert sorted(whole.tolist()) == list(range(1000))
