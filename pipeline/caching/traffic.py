"""Counts of what reading from stores takes."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tokenfeed.pipeline.remote.retrying import Traffic

__all__ = ["CountingStore", "Fetched"]


@runtime_checkable
class CountingStore(Protocol):
    """A store that counts its requests."""

    @property
    def traffic(self) -> Traffic:
        """Requests and bytes of this process."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Counts and times of reading from stores."""

    traffic: Traffic = field(default_factory=Traffic)
    hits: int = 0
    """Number of record batches and footers read from the cache."""
    damaged: int = 0
    """Number of pieces that were damaged in the cache or on the network, and fetched again."""
    waited_s: float = 0.0
    """Seconds of waiting for the bytes of windows, from the cache, a store or another process."""

    def __add__(self, other: "Fetched") -> "Fetched":
        return Fetched(
            self.traffic + other.traffic,
            self.hits + other.hits,
            self.damaged + other.damaged,
            self.waited_s + other.waited_s,
        )

    def since(self, before: "Fetched") -> "Fetched":
        """Return the counts since `before`."""
        now, then = self.traffic, before.traffic
        traffic = Traffic(
            now.requests - then.requests,
            now.bytes - then.bytes,
            now.retries - then.retries,
            now.outage_s - then.outage_s,
        )
        return Fetched(
            traffic,
            self.hits - before.hits,
            self.damaged - before.damaged,
            self.waited_s - before.waited_s,
        )
