"""The plan of a window keeps its promises for any lengths, policy, step size and key."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import VOCABULARY_SIZE, MakeDataset, Span, random_rows, spans_of, write_rows

from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import OpenedSplit, open_splits
from tokenfeed.pipeline.format.schema import Task, task_columns
from tokenfeed.pipeline.planning.batching import plan_window
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.policies import Batching, Fixed, Packed, Padded
from tokenfeed.pipeline.planning.schedule import Draw

SPREADS = st.sampled_from([0.0, 0.033, 0.3, 1.0])
SORTED = st.one_of(
    st.builds(
        Padded,
        max_tokens=st.integers(8, 300),
        multiple_of=st.sampled_from([1, 8]),
        spread=SPREADS,
    ),
    st.builds(
        Fixed, batch_size=st.integers(1, 9), multiple_of=st.sampled_from([1, 8]), spread=SPREADS
    ),
)
BEST_FIT = st.builds(
    Packed,
    sequence_length=st.integers(2, 100),
    batch_size=st.integers(1, 6),
    balance_attention=st.booleans(),
)
SPLIT = st.builds(
    Packed, sequence_length=st.integers(1, 100), batch_size=st.integers(1, 6), split=st.just(True)
)
POLICIES = SORTED | BEST_FIT | SPLIT
LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=150).map(np.array)
STEP_SIZES = st.integers(1, 9)
KEYS = st.integers(0, 2**64 - 1)
Steps = list[list[list[list[Span]]]]


def planned(
    lengths: np.ndarray,
    batching: Batching,
    step_size: int = 1,
    key: int = 0,
    shuffle: bool = True,
) -> Steps:
    draw = draw_of(key) if shuffle else None
    return spans_of(plan_window(lengths, batching, step_size=step_size, draw=draw))


def draw_of(key: int) -> Draw:
    """A window's randomness, that of an epoch of one window."""
    return Draw(key, key ^ 1, cycle_epoch=key % 8, num_windows=1)


def sequences_of(steps: Steps) -> list[list[Span]]:
    return [sequence for step in steps for batch in step for sequence in batch]


def size(sequence: list[Span]) -> int:
    return sum(stop - start for _, start, stop in sequence)


@given(LENGTHS, POLICIES, STEP_SIZES, KEYS, st.booleans())
def test_every_token_is_in_one_micro_batch_of_equal_work_within_its_policy(
    lengths: np.ndarray, batching: Batching, step_size: int, key: int, shuffle: bool
) -> None:
    steps = planned(lengths, batching, step_size, key, shuffle)
    spans = [span for sequence in sequences_of(steps) for span in sequence]
    assert all(stop > start for _, start, stop in spans)
    tokens = Counter((row, at) for row, start, stop in spans for at in range(start, stop))
    assert tokens == {(row, at): 1 for row, length in enumerate(lengths) for at in range(length)}
    for step in steps:
        rows = [len(batch) for batch in step]
        assert len(step) == min(step_size, sum(rows)), "a micro-batch is missing or has no row"
        assert max(rows) - min(rows) <= 1
        longest = [max(map(size, batch)) for batch in step]
        if isinstance(batching, Packed):
            assert max(rows) <= batching.batch_size
            assert max(longest) <= batching.sequence_length
            continue  # all sequences have one padded length
        for count, length in zip(rows, longest, strict=True):
            if isinstance(batching, Fixed):
                assert count <= batching.batch_size
            if isinstance(batching, Padded):
                assert count * round_up(length, batching.multiple_of) <= batching.max_tokens
        tokens_of = [sum(map(size, batch)) for batch in step]
        assert max(tokens_of) - min(tokens_of) <= max(longest)


@given(LENGTHS, SORTED, STEP_SIZES, KEYS)
def test_steps_are_neighbours_in_length_and_all_but_the_shortest_are_full(
    lengths: np.ndarray, batching: Padded | Fixed, step_size: int, key: int
) -> None:
    steps = [
        sorted(size(sequence) for batch in step for sequence in batch)
        for step in planned(lengths, replace(batching, spread=0.0), step_size, key)
    ]
    steps.sort()
    for shorter, longer in pairwise(steps):
        assert shorter[-1] <= longer[0]
        assert len(longer) == step_size * batching.rows_of(longer[-1])


@given(LENGTHS, BEST_FIT | SPLIT, STEP_SIZES, KEYS)
def test_packed_micro_batches_are_full_but_in_the_last_step(
    lengths: np.ndarray, batching: Packed, step_size: int, key: int
) -> None:
    steps = planned(lengths, batching, step_size, key)
    for step in steps[:-1]:
        assert [len(batch) for batch in step] == [batching.batch_size] * step_size


@given(LENGTHS, BEST_FIT | SPLIT, STEP_SIZES, KEYS, st.booleans())
def test_balanced_steps_are_neighbours_in_attention_cost(
    lengths: np.ndarray, batching: Packed, step_size: int, key: int, shuffle: bool
) -> None:
    balanced = replace(batching, balance_attention=True)
    costs = [
        sorted(sum((stop - start) ** 2 for _, start, stop in s) for batch in step for s in batch)
        for step in planned(lengths, balanced, step_size, key, shuffle)
    ]
    assert all(lower[-1] <= higher[0] for lower, higher in pairwise(sorted(costs)))


@pytest.mark.slow
@given(LENGTHS, SORTED | BEST_FIT, KEYS)
def test_only_long_rows_are_cut_and_their_pieces_follow_each_other(
    lengths: np.ndarray, batching: Batching, key: int
) -> None:
    longest = batching.longest_piece
    pieces = sorted(span for s in sequences_of(planned(lengths, batching, 1, key)) for span in s)
    assert pieces == [
        (row, start, min(start + longest, length))
        for row, length in enumerate(lengths)
        for start in range(0, length, longest)
    ]


@given(LENGTHS, SORTED.filter(lambda policy: isinstance(policy, Padded)) | BEST_FIT, KEYS)
def test_truncated_rows_keep_only_their_beginning(
    lengths: np.ndarray, batching: Batching, key: int
) -> None:
    truncating = replace(batching, long_rows="truncate")  # type: ignore[type-var]
    sequences = sequences_of(planned(lengths, truncating, 1, key))
    pieces = sorted(span for sequence in sequences for span in sequence)
    longest = batching.longest_piece
    assert pieces == [(row, 0, min(longest, length)) for row, length in enumerate(lengths)]


@given(LENGTHS, SPLIT, STEP_SIZES, KEYS)
def test_split_sequences_are_full_and_join_into_whole_documents(
    lengths: np.ndarray, batching: Packed, step_size: int, key: int
) -> None:
    sequences = sequences_of(planned(lengths, batching, step_size, key))
    sizes = sorted(map(size, sequences))
    assert set(sizes[1:]) <= {batching.sequence_length}
    next_of = {sequence[0][:2]: sequence for sequence in sequences}
    for sequence in sequences:
        for (row, _, stop), (_, start, _) in pairwise(sequence):
            assert (stop, start) == (lengths[row], 0), "a document ends or begins in its middle"
        row, _, stop = sequence[-1]
        if stop < lengths[row]:
            assert size(sequence) == batching.sequence_length
            assert (row, stop) in next_of


CROPPED, BALANCED = Packed(70, 2, long_rows="crop"), Packed(70, 2, balance_attention=True)


@pytest.mark.parametrize(
    "batching",
    [Padded(70), Fixed(10), Packed(70, 2), Packed(70, 2, split=True), CROPPED, BALANCED],
)
def test_another_key_gives_another_order_and_no_shuffle_ignores_it(batching: Batching) -> None:
    lengths = np.full(100, 7)
    assert planned(lengths, batching, key=1) != planned(lengths, batching, key=2)
    still = planned(lengths, batching, key=1, shuffle=False)
    assert still == planned(lengths, batching, key=2, shuffle=False)


def test_without_shuffling_rows_come_by_length_and_then_in_the_order_of_the_files() -> None:
    lengths = np.array([3, 1, 2, 3, 1, 2])
    rows = [row for [(row, _, _)] in sequences_of(planned(lengths, Fixed(2), shuffle=False))]
    assert rows == [1, 4, 2, 5, 0, 3]


def test_shuffling_mixes_rows_of_equal_length_and_steps() -> None:
    """Every row comes about as early as any other, and long steps as early as short ones."""
    lengths = np.repeat([5, 10], 50)
    places = np.zeros(100)
    for key in range(400):
        sequences = sequences_of(planned(lengths, Padded(50), key=key * 0x9E3779B97F4A7C15 % 2**64))
        places[[row for [(row, _, _)] in sequences]] += np.arange(100) / 400
    assert np.abs(places - 49.5).max() < 8


@pytest.mark.parametrize("step_size", [1, 8])
def test_padding_is_below_one_percent_on_documents(step_size: int) -> None:
    """In windows as large as they are by default: some 256 steps."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 6_400 * step_size).astype(np.int64) + 1
    draw = replace(draw_of(0), num_windows=10)
    plan = plan_window(lengths, Padded(max_tokens=16_384), step_size=step_size, draw=draw)
    steps = spans_of(plan)
    slots = sum(len(batch) * max(map(size, batch)) for step in steps for batch in step)
    assert 1 - np.sum(lengths) / slots <= 0.01


@pytest.mark.parametrize("split", [False, True])
def test_packed_sequences_are_filled_on_documents(split: bool) -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 1_700).astype(np.int64) + 1
    sequences = sequences_of(planned(lengths, Packed(2048, 4, split=split)))
    assert lengths.sum() / (2048 * len(sequences)) >= 0.995


def test_policies_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="`max_tokens`=4"):
        Padded(max_tokens=4, multiple_of=8)
    with pytest.raises(ConfigError, match="`split`=True"):
        Packed(8, 1, split=True, long_rows="refuse")


def plan_of(sources: tuple[OpenedSplit, ...], batching: Batching) -> Plan:
    return Plan.from_splits(
        sources,
        "out/",
        batching,
        split="train",
        micro_batches_per_step=1,
        window_tokens=None,
        seed=0,
        shuffle=True,
    )


@pytest.mark.parametrize("task", ["score", "tag"])
def test_a_second_target_is_refused_and_not_left_out(tmp_path: Path, task: Task) -> None:
    rows, other = (random_rows(np.array([3, 5, 4]), each) for each in ("classify", task))
    columns = (*task_columns("classify"), *task_columns(task))
    both = replace(
        rows, per_token=rows.per_token | other.per_token, per_row=rows.per_row | other.per_row
    )
    folder = write_rows(
        tmp_path / "both", {"train": both}, VOCABULARY_SIZE, task="classify", columns=columns
    )
    with pytest.raises(ConfigError, match=f"both: has the targets label and {columns[1].name}, "):
        plan_of(open_splits([folder], "train"), Padded(64))


@pytest.mark.parametrize(
    ("task", "batching", "message"),
    [
        ("lm", Padded(49, long_rows="refuse"), "longest row has 50 tokens.* at most 49"),
        ("lm", Padded(55, 8, long_rows="refuse"), "longest row has 50 tokens.* at most 48"),
        ("tag", Packed(49, 2, long_rows="refuse"), "longest row has 50 tokens.* at most 49"),
        ("classify", Padded(49), "longest row has 50 tokens.* cannot be cut"),
        ("classify", Packed(50, 2), "cannot be packed"),
        ("score", Packed(50, 2), "cannot be packed"),
        ("lm", Padded(50, long_rows="refuse"), None),
        ("lm", Padded(49), None),
        ("lm", Packed(50, 2, long_rows="refuse"), None),
        ("classify", Padded(50), None),
        ("classify", Fixed(2), None),
    ],
)
def test_rows_that_may_not_be_cut_are_refused_at_the_start(
    make_dataset: MakeDataset, task: str, batching: Batching, message: str | None
) -> None:
    sources = open_splits([make_dataset([3, 50, 20], task=task)], "train")
    if message is None:
        assert plan_of(sources, batching).epoch_tokens == (73,)
    else:
        with pytest.raises(ConfigError, match=message):
            plan_of(sources, batching)
