"""A state that is loaded with other micro-batches or steps: each row once, in steps as before."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data_sets import random_rows, write_rows

from tokenfeed import Batch, Fixed, Packed, Padded, ShardLoader
from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.planning.policies import Batching
from tokenfeed.pipeline.planning.state import with_micro_batches

Step = list[tuple[int, int, int]]
KINDS: dict[str, Callable[[int], Batching]] = {
    "packed": lambda size: Packed(32, size),
    "fixed": Fixed,
    "padded": lambda size: Padded(64 * size),
}
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(0).integers(2, 60, 700).astype(np.int64)
    return write_rows(
        tmp_path_factory.mktemp("resized") / "shards", {"train": random_rows(lengths)}, 1000
    )


def steps_of(batches: Iterable[Batch], most: int | None = None) -> list[Step]:
    """The rows of the next steps, with the place and number of their tokens."""
    found: list[Step] = []
    step: Step = []
    if most == 0:
        return found
    for batch in batches:
        starts = [0] * len(batch.rows) if batch.starts is None else batch.starts.tolist()
        step += zip(batch.rows.tolist(), starts, batch.piece_lengths.tolist(), strict=True)
        if batch.ends_step:
            found.append(sorted(step))
            step = []
            if len(found) == most:
                return found
    assert not step
    return found


def counted(steps: list[Step]) -> Counter[Any]:
    return Counter(row for step in steps for row in step)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    order=st.sampled_from(["shuffled", "file"]),
    window=st.sampled_from([None, 4000, 9000]),
    sizes=st.lists(SIZES, min_size=2, max_size=4),
    takes=st.lists(st.integers(0, 7), min_size=4, max_size=4),
)
def test_resizing_a_state_delivers_each_row_once(
    kind: str, order: Any, window: Any, sizes: Any, takes: Any, shards: Path
) -> None:
    def loader_of(size: int, step_size: int) -> ShardLoader:
        settings = {"batching": KINDS[kind](size), "micro_batches_per_step": step_size}
        return ShardLoader(
            shards, num_workers=0, window_tokens=window, order=order, seed=3, **settings
        )

    loader = loader_of(*sizes[0])
    expected, done = counted(steps_of(loader_of(*sizes[0]))), list[Step]()
    for (size, step_size), take in zip(sizes[1:], takes, strict=False):
        done += steps_of(iter(loader), take)
        state = with_micro_batches(loader.state_dict(), KINDS[kind](size), step_size)
        loader = loader_of(size, step_size)
        loader.load_state_dict(state)
    state = loader.state_dict()
    rest = steps_of(iter(loader))
    assert counted(done + rest) == expected
    again = loader_of(*sizes[len(sizes) - 1])
    again.load_state_dict(state)
    begun = steps_of(iter(again), 1)
    resumed = loader_of(*sizes[len(sizes) - 1])
    resumed.load_state_dict(again.state_dict())
    assert len(rest) == 1 or begun + steps_of(iter(resumed)) == rest


@given(
    kind=st.sampled_from(["packed", "fixed"]),
    size=st.integers(1, 12),
    done=st.integers(0, 6),
    window=st.sampled_from([None, 4000]),
)
def test_smaller_micro_batches_leave_the_steps_as_they_are(
    kind: str, size: int, done: int, window: Any, shards: Path
) -> None:
    def loader_of(size: int) -> ShardLoader:
        settings = {"batching": KINDS[kind](size), "micro_batches_per_step": 12 // size}
        return ShardLoader(shards, num_workers=0, window_tokens=window, **settings)

    size = max(each for each in range(1, size + 1) if 12 % each == 0)
    expected = steps_of(loader_of(12))
    loader = loader_of(12)
    assert steps_of(iter(loader), done) == expected[:done]
    resumed = loader_of(size)
    resumed.load_state_dict(with_micro_batches(loader.state_dict(), KINDS[kind](size), 12 // size))
    assert steps_of(iter(resumed)) == expected[done:]


def test_state_in_the_middle_of_a_step_is_not_resized(shards: Path) -> None:
    loader = ShardLoader(shards, batching=Fixed(2), micro_batches_per_step=4, num_workers=0)
    next(iter(loader))
    state = with_micro_batches(loader.state_dict(), Fixed(4), 2)
    resumed = ShardLoader(shards, batching=Fixed(4), micro_batches_per_step=2, num_workers=0)
    resumed.load_state_dict(state)
    with pytest.raises(ResumeError, match="saved in the middle of a step"):
        next(iter(resumed))


def test_rows_that_are_planned_are_not_cut_again(shards: Path) -> None:
    loader = ShardLoader(shards, batching=Padded(64), micro_batches_per_step=1, num_workers=0)
    next(iter(loader))
    state = with_micro_batches(loader.state_dict(), Padded(16), 1)
    resumed = ShardLoader(shards, batching=Padded(16), micro_batches_per_step=1, num_workers=0)
    resumed.load_state_dict(state)
    with pytest.raises(ResumeError, match="would cut rows that are planned already"):
        next(iter(resumed))


def test_other_policies_are_still_refused(shards: Path) -> None:
    loader = ShardLoader(shards, batching=Packed(32, 4), micro_batches_per_step=1, num_workers=0)
    next(iter(loader))
    other = Packed(16, 8)
    state = with_micro_batches(loader.state_dict(), other, 1)
    resumed = ShardLoader(shards, batching=other, micro_batches_per_step=1, num_workers=0)
    with pytest.raises(ResumeError, match="the state was saved with batching="):
        resumed.load_state_dict(state)
