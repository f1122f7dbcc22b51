"""Counts of what reading from stores takes."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tokenfeed.pipeline.remote.retrying import Traffic

__all__ = ["CountingStore", "Fetched"]


@runtime_checkable
class CountingStore(Protocol):
    """A store that counts."""

    @property
    def traffic(self) -> Traffic:
        """What this process has asked of it."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """What reading from stores took."""

    traffic: Traffic = field(default_factory=Traffic)
    hits: int = 0
    """Record batches and footers that were in the cache."""
    damaged: int = 0
    """Files of the cache, or bytes on their way, that were not what they should be; they were
    fetched again."""
    waited_s: float = 0.0
    """Time until the bytes of windows were at hand: from the cache, a store, or by the work of
    another process."""

    def __add__(self, other: "Fetched") -> "Fetched":
        return Fetched(
            self.traffic + other.traffic,
            self.hits + other.hits,
            self.damaged + other.damaged,
            self.waited_s + other.waited_s,
        )

    def since(self, before: "Fetched") -> "Fetched":
        """What came after `before`."""
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
