"""Rounds: which micro-batches the ranks take at the same time.

The micro-batches of a window stand in one order, whoever delivers them. A round takes the next few,
one for each rank; it never reaches beyond a step, unless there are ranks for several whole steps.
So the ranks of a round have equal work, and a step is the same rows on any number of ranks. Where a
step is not a multiple of the ranks, some get a filler: a copy of one sequence that no loss counts.

A window of two steps, with 4 and 3 micro-batches, for 3 ranks; f is a filler:

    micro-batches     0 1 2 3 | 4 5 6
    rounds            0 1 2     3 f f     4 5 6
    position after        3         4         7

What is next depends only on how many micro-batches were delivered, not on who delivered them: that
one number is the position within a window. Torch-free.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Round", "Rounds", "deal_rounds"]


class Round(NamedTuple):
    """One round over all ranks: what everybody's micro-batch of it adds to what was delivered."""

    position: int
    """Micro-batches of the window that are delivered after it."""
    ends_window: bool
    digest: int
    """See `digest`."""
    tokens: tuple[int, ...]
    """Tokens of each source."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a window from some position on, for one rank."""

    starts: np.ndarray
    """First micro-batch of each round, shape (rounds,), int64."""
    ends: np.ndarray
    """The micro-batch after it: the position when the round was delivered."""
    mine: np.ndarray
    """The micro-batch that this rank takes, shape (rounds,), int64."""
    filler: np.ndarray
    """Whether it is only a filler, shape (rounds,), bool."""
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
        first: Micro-batches of this window that were delivered before.
        rank: Whose rounds.
        world_size: Ranks that take part.
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
