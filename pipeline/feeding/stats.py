"""Counts and times of a loader: tokens, padding, waits, queue. Cheap to update per batch."""

from collections import deque
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenfeed.pipeline.remote.retrying import Traffic

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.node import Fetched
    from tokenfeed.pipeline.feeding.batch import Batch


_KEPT = 4096  # quantiles are of this many most recent values


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of the most recent values."""

    p50: float
    p95: float
    p99: float
    max: float

    def worst(self, other: "Quantiles") -> "Quantiles":
        """Return the larger value of each quantile."""
        return Quantiles(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class RemoteStats(Traffic):
    """Reads of this rank's workers from stores and from the node cache, summed over the workers."""

    hits: int = 0
    """Number of record batches and footers read from the cache."""
    damaged: int = 0
    """Number of record batches and footers that were damaged in the cache or on the network, and
    fetched again."""
    wait_s: Quantiles = Quantiles(0.0, 0.0, 0.0, 0.0)
    """Seconds that a worker waited for the bytes of each window. The training loop waits only if no
    window is ready."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of this rank since the loader was made."""

    batches: int
    """Number of batches delivered, with fillers."""
    fillers: int
    """Number of fillers: batches without tokens of their own, so that all ranks have a batch."""
    tokens: int
    """Number of tokens delivered."""
    slots: int
    """Number of token slots delivered: tokens and padding."""
    padding: float
    """Padding slots divided by slots, 0 to 1."""
    windows: int
    """Number of windows read."""
    left_out_rows: int
    """Number of rows that `last`="drop" left out of the delivered windows, over all ranks."""
    left_out_tokens: int
    """Number of tokens that `last`="drop" left out, over all ranks. Truncated or cropped tokens of
    these windows count too."""
    mixing: float | None
    """Estimated deviation of a step of a million tokens from the whole corpus, relative to a full
    shuffle, if similar rows are neighbours in the corpus. 1 is as good as a full shuffle. None
    without shuffling."""
    epoch_tokens: dict[str, int]
    """Tokens of the current epoch by source, over all ranks."""
    last_epoch_tokens: dict[str, int]
    """Tokens of the last epoch by source, over all ranks; empty if this loader did not see its
    end."""
    num_workers: int
    """Current number of worker processes."""
    pageable: bool
    """Whether the system refused to page-lock memory for a CUDA device, so that copies are
    slower."""
    wait_total_s: float
    """Seconds that the training loop spent in `next`, in total."""
    wait_s: Quantiles
    """Seconds of each `next` call."""
    decode_s: Quantiles
    """Seconds to make each window: read, decode, plan, gather; without waiting for a core."""
    queue_depth: Quantiles
    """Number of ready windows when each window was taken."""
    remote: RemoteStats | None
    """Reads from stores; None if all data is local."""

    def as_dict(self) -> dict[str, Any]:
        """Return all values as a JSON-serialisable dict."""
        return asdict(self)


class Counters:
    """Counts the batches and windows of a loader."""

    def __init__(self) -> None:
        self.batches = self.fillers = self.tokens = self.slots = self.windows = 0
        self.left_out_rows = self.left_out_tokens = 0
        self.pageable = False
        self.wait_total_s = 0.0
        self.wait_s, self.decode_s, self.queue_depth = _recent(), _recent(), _recent()
        self.fetched: Fetched | None = None
        self.fetch_s = _recent()

    def add_batch(self, batch: "Batch | None", waited_s: float, left_out: tuple[int, ...]) -> None:
        """Count a delivered batch, or a window without any. `left_out`: rows and tokens that were
        left out of its round."""
        self.left_out_rows += left_out[0]
        self.left_out_tokens += left_out[1]
        self.wait_total_s += waited_s
        if batch is None:
            return
        self.batches += 1
        self.fillers += batch.is_filler
        self.tokens += batch.num_tokens
        self.slots += batch.num_slots
        self.wait_s.append(waited_s)

    def add_window(self, seconds: float, ready: int, fetched: "Fetched | None") -> None:
        """Count a window taken from the queue."""
        if fetched:
            self.fetched = self.fetched + fetched if self.fetched else fetched
            self.fetch_s.append(fetched.waited_s)
        self.windows += 1
        self.decode_s.append(seconds)
        self.queue_depth.append(ready)

    def read(
        self,
        num_workers: int,
        mixing: float | None,
        epoch_tokens: dict[str, int],
        last_epoch_tokens: dict[str, int],
    ) -> Stats:
        """Return the current counts."""
        same = (
            *("batches", "fillers", "tokens", "slots", "windows", "pageable"),
            *("left_out_rows", "left_out_tokens"),
        )
        return Stats(
            **{name: getattr(self, name) for name in same},
            padding=1 - self.tokens / self.slots if self.slots else 0.0,
            mixing=mixing,
            epoch_tokens=epoch_tokens,
            last_epoch_tokens=last_epoch_tokens,
            num_workers=num_workers,
            wait_total_s=self.wait_total_s,
            wait_s=_quantiles(self.wait_s),
            decode_s=_quantiles(self.decode_s),
            queue_depth=_quantiles(self.queue_depth),
            remote=self._remote(self.fetched) if self.fetched else None,
        )

    def _remote(self, fetched: "Fetched") -> RemoteStats:
        counts = asdict(fetched)
        del counts["waited_s"]
        return RemoteStats(**counts, wait_s=_quantiles(self.fetch_s))


def _recent() -> deque[float]:
    """Return a buffer of the most recent values."""
    return deque(maxlen=_KEPT)


def _quantiles(values: deque[float]) -> Quantiles:
    if not values:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    recent = list(values.copy())  # of one moment: the loop may add values meanwhile
    p50, p95, p99 = (float(q) for q in np.percentile(recent, [50, 95, 99]))
    return Quantiles(p50, p95, p99, float(max(recent)))
