"""Where the node's cache is and how much it may hold. Torch-free."""

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.caching.eviction import Budget
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.data_set import OpenedSplit, has_remote
from tokenfeed.pipeline.format.read_errors import error_line
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
from tokenfeed.pipeline.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings of one cache, the same in all processes of a run."""

    folder: str
    bytes: int
    """Largest size in bytes."""
    is_whole: bool
    """Whether all data fits. Then data is fetched in few large requests."""
    windows_ahead: int
    """Number of windows to prefetch."""


VARIABLE = "TOKENFEED_CACHE"
_VERSION = "v1"
_MOST_BYTES, _SHARE_OF_FREE = 10_000_000_000, 0.05
"""Default size: the smaller of these bytes and this share of the free disk."""
_MOST_AHEAD_BYTES, _SHARE_AHEAD = 1_000_000_000, 0.25
_WINDOWS = 3
"""Windows that must fit: the current windows of a fast and of a slow rank, and the next window."""
_log = logging.getLogger(__name__)


def resolve_cache(
    cache_dir: str | PathLike[str] | None,
    cache_bytes: int | None,
    *,
    total_bytes: int,
    window_bytes: int,
) -> CacheSettings | None:
    """Return the settings of the cache; None for no cache.

    Args:
        cache_dir: Folder of the cache. None: $TOKENFEED_CACHE, or a folder of this user in the
            system's temporary folder.
        cache_bytes: Largest size in bytes. 0: no cache. None: a share of the free disk.
        total_bytes: Bytes of all data that is read through the cache.
        window_bytes: Bytes of an average window, at least 1.

    Raises:
        ConfigError: The cache is too small for the data, or the disk for the cache.
    """
    if cache_bytes is not None and not checks.whole("cache_bytes", cache_bytes):
        return None
    folder = _folder(cache_dir)
    least_bytes = min(total_bytes, _WINDOWS * window_bytes)  # less would fetch data repeatedly
    free = shutil.disk_usage(folder).free + Budget(folder).read()
    most = min(_MOST_BYTES, int(free * _SHARE_OF_FREE)) if cache_bytes is None else cache_bytes
    if cache_bytes is None and most < least_bytes:
        _log.warning(
            "%s has %s bytes free, too few for a cache of %s bytes: record batches are not cached "
            "on disk. Set `cache_dir` to a disk with more free space.",
            *(folder, f"{free:,}", f"{least_bytes:,}"),
        )
        return None
    if most < least_bytes:
        raise ConfigError(
            f"`cache_bytes`={most}: {_WINDOWS} windows of this data set take "
            f"{least_bytes:,} bytes. Raise it to that, lower `window_tokens`, or set it to 0 "
            "to use no disk cache."
        )
    if (wanted := min(most, total_bytes)) > free:
        raise ConfigError(
            f"`cache_bytes`={most}: {folder} has {free:,} bytes free, and the cache would use "
            f"{wanted:,}. Lower `cache_bytes`, to {least_bytes:,} or more, or set `cache_dir` "
            "to another disk."
        )
    ahead_bytes = min(_MOST_AHEAD_BYTES, int(most * _SHARE_AHEAD))
    windows_ahead = max(1, ahead_bytes // window_bytes)
    return CacheSettings(folder, most, total_bytes <= most, windows_ahead)


def _folder(cache_dir: str | PathLike[str] | None) -> str:
    """Return the folder of the cache; create it if it is missing.

    Raises:
        ConfigError: The folder cannot be created, or belongs to another user.
    """
    given = cache_dir or os.environ.get(VARIABLE)
    setting = "`cache_dir`" if cache_dir else f"${VARIABLE}" if given else "the cache's folder"
    place = Path(given or Path(tempfile.gettempdir()) / f"tokenfeed-{os.getuid()}").absolute()
    try:
        (place / _VERSION).mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = place.stat().st_uid
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        why = error_line(error)
        raise ConfigError(f"{setting}={place}: {why}. Choose a writable folder.") from None
    if not given and owner != os.getuid():
        raise ConfigError(f"{place} belongs to another user. Set `cache_dir` to your own folder.")
    return str(place / _VERSION)


def cache_for(
    sources: tuple[OpenedSplit, ...],
    plan: Plan,
    cache_dir: str | PathLike[str] | None,
    cache_bytes: int | None,
) -> CacheSettings | None:
    """Return the settings of the cache for the sources in stores; None if the loader needs no
    cache.

    Raises:
        ConfigError: The cache is too small for the plan, or the disk for the cache.
    """
    if not has_remote(sources):
        return None
    total = window = 0
    largest = [
        max(batches) for batches in zip(*(s.batches for s in plan.order.stretches), strict=True)
    ]
    for source, read in zip(sources, largest, strict=True):
        if isinstance(source.store, RangedStore):
            size = sum(shard.bytes for shard in source.split.shards)
            total += 0 if isinstance(source.store, FetchingStore) else size
            window += int(size * read / source.batches)
    return resolve_cache(cache_dir, cache_bytes, total_bytes=total, window_bytes=max(1, window))
