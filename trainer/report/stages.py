"""The stages of a run's data: the tokens of each data set, planned by the weights and delivered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTokens:
    """The tokens of a stage so far, by data set."""

    until: int | None
    """Tokens of the run at which the stage ends; None for the last one."""
    planned: dict[str, float] = field(default_factory=dict)
    delivered: dict[str, float] = field(default_factory=dict)


Shares = Mapping[str, float]
"""Shares of the tokens by data set. Their sum is 1."""


def tokens_of_stages(
    stages: Sequence[tuple[int | None, Shares, Shares]], counts: Sequence[Mapping[str, int]]
) -> list[StageTokens]:
    """Return the planned and delivered tokens of the stages that a run has reached.

    If progress lines are on both sides of the end of a stage, the tokens between them are divided
    between the two stages as planned.

    Example: a stage of 100 tokens, half a and half b, then only a; counts of {a: 49, b: 51} and
    {a: 149, b: 51}. The first stage has planned 50 and 50, and delivered 49 and 51. The second one
    has planned and delivered 100.

    Args:
        stages: Of each stage the tokens of the run at its end, and the shares at both ends.
        counts: Tokens of each data set since the beginning of the run, at each progress line.
    """
    found = [StageTokens(until=until) for until, _, _ in stages]
    for before, now in pairwise(({}, *counts)):
        start, end, begin = sum(before.values()), sum(now.values()), 0
        parts: list[tuple[StageTokens, dict[str, float]]] = []
        for result, (until, first, last) in zip(found, stages, strict=True):
            low, high = max(start, begin), end if until is None else min(end, until)
            if high > low:
                middle = 0.0 if until is None else ((low + high) / 2 - begin) / (until - begin)
                shares = {name: first[name] + middle * (last[name] - first[name]) for name in first}
                parts.append((result, {name: (high - low) * shares[name] for name in shares}))
            begin = end if until is None else until
        for result, planned in parts:
            for name, tokens in planned.items():
                result.planned[name] = result.planned.get(name, 0.0) + tokens
        for name, tokens in now.items():
            wanted = [planned.get(name, 0.0) for _, planned in parts]
            if not any(wanted):  # not in the plan here: the rounding to whole record batches
                wanted = [float(part == parts[-1]) for part in parts]
            for (result, _), share in zip(parts, wanted, strict=True):
                more = (tokens - before.get(name, 0)) * share / sum(wanted)
                result.delivered[name] = result.delivered.get(name, 0.0) + more
    return [result for result in found if result.planned]
