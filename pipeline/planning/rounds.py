"""Deal the micro-batches of a window to ranks, in rounds.

The order of the micro-batches does not depend on the ranks. A round takes the next micro-batches,
one per rank. A round ends with a step, unless there are enough ranks for several whole steps. So
the ranks of a round have equal work, and a step has the same rows on any number of ranks. If the
micro-batches of a step are not a multiple of the ranks, some ranks get a filler: a copy of one
sequence that no loss counts.

A window of two steps, with 4 and 3 micro-batches, for 3 ranks; f is a filler:

    micro-batches     0 1 2 3 | 4 5 6
    rounds            0 1 2     3 f f     4 5 6
    position after        3         4         7

The next micro-batch depends only on the number of delivered micro-batches, not on who delivered
them. That number is the position in a window. Torch-free.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Round", "Rounds", "deal_rounds"]


class Round(NamedTuple):
    """One round over all ranks: what it adds to the delivered rows."""

    position: int
    """Number of the window's micro-batches delivered after the round."""
    ends_window: bool
    digest: int
    """Digest of the round; see `digest`."""
    tokens: tuple[int, ...]
    """Tokens of each source."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a window from some position on, for one rank."""

    starts: np.ndarray
    """First micro-batch of each round, shape (rounds,), int64."""
    ends: np.ndarray
    """Position after each round, shape (rounds,), int64."""
    mine: np.ndarray
    """Micro-batch of this rank in each round, shape (rounds,), int64."""
    filler: np.ndarray
    """Whether this rank gets a filler, shape (rounds,), bool."""
    ends_step: np.ndarray
    """Whether the round is the last of its step, shape (rounds,), bool."""
    takes_all: bool
    """Whether this rank takes every micro-batch of the window."""


def deal_rounds(
    step_offsets: np.ndarray, step_size: int, *, first: int, rank: int, world_size: int
) -> Rounds:
    """Deal the micro-batches of a window, from number `first` on, to ranks.

    Args:
        step_offsets: Where each step begins among the micro-batches, shape (steps + 1,).
        step_size: Micro-batches in a full step.
        first: Number of micro-batches of this window delivered before.
        rank: Rank of this process.
        world_size: Number of ranks.
    """
    num_batches = int(step_offsets[-1])
    batches = np.arange(first, num_batches)
    step = np.searchsorted(step_offsets, batches, side="right") - 1
    together = max(1, world_size // step_size)
    group = (step - step[:1]) // together * together + step[:1]  # steps that share a round
    group_start = np.maximum(step_offsets[group], first)
    starts = batches[(batches - group_start) % world_size == 0]
    ends = np.append(starts[1:], num_batches)[: len(starts)]
    mine = starts + rank
    filler = mine >= ends
    return Rounds(
        starts,
        ends,
        np.where(filler, starts, mine),
        filler,
        np.isin(ends, step_offsets),
        takes_all=world_size == 1 and first == 0,
    )
