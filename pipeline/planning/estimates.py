"""Estimates from the manifests alone: the number of batches, and how well rows are mixed.

A manifest has a histogram of row lengths by powers of two. For the number of batches, this module
makes up rows of one window that fit the histogram and the number of tokens, and plans that window
as usual. So the estimate includes cutting, sorting, packing, steps and ranks.

For mixing, the worst case is a corpus in which similar rows are neighbours, such as one tenth of
the corpus from one source. In a window of K places, the share of this tenth is off by about
sqrt(B / 3 + 2 F (1 - F)) / K, and by 1 / (2 K) at least. B is the number of values that the window
has of a part of `evenly`, and F what B has beyond whole numbers: in the parts at both ends of the
tenth chance decides, and a share F of the parts has one value more. A training step has this error
plus the sampling error of its few rows. After a full shuffle only the sampling error remains.
Torch-free.
"""

from operator import itemgetter

import numpy as np

from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.manifest import SplitInfo
from tokenfeed.pipeline.planning.batching import deal_rounds, plan_window
from tokenfeed.pipeline.planning.permutation import parts_of
from tokenfeed.pipeline.planning.plan import Plan
from tokenfeed.pipeline.planning.policies import random_order
from tokenfeed.pipeline.planning.schedule import ENDLESS


def estimate_rounds(plan: Plan, sources: tuple[OpenedSplit, ...], world_size: int) -> int:
    """Return the estimated number of rounds in an epoch: the micro-batches of each rank.

    Cost: planning one window.
    """
    step_size = plan.micro_batches_per_step
    total = 0
    for stretch in plan.order.averages:
        parts = [  # an average window, with its share of every source
            likely_lengths(source.split, max(1, round(source.rows * batches / source.batches)))
            for source, batches in zip(sources, stretch.batches, strict=True)
            if batches
        ]
        lengths = np.concatenate(parts)
        window = plan_window(
            lengths,
            plan.batching_of(stretch.first_window),
            step_size=step_size,
            draw=plan.order.draw(0, stretch.first_window),  # shuffling adds padding
            rows=random_order(len(lengths), 0) if plan.order.keeps_rows else None,
        )
        rounds = deal_rounds(window.step_offsets, step_size, first=0, rank=0, world_size=world_size)
        total += len(rounds.starts) * stretch.num_windows
    return total // plan.num_streams


def likely_lengths(split: SplitInfo, count: int) -> np.ndarray:
    """Return `count` row lengths that fit the histogram, the longest row and the tokens of a split.

    In a bin from lo to hi, lengths are lo + (hi - lo) * u**p with u evenly spaced in [0, 1]. One p
    for all bins gives the number of tokens of the split.

    Returns:
        Ascending, shape (count,), int64.
    """
    bins = np.flatnonzero(split.length_histogram)
    rows = np.array(split.length_histogram)[bins]
    low = 1 << bins
    high = np.minimum(2 * low - 1, split.longest_row)
    spread = int((rows * (high - low)).sum())
    share = (split.tokens - int((rows * low).sum())) / spread if spread else 0.5
    power = 1 / min(max(share, 1e-6), 1.0) - 1
    place = (np.arange(count) + 0.5) * (split.rows / count)
    ends = np.cumsum(rows)
    of_bin = np.searchsorted(ends, place, side="right")
    within = (place - (ends - rows)[of_bin]) / rows[of_bin]
    above = np.rint((high - low)[of_bin] * within**power)
    lengths: np.ndarray = low[of_bin] + above.astype(np.int64)
    return lengths


STEP_TOKENS = 1_000_000
"""Tokens of the training step that `deviation` is about."""
_LARGE_TOKENS = 100 * STEP_TOKENS
"""Smallest epoch for a warning: in a smaller epoch, poor mixing does not matter."""
_FAR = 6.0
"""Deviation at which `unmixed` warns."""
_TENTH = 0.1
_SAMPLE = 1000


def deviation(plan: Plan, sources: tuple[OpenedSplit, ...]) -> float | None:
    """Return how far a step of `STEP_TOKENS` is from the whole corpus, relative to a full shuffle.

    It is the standard deviation of the share of one tenth of a source whose rows are neighbours,
    relative to the same after a full shuffle, for the source with the largest value. 1 is as good
    as a full shuffle.

    Returns:
        1.0 if an epoch is one window; None without shuffling.
    """
    if not plan.order.shuffle:
        return None
    return max(ratio for ratio, _, _ in _deviations(plan, sources))


def unmixed(plan: Plan, sources: tuple[OpenedSplit, ...]) -> str | None:
    """Return a warning if an epoch is large and a source is poorly mixed; else None.

    Sources of less than a tenth of the epoch are ignored: the weights decide their share in a step,
    and it matters little which of their rows a step has.
    """
    found = _deviations(plan, sources)
    whole = sum(tokens for _, tokens, _ in found)
    large = [each for each in found if each[1] >= _TENTH * whole]
    ratio, tokens, source = max(large, key=itemgetter(0), default=(1.0, 0.0, sources[0]))
    is_small = whole * plan.order.num_windows < _LARGE_TOKENS
    if is_small or not plan.order.shuffle or ratio < _FAR:
        return None
    return (
        f"a window takes rows from only {tokens * source.batches / source.tokens:,.0f} places of "
        f"{source.name}: if its rows are sorted in any way, steps deviate {ratio:.0f} times as far "
        "from the whole corpus as after a full shuffle. Raise `window_tokens`."
    )


_LEAST_BATCHES = 64
"""Record batches of a data set of which `uneven` warns: in a smaller one, little depends on them.
"""
_UNEVEN = 0.5
"""Coefficient of variation at which `uneven` warns."""


def uneven(plan: Plan, sources: tuple[OpenedSplit, ...]) -> str | None:
    """Return a warning if weights cannot be exact, because a source has record batches of very
    different sizes; else None.

    The manifest has the tokens and record batches of each shard, so batches of a shard count as
    equal.
    """
    if len(sources) == 1:
        return None
    for source in sources:
        if source.batches < _LEAST_BATCHES:
            continue
        shards = [(each.tokens, each.batches) for each in source.split.shards if each.batches]
        tokens, batches = np.array(shards, np.float64).T
        mean = tokens.sum() / batches.sum()
        variance = (batches * (tokens / batches - mean) ** 2).sum() / batches.sum()
        if np.sqrt(variance) > _UNEVEN * mean:
            return (
                f"the record batches of {source.name} have very different sizes, as in many small "
                "shards. Every record batch counts as the average one, so the shares of the data "
                "sets deviate from their weights. Run `pretokenize` on all its files together."
            )
    return None


_COARSE = 0.03
"""Share of a stage from which on `coarse` warns of a record batch."""
_LARGE = 2
"""Record batches of this many times the average are larger than the plan counts them."""


def coarse(plan: Plan, sources: tuple[OpenedSplit, ...]) -> str | None:
    """Return a warning if a stage is so short that one long row of a data set changes its shares;
    else None.

    A record batch has at least one row, and counts as the average one. The manifest has the longest
    row of each shard, but not the tokens of each record batch.
    """
    of_data = dict(zip(plan.data, sources, strict=True))
    for number, stage in enumerate(plan.stages, 1):
        if stage.until is None or len(stage.weights) == 1:
            continue
        for data in stage.weights:
            source, tokens = of_data[data], stage.until - stage.begins
            longest = source.split.longest_row
            is_large = longest > _LARGE * source.tokens / source.batches
            if is_large and longest > _COARSE * tokens:
                return (
                    f"{source.name} has a row of {longest:,} tokens, {longest / tokens:.0%} of "
                    f"stage {number}. It counts as an average record batch, so the shares of the "
                    "data sets in this stage deviate from their weights by about as much. Make the "
                    "stage longer, or cut long documents before `pretokenize`."
                )
    return None


_OFF = 0.05
"""Deviation of a share from its weight at which `off` warns."""


def off(plan: Plan, sources: tuple[OpenedSplit, ...], *, begins: int = 0) -> str | None:
    """Return a warning if a stage, or an epoch of a mixture, is so short that whole record batches
    cannot have its weights; else None. Only stages from token `begins` of the run on count."""
    order, found = plan.order, []
    for nth, (stretch, first) in enumerate(zip(order.stretches, order.first_windows, strict=True)):
        is_past = bool(plan.stages) and plan.stages[nth].begins < begins
        if is_past or stretch.is_once or stretch.num_windows == ENDLESS:
            continue
        starts, stops = order.places(first), order.places(first + stretch.num_windows - 1)
        sizes = {n: float(order.sources[n].mean_tokens) for n in starts}
        tokens = {n: (stops[n][1] - starts[n][0]) * size for n, size in sizes.items()}
        weights = stretch.weights
        for n in starts:
            share, due = tokens[n] / sum(tokens.values()), weights[n] / sum(weights.values())
            found.append((abs(share - due), nth + 1, n, share, due, max(sizes.values())))
    deviation, nth, n, share, due, largest = max(found, default=(0.0, 0, 0, 0.0, 0.0, 0.0))
    if deviation <= _OFF:
        return None
    what, longer = "an epoch", ""
    if plan.stages:
        what = f"stage {nth}"
        longer = f"make the stage at least {largest / _OFF:,.0f} tokens long, or "
    return (
        f"{what} is short. It reads whole record batches, so {share:.0%} of its tokens are of "
        f"{sources[n].name}, not {due:.0%}. For closer shares, {longer}run `pretokenize` with a "
        "smaller `--shard-size`."
    )


def _deviations(
    plan: Plan, sources: tuple[OpenedSplit, ...]
) -> list[tuple[float, float, OpenedSplit]]:
    """Return the deviation of each source, and its tokens in an average window of the longest
    stretch. A stage may be shorter than a window, and then `window_tokens` matters little."""
    longest = max(plan.order.averages, key=lambda each: each.num_windows * sum(each.batches))
    read = zip(sources, longest.batches, strict=True)
    of_window = [source.tokens * batches / source.batches for source, batches in read]
    found, whole = [], sum(of_window)
    for source, tokens, places in zip(sources, of_window, longest.batches, strict=True):
        step_tokens, ratio = STEP_TOKENS * tokens / whole, 1.0
        # Otherwise a window has the whole source, or a step less than one record batch.
        is_partial = places < source.batches and step_tokens >= source.tokens / source.batches
        if tokens and plan.order.num_windows > 1 and is_partial:
            lengths = likely_lengths(source.split, min(_SAMPLE, source.rows)).astype(np.float64)
            by_chance = _TENTH * (1 - _TENTH) * (lengths**2).sum() / lengths.sum() / step_tokens
            windows = max(1.0, step_tokens / tokens)
            # at most: all of the tenth, or nothing
            of_part = places / float(parts_of(source.batches))
            more = of_part % 1
            variance = max(1 / 4, of_part / 3 + 2 * more * (1 - more)) / places**2
            by_places = min(variance, _TENTH * (1 - _TENTH)) / windows
            rest = max(0.0, 1 - step_tokens / tokens)  # sampling without replacement in a window
            ratio = float(np.sqrt(max(1.0, rest + by_places / by_chance)))
        found.append((ratio, tokens, source))
    return found
