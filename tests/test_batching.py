"""The window plan keeps its promises for any lengths, policy, world size and key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfeed.pipeline.batching import Batching, Fixed, Packed, Padded, WindowPlan, plan_window
from tokenfeed.pipeline.errors import ConfigError

POLICIES = st.one_of(
    st.builds(Padded, max_tokens=st.integers(8, 300), multiple_of=st.sampled_from([1, 8])),
    st.builds(Fixed, rows=st.integers(1, 9), multiple_of=st.sampled_from([1, 8])),
    st.builds(Packed, sequence_length=st.integers(2, 100), rows=st.integers(1, 6)),
)
LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=150).map(np.array)
KEYS = st.integers(0, 2**64 - 1)


def plan(lengths: np.ndarray, batching: Batching, world_size: int, key: int) -> WindowPlan:
    return plan_window(lengths, batching, world_size=world_size, key=key, shuffle=True)


def micro_batches(
    window: WindowPlan, rank: int, world_size: int
) -> tuple[list[list[list[int]]], np.ndarray]:
    """For each gang, the rank's sequences as lists of pieces; and which gangs are fillers."""
    share = window.share(rank, world_size)
    sequences = np.split(share.pieces, share.sequence_offsets[1:-1])
    cuts = share.batch_offsets
    batches = [
        [sequences[s].tolist() for s in range(cuts[m], cuts[m + 1])] for m in range(len(cuts) - 1)
    ]
    return batches, share.filler


@given(LENGTHS, POLICIES, st.integers(1, 9), KEYS)
def test_every_token_goes_to_exactly_one_rank(
    lengths: np.ndarray, batching: Batching, world_size: int, key: int
) -> None:
    window = plan(lengths, batching, world_size, key)
    delivered: list[int] = []
    for rank in range(world_size):
        batches, filler = micro_batches(window, rank, world_size)
        delivered += [
            piece
            for batch, is_filler in zip(batches, filler, strict=True)
            if not is_filler
            for sequence in batch
            for piece in sequence
        ]
    assert sorted(delivered) == list(range(len(window.piece_rows)))
    pieces = np.diff(window.piece_offsets)
    assert pieces.min() >= 1
    assert np.array_equal(np.bincount(window.piece_rows, weights=pieces), lengths)


@given(LENGTHS, POLICIES, st.integers(1, 9), KEYS)
def test_ranks_of_a_gang_have_equal_work(
    lengths: np.ndarray, batching: Batching, world_size: int, key: int
) -> None:
    window = plan(lengths, batching, world_size, key)
    pieces = np.diff(window.piece_offsets)
    ranks = [micro_batches(window, rank, world_size) for rank in range(world_size)]
    assert len({len(batches) for batches, _ in ranks}) == 1, "ranks differ in their number of steps"
    for gang in range(len(ranks[0][0])):
        gangs = [batches[gang] for batches, filler in ranks if not filler[gang]]
        rows = [len(batch) for batch in gangs]
        if any(filler[gang] for _, filler in ranks):
            assert set(rows) == {1}, "a rank got two sequences while another has none"
        assert max(rows) - min(rows) <= 1
        if isinstance(batching, Packed):
            continue  # all sequences have one padded length
        tokens = [sum(int(pieces[s].sum()) for s in batch) for batch in gangs]
        longest = max(int(pieces[s].sum()) for batch in gangs for s in batch)
        assert max(tokens) - min(tokens) <= longest


@given(LENGTHS, POLICIES, st.integers(1, 5), KEYS)
def test_no_micro_batch_exceeds_its_policy(
    lengths: np.ndarray, batching: Batching, world_size: int, key: int
) -> None:
    window = plan(lengths, batching, world_size, key)
    pieces = np.diff(window.piece_offsets)
    for rank in range(world_size):
        for batch in micro_batches(window, rank, world_size)[0]:
            longest = max(int(pieces[sequence].sum()) for sequence in batch)
            padded = -(-longest // batching.multiple_of) * batching.multiple_of
            if isinstance(batching, Padded):
                assert len(batch) * padded <= batching.max_tokens
            else:
                assert len(batch) <= batching.rows
            if isinstance(batching, Packed):
                assert padded == batching.sequence_length


@given(LENGTHS, POLICIES, KEYS)
def test_a_plan_depends_on_its_arguments_alone_and_on_the_key(
    lengths: np.ndarray, batching: Batching, key: int
) -> None:
    first, again = (plan(lengths, batching, 1, key) for _ in range(2))
    assert np.array_equal(first.pieces, again.pieces)
    assert np.array_equal(first.gang_offsets, again.gang_offsets)


def test_another_key_gives_another_order_and_no_shuffle_ignores_it() -> None:
    lengths = np.full(100, 7)
    batching = Padded(max_tokens=70)
    assert not np.array_equal(
        plan(lengths, batching, 1, 1).pieces, plan(lengths, batching, 1, 2).pieces
    )
    still = plan_window(lengths, batching, world_size=1, key=1, shuffle=False)
    assert still.pieces.tolist() == list(range(100))


def test_pieces_of_a_long_row_follow_each_other_in_the_row() -> None:
    window = plan(np.array([25, 3]), Padded(max_tokens=10), 1, 0)
    assert np.diff(window.piece_offsets).tolist() == [10, 10, 5, 3]
    assert window.piece_rows.tolist() == [0, 0, 0, 1]


def test_neighbours_in_length_share_a_micro_batch() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, 20_000).astype(np.int64) + 1
    window = plan(lengths, Padded(max_tokens=16_384), 1, 0)
    pieces = np.diff(window.piece_offsets)
    slots = sum(
        len(batch) * max(int(pieces[sequence].sum()) for sequence in batch)
        for batch in micro_batches(window, 0, 1)[0]
    )
    assert 1 - pieces.sum() / slots < 0.02


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Padded(max_tokens=4, multiple_of=8), "`max_tokens`=4"),
        (lambda: Padded(max_tokens=8, multiple_of=0), "`multiple_of`=0"),
        (lambda: Fixed(rows=0), "`rows`=0"),
        (lambda: Packed(sequence_length=0, rows=1), "`sequence_length`=0"),
    ],
)
def test_impossible_policies_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
