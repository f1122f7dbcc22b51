"""Turns: which of several has a step, in proportion to weights, as a pure function of the step.

The first of them has a step wherever its share of all steps so far passes a whole number; the steps
that it leaves are dealt among the others in the same way. In exact fractions, so that the share of
each is right however long a run is: with k of them it strays by less than k - 1 steps.
The seed shifts where each begins. Weights 2, 1, 1:

    0 1 0 2 0 1 0 2 ...

Torch-free and free of I/O.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from tokenfeed.pipeline.planning.mixture import proportions
from tokenfeed.pipeline.planning.order import derive_key

__all__ = ["Turns"]

_OF_TURNS = 2
"""Apart from other draws of the same seed."""
_KEYS = 1 << 64


class Turns:
    """Deals steps by weight."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        shares = proportions(weights)
        rests = [sum(shares[number:]) for number in range(len(shares))]
        self._shares = [share / rest for share, rest in zip(shares, rests, strict=True)]
        """Of the steps that those before have left."""
        keys = [derive_key(seed, _OF_TURNS, number) for number in range(len(shares))]
        self._starts = [Fraction(key, _KEYS) for key in keys]

    def whose(self, step: int) -> int:
        """The number of the one that has a step; the first step is 0."""
        left = step
        for number, (share, start) in enumerate(zip(self._shares, self._starts, strict=True)):
            had = math.floor(left * share + start)
            if math.floor((left + 1) * share + start) > had:
                return number
            left -= had
        raise AssertionError("the last takes every step that is left")
