"""`order`="file" delivers the rows of a data set one after the other, on any ranks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import spans_of
from support.delivery import MakeDataset, Ranks, joined, open_loader, small_batches, spans

from tokenfeed import Fixed, Mixture, Packed, Padded
from tokenfeed.pipeline.arithmetic import round_up
from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.planning.batching import file_order, plan_window
from tokenfeed.pipeline.planning.policies import Batching

Pieces = list[tuple[int, int, int]]
"""Row, first token and end of each piece."""
OPTIONS: dict[str, Any] = {"order": "file", "window_tokens": 4_000}
POLICIES: list[Batching] = [
    Padded(300),
    Padded(300, multiple_of=8, sequence_length=40),
    Padded(100, long_rows="truncate", sequence_length=30),
    Fixed(5),
    Packed(64, 3),
    Packed(50, 2, long_rows="truncate"),
    Packed(48, 2, split=True),
]


def slow_order(lengths: list[int], batching: Any, rows: list[int]) -> list[list[Pieces]]:
    """Sequences of each micro-batch, one piece after the other: the definition."""
    limit, batches = batching.longest_piece, list[list[Pieces]]()
    truncates = batching.long_rows == "truncate"

    def pieces(room: int) -> Pieces:
        found = []
        for row in rows:
            starts = [0] if truncates else range(0, lengths[row], room)
            found += [(row, start, min(start + room, lengths[row])) for start in starts]
        return found

    def tokens(sequence: Pieces) -> int:
        return sum(stop - start for _, start, stop in sequence)

    def has_room(batch: list[Pieces]) -> bool:
        if not isinstance(batching, Padded):
            return len(batch) < batching.batch_size
        longest = max(tokens(each) for each in batch)
        return len(batch) <= batching.max_tokens // round_up(longest, batching.multiple_of)

    sequences: list[Pieces] = []
    if getattr(batching, "split", False):
        for row, start, stop in pieces(1):
            if not sequences or tokens(sequences[-1]) == limit:
                sequences.append([])
            if sequences[-1] and sequences[-1][-1][0] == row:
                start = sequences[-1].pop()[1]
            sequences[-1].append((row, start, stop))
    else:
        for piece in pieces(limit):
            fits = sequences and tokens([*sequences[-1], piece]) <= limit
            if batching.packs and fits:
                sequences[-1].append(piece)
            else:
                sequences.append([piece])
    for sequence in sequences:
        fits = batches and has_room(
            [*batches[-1], sequence] if isinstance(batching, Padded) else batches[-1]
        )
        if fits:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=80),
    batching=st.sampled_from([*POLICIES, Packed(7, 3, split=True), Packed(1, 1, split=True)]),
    step_size=st.integers(1, 4),
    data=st.data(),
)
def test_micro_batches_are_those_of_the_slow_definition(
    lengths: list[int], batching: Batching, step_size: int, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(len(lengths))))
    plan = plan_window(
        np.array(lengths), batching, step_size=step_size, draw=None, rows=np.array(rows)
    )
    steps = spans_of(plan)
    assert all(len(step) == step_size for step in steps[:-1])
    assert [batch for step in steps for batch in step] == slow_order(lengths, batching, rows)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2)), min_size=1, max_size=60))
def test_sources_merge_in_proportion_and_keep_their_order(rows: list[tuple[int, int]]) -> None:
    lengths, sources = np.array(rows).T
    order = file_order(lengths, sources)
    assert sorted(order.tolist()) == list(range(len(rows)))
    for source in set(sources.tolist()):
        own = order[sources[order] == source]
        assert (np.diff(own) > 0).all()
        so_far = np.cumsum(np.where(sources[order] == source, lengths[order], 0))
        share = np.cumsum(lengths[order]) * so_far[-1] / so_far[-1:] / lengths.sum()
        longest = lengths.max() * 3  # a row of each source
        assert np.abs(so_far - share * so_far[-1]).max() <= longest


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch)


LENGTHS = np.random.default_rng(0).integers(1, 60, 400)


def rows_of(loader_or_ranks: list[list[list[Any]]]) -> np.ndarray:
    return np.array([span[0] for step in loader_or_ranks for batch in step for span in batch])


@pytest.mark.parametrize("batching", POLICIES, ids=str)
def test_rows_come_in_the_order_of_the_data_set_on_any_ranks(
    make_dataset: MakeDataset, small: None, batching: Batching
) -> None:
    folder = make_dataset(LENGTHS, num_shards=3)
    options = OPTIONS | {"batching": batching, "micro_batches_per_step": 4, "epochs": 2}
    alone = Ranks(folder, 1, **options)
    end = alone.run()
    rows = rows_of(joined([alone]))
    turn = np.flatnonzero(np.diff(rows) < 0) + 1
    assert len(turn) == 1, "the rows of an epoch do not ascend"
    for epoch in np.split(rows, turn):
        assert sorted(set(epoch.tolist())) == list(range(len(LENGTHS)))
    runs, state = [], None
    for world, rounds in ((2, 5), (3, 9), (1, 7), (4, None)):
        runs.append(Ranks(folder, world, state, **options))
        state = runs[-1].run(rounds)
    assert [b for step in joined(runs) for b in step] == [b for s in joined([alone]) for b in s]
    assert state == end


def test_sources_of_a_mixture_keep_their_order_and_share(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenfeed.pipeline.format.shard_writer.BATCH_TOKENS", 150)
    folders = [make_dataset(LENGTHS[:count], num_shards=2) for count in (300, 120)]
    mixture: Any = Mixture({folders[0]: 1, folders[1]: 1})
    with open_loader(mixture, Packed(128, 4), order="file", window_tokens=6_000) as loader:
        batches = [np.array([span[0] for span in spans(batch)]) for batch in loader]
    rows = np.concatenate(batches)
    for own in (rows[rows < 300], rows[rows >= 300]):
        assert set(np.diff(own).tolist()) <= {0, 1, 1 - np.ptp(own) - 1}
    both = [len({*(batch >= 300).tolist()}) == 2 for batch in batches]
    assert np.mean(both) > 0.9


def test_estimate_of_batches_knows_the_order(make_dataset: MakeDataset) -> None:
    lengths = np.random.default_rng(1).lognormal(4, 0.7, 3_000).astype(int) + 1
    with open_loader(make_dataset(lengths), Padded(2048), order="file") as loader:
        assert loader.estimated_batches == pytest.approx(len(list(loader)), rel=0.1)


def test_what_contradicts_the_order_is_refused(make_dataset: MakeDataset) -> None:
    folder = make_dataset(LENGTHS)
    for batching in (Packed(64, 2, long_rows="crop"), Packed(64, 2, balance_attention=True)):
        with pytest.raises(ConfigError, match=r"`order`='file': Packed.* does not keep the order"):
            open_loader(folder, batching, order="file")
    with pytest.raises(ConfigError, match="`order`='sorted'"):
        open_loader(folder, order="sorted")
    state = open_loader(folder, shuffle=False).state_dict()
    with pytest.raises(ResumeError, match="order=None, this loader has order='file'"):
        open_loader(folder, order="file").load_state_dict(state)
