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
from tokenfeed.pipeline.format.data_set import OpenedSplit
from tokenfeed.pipeline.format.read_errors import error_line
from tokenfeed.pipeline.format.store import FetchingStore, RangedStore
from tokenfeed.pipeline.planning.plan import Plan

__all__ = ["CacheSettings", "Need", "cache_for", "has_remote", "resolve_cache"]


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


VARIABLE = "TOKENFEED_CACHE"
_VERSION = "v1"
_MOST_BYTES, _SHARE_OF_FREE = 10_000_000_000, 0.05
"""Of a cache whose size nobody has said: the lesser of both."""
_MOST_AHEAD_BYTES, _SHARE_AHEAD = 1_000_000_000, 0.25
_WINDOWS = 3
"""That must fit: what one rank reads, what another one still does, and what comes next."""
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "ramfs")
_FAR = ("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "gpfs", "beegfs", "afs", "fuse.sshfs")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Need:
    """What is read through the cache."""

    total_bytes: int
    """All of it."""
    window_bytes: int
    """About one window; at least 1."""

    @property
    def least_bytes(self) -> int:
        """A smaller cache would fetch the same bytes again and again."""
        return min(self.total_bytes, _WINDOWS * self.window_bytes)


def resolve_cache(
    cache_dir: str | PathLike[str] | None, cache_bytes: int | None, need: Need
) -> CacheSettings | None:
    """The cache for some data; None for memory alone.

    Args:
        cache_dir: Its folder; None for that of the environment, or one of the user's in the
            system's folder for temporary files.
        cache_bytes: Its bound; 0 for no cache, None for a share of what is free.
        need: What is read.

    Raises:
        ConfigError: It is too small for the data, or the folder cannot hold it.
    """
    if cache_bytes is not None and not checks.whole("cache_bytes", cache_bytes):
        return None
    folder = _folder(cache_dir)
    free = shutil.disk_usage(folder).free + Budget(folder).read()
    most = min(_MOST_BYTES, int(free * _SHARE_OF_FREE)) if cache_bytes is None else cache_bytes
    if cache_bytes is None and most < need.least_bytes:
        _log.warning(
            "%s has %s bytes free, too few for a cache of %s: record batches are kept in memory "
            "only. Give `cache_dir` a disk with room.",
            *(folder, f"{free:,}", f"{need.least_bytes:,}"),
        )
        return None
    if most < need.least_bytes:
        raise ConfigError(
            f"`cache_bytes`={most}: {_WINDOWS} windows of this data set take "
            f"{need.least_bytes:,} bytes. Raise it to that, lower `window_tokens`, or set it to 0 "
            "to keep nothing on the disk."
        )
    if (wanted := min(most, need.total_bytes)) > free:
        raise ConfigError(
            f"`cache_bytes`={most}: {folder} has {free:,} bytes free, and {wanted:,} would be "
            f"used. Lower it to at least {need.least_bytes:,}, or give `cache_dir` another disk."
        )
    ahead_bytes = min(_MOST_AHEAD_BYTES, int(most * _SHARE_AHEAD))
    windows_ahead = max(1, ahead_bytes // need.window_bytes)
    return CacheSettings(folder, most, need.total_bytes <= most, windows_ahead)


def _folder(cache_dir: str | PathLike[str] | None) -> str:
    """The folder, made if need be.

    Raises:
        ConfigError: It cannot be made, is another user's, or is not on this machine.
    """
    given = cache_dir or os.environ.get(VARIABLE)
    said = "`cache_dir`" if cache_dir else f"${VARIABLE}" if given else "the cache's folder"
    place = Path(given or Path(tempfile.gettempdir()) / f"tokenfeed-{_user()}").absolute()
    try:
        (place / _VERSION).mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = place.stat().st_uid
    except (OSError, ValueError) as error:  # of the second kind are names with a NUL
        why = error_line(error)
        raise ConfigError(f"{said}={place}: {why}. Give a folder to write to.") from None
    if not given and owner != _user():
        raise ConfigError(f"{place} belongs to another user. Give a folder of yours: `cache_dir`.")
    if (kind := _file_system(place)) in _IN_MEMORY:
        _log.warning(
            "%s=%s: is in memory (%s), so the cache takes memory. Give `cache_dir` a disk.",
            *(said, place, kind),
        )
    if kind in _FAR:
        raise ConfigError(
            f"{said}={place}: is on a network file system ({kind}), which is no faster than the "
            "store and has no safe locks. Give a folder on a disk of this machine."
        )
    return str(place / _VERSION)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _file_system(place: Path) -> str:
    """The type of the file system that a folder is on; empty where the system does not say."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    resolved, best, found = place.resolve(), -1, ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4].replace("\\040", " "))
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), rest.split()[0]
    return found


def has_remote(sources: tuple[OpenedSplit, ...]) -> bool:
    """Whether one of them is in a store."""
    return any(isinstance(source.store, RangedStore) for source in sources)


def cache_for(
    sources: tuple[OpenedSplit, ...],
    plan: Plan,
    cache_dir: str | PathLike[str] | None,
    cache_bytes: int | None,
) -> CacheSettings | None:
    """The cache for those of the sources that are in stores; None where none is, or for memory
    alone.

    Raises:
        ConfigError: It is too small for the plan, or the folder cannot hold it.
    """
    if not has_remote(sources):
        return None
    total = window = 0
    for source, read in zip(sources, plan.order.batches_read, strict=True):
        if isinstance(source.store, RangedStore):
            size = sum(shard.bytes for shard in source.split.shards)
            total += 0 if isinstance(source.store, FetchingStore) else size
            window += size * read // source.batches // plan.order.num_windows
    return resolve_cache(cache_dir, cache_bytes, Need(total, max(1, window)))
