"""Count the cores of this rank: by affinity, by container quota, and shared with other ranks."""

import contextlib
import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
_RANKS_ON_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables with the ranks per node: torchrun, Open MPI, MPICH."""
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of version 2, of 1


def num_cores() -> int:
    """Return the number of cores that the affinity of this process allows."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Return the whole cores that affinity and container quota allow, at least 1."""
    return max(1, int(min(num_cores(), _cpu_quota())))


def cores_per_rank() -> int:
    """Return this rank's share of the cores, at least 1.

    The cores are divided by the number of ranks on the node, which the launcher sets. If srun has
    bound this rank to cores of its own, they are not divided.
    """
    sharing, cores = ranks_on_node(), num_cores()
    _, of_job = first_number("SLURM_CPUS_ON_NODE")
    if first_number(*_RANKS_ON_NODE)[1] is None and of_job is not None and cores < of_job:
        sharing = None
    return max(1, int(min(cores, _cpu_quota()) / (sharing or 1)))


def ranks_on_node() -> int | None:
    """Return the number of ranks on this node from the launcher's variables; None if unset."""
    return first_number(*_RANKS_ON_NODE, "SLURM_STEP_TASKS_PER_NODE")[1]


def first_number(*names: str) -> tuple[str, int | None]:
    """Return name and value of the first variable that begins with a positive number, such as
    4(x2)."""
    for name in names:
        if (found := re.match("[1-9][0-9]*", os.environ.get(name, ""))) is not None:
            return name, int(found[0])
    return "", None


def _cpu_quota() -> float:
    """Return the number of cores that the control groups allow; inf without a limit."""
    return min(map(_quota_of, control_groups("cpu")), default=inf)


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, the innermost first.

    Args:
        controller: What the groups limit, such as cpu or memory.

    A container sees its own group at the top, and may read a group name of the host.
    """
    with contextlib.suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                top = CGROUPS / controller if controllers else CGROUPS
                group = PurePosixPath(name.lstrip("/"))
                yield from (top / folder for folder in (group, *group.parents))


def _quota_of(group: Path) -> float:
    for names in _QUOTA_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such file, or its value is "max"
            quota, period = (
                int(word) for name in names for word in (group / name).read_text().split()
            )
            return quota / period if quota > 0 else inf
    return inf
