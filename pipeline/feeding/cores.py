"""How many cores there are: by affinity, by the container's quota, and shared with other ranks."""

import contextlib
import os
from collections.abc import Iterator
from math import inf
from pathlib import Path, PurePosixPath

__all__ = ["cores_per_rank", "num_cores", "usable_cores"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of version 2, of 1


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Whole cores that affinity and the container's quota leave to this process, at least 1."""
    return max(1, int(min(num_cores(), _cpu_quota())))


def cores_per_rank() -> int:
    """This rank's share of the cores, at least 1; `LOCAL_WORLD_SIZE` says how many ranks share."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = max(1, int(ranks)) if ranks.isdecimal() else 1
    return max(1, int(min(num_cores(), _cpu_quota()) / sharing))


def _cpu_quota() -> float:
    """Cores whose time the control groups allow; inf without a limit."""
    return min(map(_quota_of, _control_groups()), default=inf)


def _control_groups() -> Iterator[Path]:
    """Folders of the control groups this process is in, and of all around them.

    A container sees its own group at the top, and may read a name that only its host has.
    """
    with contextlib.suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                top = _CGROUPS / "cpu" if controllers else _CGROUPS
                group = PurePosixPath(name.lstrip("/"))
                yield from (top / folder for folder in (group, *group.parents))


def _quota_of(group: Path) -> float:
    for names in _QUOTA_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such file; or it says "max"
            quota, period = (
                int(word) for name in names for word in (group / name).read_text().split()
            )
            return quota / period if quota > 0 else inf
    return inf
