"""How many cores there are: by affinity, by the container's quota, and shared with other ranks."""

import contextlib
import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path, PurePosixPath

__all__ = ["cores_per_rank", "first_number", "num_cores", "ranks_on_node", "usable_cores"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_RANKS_ON_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Set by torchrun, Open MPI and MPICH."""
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
    """This rank's share of the cores, at least 1.

    The launcher says how many ranks share a node. Under srun, a rank that is bound to a part of the
    job's cores has them alone.
    """
    sharing, cores = ranks_on_node(), num_cores()
    _, of_job = first_number("SLURM_CPUS_ON_NODE")
    if first_number(*_RANKS_ON_NODE)[1] is None and of_job is not None and cores < of_job:
        sharing = None
    return max(1, int(min(cores, _cpu_quota()) / (sharing or 1)))


def ranks_on_node() -> int | None:
    """Ranks on this node, as the launcher says. None: it says nothing."""
    return first_number(*_RANKS_ON_NODE, "SLURM_STEP_TASKS_PER_NODE")[1]


def first_number(*names: str) -> tuple[str, int | None]:
    """The first of some environment variables that begins with a positive number, such as 4(x2)."""
    for name in names:
        if (found := re.match("[1-9][0-9]*", os.environ.get(name, ""))) is not None:
            return name, int(found[0])
    return "", None


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
