"""What a loader did: tokens, padding, waits, queue. Kept in a few fixed arrays, cheap per batch."""

from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenfeed.pipeline.caching.traffic import Fetched
    from tokenfeed.pipeline.feeding.batch import Batch

__all__ = ["Counters", "Quantiles", "RemoteStats", "Stats"]

_KEPT = 4096  # most recent values that quantiles are taken of


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of the most recent values."""

    p50: float
    p95: float
    p99: float
    max: float

    def worst(self, other: "Quantiles") -> "Quantiles":
        """Of two, each at its larger."""
        return Quantiles(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """What the workers of this rank took of stores and of the node's cache."""

    requests: int
    """Repetitions among them."""
    bytes: int
    retries: int
    outage_s: float
    """Seconds in which requests were being repeated, summed over the workers."""
    hits: int
    """Record batches and footers that were in the cache."""
    damaged: int
    """Those that were damaged in the cache or on their way, and were fetched again."""
    wait_s: Quantiles
    """Seconds of each window until its bytes were at hand, in a worker: the loop waits for them
    only where no window is ready."""

    def with_another(self, other: "RemoteStats") -> "RemoteStats":
        """What two loaders took; of waits the worse."""
        return RemoteStats(
            requests=self.requests + other.requests,
            bytes=self.bytes + other.bytes,
            retries=self.retries + other.retries,
            outage_s=self.outage_s + other.outage_s,
            hits=self.hits + other.hits,
            damaged=self.damaged + other.damaged,
            wait_s=self.wait_s.worst(other.wait_s),
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """Since the loader was made, for this rank."""

    batches: int
    fillers: int
    """Batches that only kept this rank in step with the others."""
    tokens: int
    """Tokens delivered."""
    slots: int
    """Token slots delivered: tokens and padding."""
    padding: float
    """Share of the slots that hold no token."""
    cut_pieces: int
    """Pieces that continue a row which was too long."""
    windows: int
    mixing: float | None
    """About how far a step of a million tokens strays from the whole corpus, if rows that are alike
    stand together there, over how far it strays after a full shuffle: 1 is as well mixed. None
    without shuffling."""
    epoch_tokens: dict[str, int]
    """Tokens of the present epoch by source, over all ranks, since its beginning."""
    last_epoch_tokens: dict[str, int]
    """The same for the epoch before; empty where this loader did not see its end."""
    num_workers: int
    pageable: bool
    """Whether memory that a CUDA device copies from could not be page-locked: copies are slower."""
    wait_total_s: float
    """Seconds that the training loop waited inside `next`."""
    wait_s: Quantiles
    """Seconds of each `next`."""
    decode_s: Quantiles
    """Seconds that making a window took a worker: reading, decoding, planning, gathering; waiting
    for a core is not counted."""
    queue_depth: Quantiles
    """Windows that were ready when one was taken."""
    remote: RemoteStats | None
    """None where all data are local."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


class Counters:
    """Counts batches and windows as they pass."""

    def __init__(self) -> None:
        self.batches = self.fillers = self.tokens = self.slots = self.cut_pieces = self.windows = 0
        self.pageable = False
        self.wait_total_s = 0.0
        self.wait_s, self.decode_s, self.queue_depth = _Recent(), _Recent(), _Recent()
        self.fetched: Fetched | None = None
        self.fetch_s = _Recent()

    def add_batch(self, batch: "Batch", waited_s: float) -> None:
        """Count a batch that was given out."""
        self.batches += 1
        self.fillers += batch.is_filler
        self.tokens += batch.num_tokens
        self.slots += batch.num_slots
        self.cut_pieces += batch.num_cut_pieces
        self.wait_total_s += waited_s
        self.wait_s.add(waited_s)

    def add_window(self, seconds: float, ready: int, fetched: "Fetched | None") -> None:
        """Count a window that was taken from the queue."""
        if fetched:
            self.fetched = self.fetched + fetched if self.fetched else fetched
            self.fetch_s.add(fetched.waited_s)
        self.windows += 1
        self.decode_s.add(seconds)
        self.queue_depth.add(ready)

    def read(
        self,
        num_workers: int,
        mixing: float | None,
        epoch_tokens: dict[str, int],
        last_epoch_tokens: dict[str, int],
    ) -> Stats:
        """The figures now."""
        return Stats(
            batches=self.batches,
            fillers=self.fillers,
            tokens=self.tokens,
            slots=self.slots,
            padding=1 - self.tokens / self.slots if self.slots else 0.0,
            cut_pieces=self.cut_pieces,
            windows=self.windows,
            mixing=mixing,
            epoch_tokens=epoch_tokens,
            last_epoch_tokens=last_epoch_tokens,
            num_workers=num_workers,
            pageable=self.pageable,
            wait_total_s=self.wait_total_s,
            wait_s=self.wait_s.quantiles(),
            decode_s=self.decode_s.quantiles(),
            queue_depth=self.queue_depth.quantiles(),
            remote=self._remote(self.fetched) if self.fetched else None,
        )

    def _remote(self, fetched: "Fetched") -> RemoteStats:
        traffic = fetched.traffic
        return RemoteStats(
            requests=traffic.requests,
            bytes=traffic.bytes,
            retries=traffic.retries,
            outage_s=traffic.outage_s,
            hits=fetched.hits,
            damaged=fetched.damaged,
            wait_s=self.fetch_s.quantiles(),
        )


class _Recent:
    """The most recent values, in a ring."""

    def __init__(self) -> None:
        self._values = np.zeros(_KEPT)
        self._count = 0

    def add(self, value: float) -> None:
        self._values[self._count % _KEPT] = value
        self._count += 1

    def quantiles(self) -> Quantiles:
        values = self._values[: min(self._count, _KEPT)]
        if not len(values):
            return Quantiles(0.0, 0.0, 0.0, 0.0)
        p50, p95, p99 = (float(q) for q in np.percentile(values, [50, 95, 99]))
        return Quantiles(p50, p95, p99, float(values.max()))
