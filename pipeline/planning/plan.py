"""The plan: the order of all rows, from the manifests and a few settings.

A run's position is three integers, and the plan computes the rest from them. Two loaders with equal
plans deliver the same micro-batches in the same order, for any ranks, workers, prefetching and
devices. Torch-free.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, get_args

import numpy as np

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.schema import role_of
from tokenfeed.pipeline.planning.mixture import Exhausted, Mixture, mix, proportions
from tokenfeed.pipeline.planning.order import EpochOrder
from tokenfeed.pipeline.planning.policies import POLICIES, offered
from tokenfeed.pipeline.planning.policy import Batching, LongRows

__all__ = ["Plan", "Position", "default_window_tokens"]

_LEAST_WINDOW_TOKENS, _MOST_WINDOW_TOKENS = 1 << 23, 1 << 25
"""Smallest and largest default window in tokens. The smallest has about 128 record batches, so it
mixes rows of 128 places of the corpus."""
_WINDOW_ROWS = 400_000
"""Largest number of rows of the smallest default window, because rows cost time and memory too."""
_WINDOW_STEPS = 256
"""Number of steps in a default window."""
_WINDOW_BATCHES, _MOST_FOR_SOURCES = 5, 1 << 24
"""Record batches of a mixture's smallest source in a default window, if that takes at most this
many tokens."""


class Position(NamedTuple):
    """Position of the next micro-batch, counted over all ranks."""

    epoch: int
    window: int
    micro_batch: int
    """Number of delivered micro-batches of the window."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of all rows."""

    data: tuple[str, ...]
    """Fingerprint of each source's manifest."""
    weights: tuple[float, ...]
    """Weight of each source. Only the proportions matter."""
    row_ends: tuple[int, ...]
    """Running total of the rows of the sources."""
    epoch_tokens: tuple[int | None, ...]
    """Tokens of each source in an epoch; None if the plan does not know them."""
    split: str
    batching: Batching
    micro_batches_per_step: int
    order: EpochOrder
    stream: int
    """The stream has the windows whose number is `stream` modulo `num_streams`."""
    num_streams: int
    window_tokens: int
    """Intended tokens of a window."""
    exhausted: Exhausted
    """What ends an epoch of a mixture."""
    described_policy: str = field(init=False)
    """The repr of `batching`, made once. A signal handler that interrupts a dataclass repr and
    calls it again would get `...`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "described_policy", repr(self.batching))

    @classmethod
    def from_splits(
        cls,
        sources: tuple[OpenedSplit, ...],
        mixture: Mixture | None,
        batching: Batching,
        *,
        split: str,
        micro_batches_per_step: int,
        window_tokens: int | None,
        seed: int,
        shuffle: bool,
        stream: int = 0,
        num_streams: int = 1,
    ) -> Self:
        """Make the plan of some sources.

        Raises:
            ConfigError: The settings contradict each other or do not fit the data.
        """
        _check_policy(batching)
        step_size = checks.whole(
            "micro_batches_per_step", micro_batches_per_step, least=1, most=checks.MOST
        )
        _check_columns(sources[0])
        _check_fit(sources, batching)
        weights = tuple(mixture.weights.values()) if mixture else (1.0,)
        if window_tokens is None:
            window_tokens = default_window_tokens(sources, weights, batching, step_size)
        window_tokens = checks.whole("window_tokens", window_tokens, least=1, other=", or None")
        exhausted: Exhausted = mixture.exhausted if mixture else "continue"
        phases = mix(sources, weights, exhausted, window_tokens)
        order = EpochOrder(
            tuple(source.batches for source in sources),
            phases,
            checks.seed(seed),
            checks.flag("shuffle", shuffle),
        )
        _check_epoch(sources, order, num_streams)
        return cls(
            tuple(source.manifest.fingerprint for source in sources),
            weights,
            tuple(np.cumsum([source.rows for source in sources]).tolist()),
            _epoch_tokens(sources, order, batching, num_streams),
            split,
            batching,
            step_size,
            order,
            stream,
            num_streams,
            window_tokens,
            exhausted,
        )

    def window_number(self, nth: int) -> int:
        """Return the number in the epoch of the nth window of this stream."""
        return self.stream + nth * self.num_streams

    @property
    def num_windows(self) -> int:
        """Number of windows of this stream in an epoch."""
        return len(range(self.stream, self.order.num_windows, self.num_streams))

    def next_window(self, position: Position) -> Position:
        """Return the position of the beginning of the next window."""
        if position.window + 1 < self.num_windows:
            return Position(position.epoch, position.window + 1, 0)
        return Position(position.epoch + 1, 0, 0)

    def settings(self) -> dict[str, Any]:
        """Return the settings that define the plan, JSON-serialisable, for a saved state."""
        return {
            "data": list(self.data),
            "split": self.split,
            "weights": list(self.weights),
            "phases": [list(phase.batches) for phase in self.order.phases],
            "windows": self.order.num_windows,
            "batching": self.described_policy,
            "micro_batches_per_step": self.micro_batches_per_step,
            "stream": self.stream,
            "num_streams": self.num_streams,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "window_tokens": self.window_tokens,
            "exhausted": self.exhausted,
        }


def default_window_tokens(
    sources: tuple[OpenedSplit, ...],
    weights: tuple[float, ...],
    batching: Batching,
    step_size: int,
) -> int:
    """Return the default tokens of a window.

    A window has 256 steps, so that rows in a step have similar lengths. For a mixture it has at
    least 5 record batches of every source, so that each source has about the same share in every
    window. And it is small enough that a worker can hold several windows and the first is ready
    after about 100 ms.
    """
    rows = sum(source.rows for source in sources)
    mean_tokens = sum(source.tokens for source in sources) / rows
    tokens = batching.tokens_per_batch(mean_tokens)
    wanted = min(_WINDOW_STEPS * step_size * tokens, _MOST_WINDOW_TOKENS)
    of_sources = max(
        math.ceil(_WINDOW_BATCHES * source.tokens / source.batches / share)
        for source, share in zip(sources, proportions(weights), strict=True)
    )
    least = min(_LEAST_WINDOW_TOKENS, int(_WINDOW_ROWS * mean_tokens))
    return max(least, wanted, min(of_sources, _MOST_FOR_SOURCES))


def _epoch_tokens(
    sources: tuple[OpenedSplit, ...], order: EpochOrder, batching: Batching, num_streams: int
) -> tuple[int | None, ...]:
    """Return the tokens of each source in an epoch; None if the plan does not know them.

    The plan knows them if the source is read a whole number of times, in one stream, and no row is
    truncated or cropped.
    """
    longest = max(source.split.longest_row for source in sources)
    truncates = batching.long_rows == "truncate" and longest > batching.longest_piece
    if num_streams > 1 or truncates or batching.long_rows == "crop":
        return (None,) * len(sources)
    times = [divmod(read, size) for read, size in zip(order.batches_read, order.sizes, strict=True)]
    return tuple(
        None if rest else source.tokens * whole
        for source, (whole, rest) in zip(sources, times, strict=True)
    )


def _check_epoch(sources: tuple[OpenedSplit, ...], order: EpochOrder, num_streams: int) -> None:
    for source, batches in zip(sources, order.batches_read, strict=True):
        if not batches:
            raise ConfigError(
                f"{source.name} is too small, or its weight too low: no record batch of it is "
                "read. Raise its weight, or choose `exhausted`='continue'."
            )
    if order.num_windows < num_streams:
        raise ConfigError(
            f"`num_streams`={num_streams}, but an epoch has only {order.num_windows} windows. "
            "Lower `num_streams` or `window_tokens`."
        )


def _check_policy(batching: Batching) -> None:
    if not isinstance(batching, Batching):
        raise ConfigError(f"`batching`={batching!r}: expected {offered()}.")
    described = getattr(batching, "__dataclass_params__", None)
    if not (described and described.frozen):
        raise ConfigError(
            f"`batching`={batching!r}: a saved state contains all policy fields, so the class "
            "must be a frozen dataclass. Write `@dataclass(frozen=True)` above it."
        )
    checks.whole("multiple_of", batching.multiple_of, least=1, most=checks.MOST)
    checks.whole("longest_piece", batching.longest_piece, least=1)
    checks.choice("long_rows", batching.long_rows, get_args(LongRows))


def _check_columns(source: OpenedSplit) -> None:
    """Reject two columns of one role. All sources of a mixture have the same columns."""
    for role in ("target", "context"):
        named = [c.name for c in source.manifest.columns if role_of(c.name) == role]
        if len(named) > 1:
            raise ConfigError(
                f"{source.name}: has the {role}s {' and '.join(named)}, but a batch has one. "
                "Make a data set for each."
            )


def _check_fit(sources: tuple[OpenedSplit, ...], batching: Batching) -> None:
    longest = max(source.split.longest_row for source in sources)
    if batching.long_rows == "refuse" and longest > batching.longest_piece:
        raise ConfigError(
            f"the longest row has {longest:,} tokens, but {batching} allows at most "
            f"{batching.longest_piece:,}. Raise the limit, or cut long rows (`long_rows`='cut')."
        )
    manifest = sources[0].manifest
    if not any(c.per == "row" and role_of(c.name) == "target" for c in manifest.columns):
        return
    if batching.packs:
        unpacked = (policy for policy in POLICIES if not policy.packs)
        raise ConfigError(
            f"rows with one label each cannot be packed: use {offered(unpacked)} for the task "
            f"`{manifest.task}`."
        )
    if longest > batching.longest_piece:
        raise ConfigError(
            f"the longest row has {longest:,} tokens, but {batching} allows at most "
            f"{batching.longest_piece:,}, and a row with one label cannot be cut. Raise the limit."
        )
