"""How far rows are mixed: about, from the plan and the manifests alone.

The worst case is a corpus in which what is alike stands together, say a tenth of it. In a window of
K strata the tenth's share is off by sqrt(1/3) / K, because the two strata at its ends belong to it
only in part; a training step of one such window is off by as much, and by what chance makes of its
few rows. A full shuffle has the latter alone. Torch-free.
"""

import numpy as np

from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.planning.estimate import likely_lengths
from tokenfeed.pipeline.planning.plan import Plan

__all__ = ["STEP_TOKENS", "deviation", "unmixed"]

STEP_TOKENS = 1_000_000
"""Of the training steps that the estimate is for."""
_LARGE_TOKENS = 100 * STEP_TOKENS
"""A smaller epoch is over before a drift could matter."""
_FAR = 6.0
_TENTH = 0.1
_SAMPLE = 1000


def deviation(plan: Plan, sources: tuple[OpenedSplit, ...]) -> float | None:
    """How far a step of `STEP_TOKENS` is from the whole corpus, over how far a full shuffle is.

    It is the standard deviation of the share of a tenth of a source whose rows stand together, for
    the source where that is largest. 1 is a full shuffle.

    Returns:
        1.0 where an epoch is one window; None without shuffling.
    """
    if not plan.order.shuffle:
        return None
    if plan.order.num_windows == 1:
        return 1.0
    return max(_deviations(sources, _window_tokens(plan, sources)))


def unmixed(plan: Plan, sources: tuple[OpenedSplit, ...]) -> str | None:
    """A warning for a large epoch with a source that is far from mixed; None for any other.

    A source of less than a tenth of the epoch is itself what stands together: how much of it comes
    is for the weights to say, and which part of it matters little to a step.
    """
    of_window = _window_tokens(plan, sources)
    whole = sum(of_window)
    if plan.order.num_windows == 1 or whole * plan.order.num_windows < _LARGE_TOKENS:
        return None
    found = zip(sources, of_window, _deviations(sources, of_window), strict=True)
    told = [
        (ratio, tokens * source.batches / source.tokens, source.name)
        for source, tokens, ratio in found
        if tokens >= _TENTH * whole
    ]
    ratio, places, name = max(told, default=(1.0, 0.0, ""))
    if not plan.order.shuffle or ratio < _FAR:
        return None
    return (
        f"a window takes rows from {places:,.0f} places of {name} only: if that is in any order, "
        f"steps stray {ratio:.0f} times as far from the whole as after a full shuffle. Raise "
        "`window_tokens`."
    )


def _deviations(sources: tuple[OpenedSplit, ...], of_window: list[float]) -> list[float]:
    """For each source; see `deviation`."""
    return [
        _deviation(source, tokens, STEP_TOKENS * tokens / sum(of_window))
        for source, tokens in zip(sources, of_window, strict=True)
    ]


def _window_tokens(plan: Plan, sources: tuple[OpenedSplit, ...]) -> list[float]:
    """Tokens of each source in a window of average size."""
    read = zip(sources, plan.order.batches_read, strict=True)
    return [
        source.tokens * batches / source.batches / plan.order.num_windows
        for source, batches in read
    ]


def _deviation(source: OpenedSplit, window_tokens: float, step_tokens: float) -> float:
    """For one source, given how many of its tokens a window and a step have."""
    lengths = likely_lengths(source.split, min(_SAMPLE, source.rows)).astype(np.float64)
    by_chance = _TENTH * (1 - _TENTH) * (lengths**2).sum() / lengths.sum() / step_tokens
    strata = source.batches * window_tokens / source.tokens
    if strata >= source.batches or step_tokens < source.tokens / source.batches:
        return 1.0  # a window has all of it; or a step less than a record batch, whatever is done
    windows = max(1.0, step_tokens / window_tokens)
    by_strata = min(1 / 3 / strata**2, _TENTH * (1 - _TENTH)) / windows  # all of it, or nothing
    rest = max(0.0, 1 - step_tokens / window_tokens)  # no row of a window comes twice
    return float(np.sqrt(max(1.0, rest + by_strata / by_chance)))
