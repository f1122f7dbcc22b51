"""What processes are told of the cache that they share."""

from dataclasses import dataclass

__all__ = ["CacheSettings"]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """One cache, as all processes of a run know it."""

    folder: str
    bytes: int
    """It never holds more."""
    is_whole: bool
    """Whether all that is read fits: then it is fetched in few large requests."""
    windows_ahead: int
    """How many windows are fetched before they are wanted."""
