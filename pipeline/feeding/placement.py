"""Where a process runs: its rank, its share of the cores, and the number of its workers."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


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


_PROCESSES = {
    "WORLD_SIZE": "RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables with the number of started processes, and with the rank of a process: torchrun, srun,
Open MPI, MPICH."""
_WORKERS_PER_CORE = 16
"""Largest number of workers per core. More is surely a mistake."""
_MOST_BY_DEFAULT = 4
"""Two workers deliver 41 to 161 M tokens/s (benchmarks/results/text_loaders.json). More than 4 only
take memory."""


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """A rank, the world size, and the groups of ranks that share a stream of windows."""

    rank: int
    world_size: int
    num_streams: int = 1
    is_given: bool = True
    """False if the rank is that of torch.distributed, or 0 because it was not initialized."""

    def check_now(self) -> None:
        """Raise a ConfigError if torch.distributed now has another rank or world size for this
        process, as after `torch.multiprocessing.spawn` of a function that got the loader."""
        now = None if self.is_given else _ranks_of_torch()
        if now not in (None, (self.rank, self.world_size)):
            raise ConfigError(
                f"this loader was made for rank {self.rank} of {self.world_size}, but now this "
                f"process has rank {now[0]} of {now[1]}: ranks would get the same rows. Make the "
                "loader in each process, after `init_process_group`, or pass `rank` and "
                "`world_size`."
            )

    @property
    def group_size(self) -> int:
        """Number of ranks of a group."""
        return self.world_size // self.num_streams

    @property
    def stream(self) -> int:
        """Number of the stream that the rank's group reads."""
        return self.rank // self.group_size

    @property
    def rank_in_group(self) -> int:
        """Rank within its group."""
        return self.rank % self.group_size


def resolve_ranks(
    rank: int | Literal["launcher"] | None,
    world_size: int | None,
    num_streams: int | Literal["nodes"] = 1,
) -> RankPlacement:
    """Return the rank and the world size. The defaults come from torch.distributed, or are 0 of 1.
    With the rank "launcher", both come from the variables of torchrun, srun or MPI.

    Raises:
        ConfigError: The rank is out of range, only one of the two was passed, torch.distributed is
            not initialized yet, or the launcher set no variables.
    """
    if rank == "launcher":
        rank, world_size = _launched_ranks(world_size)
    present, is_given = _ranks_of_torch(), rank is not None
    name, launched = first_number(*_PROCESSES)
    if None in (rank, world_size) and present is None and (launched or 1) > 1:
        raise ConfigError(
            f"{name}={launched}: {launched} processes were started, but torch.distributed is not "
            "initialized, so every process would get all rows. Make the loader after "
            "`init_process_group`, or pass `rank` and `world_size` (0 and 1 for separate runs), or "
            "`rank`='launcher'."
        )
    if (rank is None) != (world_size is None):
        given = f"`rank`={rank}" if world_size is None else f"`world_size`={world_size}"
        raise ConfigError(f"{given}: pass both `rank` and `world_size`, or neither.")
    if rank is None or world_size is None:
        rank, world_size = present or (0, 1)
    world_size = checks.whole("world_size", world_size, least=1, most=checks.MOST)
    if num_streams == "nodes":
        num_streams = _nodes_of(world_size)
    num_streams = checks.whole("num_streams", num_streams, least=1, other=", or 'nodes'")
    if world_size % num_streams:
        raise ConfigError(f"`num_streams`={num_streams} does not divide `world_size`={world_size}.")
    rank = checks.whole("rank", rank, most=world_size - 1, other=", below `world_size`")
    return RankPlacement(rank, world_size, num_streams, is_given)


def _ranks_of_torch() -> tuple[int, int] | None:
    """Return the rank and the world size of torch.distributed; None if it is not initialized."""
    distributed: Any = sys.modules.get("torch.distributed")  # not imported: not initialized
    if not (distributed and distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _launched_ranks(world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of processes from the launcher's variables."""
    if world_size is not None:
        raise ConfigError(
            f"`world_size`={world_size}: with `rank`='launcher', the launcher sets the number of "
            "processes. Leave `world_size` out."
        )
    name, size = first_number(*_PROCESSES)
    rank = os.environ.get(_PROCESSES.get(name, ""), "")
    if size is None or not rank.isdecimal():
        known = ", ".join(f"{of_rank} and {number}" for number, of_rank in _PROCESSES.items())
        raise ConfigError(
            f"`rank`='launcher': the environment has no rank and world size ({known}). Start the "
            "processes by torchrun, srun or mpirun, or pass `rank` and `world_size`."
        )
    return int(rank), size


def ranks_of(
    mesh: "DeviceMesh | ProcessGroup", dims: str | Sequence[str] | None = None
) -> tuple[int, int]:
    """Return the rank and the world size for a loader in a mesh of torch.distributed.

        rank, world_size = ranks_of(mesh, ("dp_replicate", "dp_shard"))
        loader = ShardLoader("out/", batching=batching, rank=rank, world_size=world_size)

    The ranks along `dims` share each step. Ranks that differ in another dimension only (tensor,
    pipeline or context parallelism) get the same rows. Example: in a mesh of shape (2, 2, 4) with
    the names dp_replicate, dp_shard and tp, the process at (1, 0, 3) has the rank 2 of 4.

    Args:
        mesh: A `DeviceMesh`, or a process group, whose ranks all share each step.
        dims: Names of the data-parallel dimensions of the mesh, such as "dp". It may be left out if
            the mesh has one dimension.

    Raises:
        ConfigError: The mesh has no such dimension, or does not contain this process.
    """
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, distributed.ProcessGroup):
        if dims is not None:
            raise ConfigError(f"`dims`={dims!r}: a process group has no dimensions.")
        return distributed.get_rank(mesh), distributed.get_world_size(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise checks.refusal("mesh", mesh, "a DeviceMesh or a process group that has this process")
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    wanted = (dims,) if isinstance(dims, str) else dims
    if wanted is None and mesh.ndim == 1:
        wanted = names
    if not wanted or not set(wanted) <= set(names):
        raise ConfigError(
            f"`dims`={dims!r}: the mesh has the dimensions {', '.join(names)}. Pass the "
            "names of the dimensions whose ranks get different rows."
        )
    if (coordinate := mesh.get_coordinate()) is None:
        raise ConfigError("`mesh`: this process is not in the mesh, so it gets no rows.")
    rank, size = 0, 1
    for name, at, length in zip(names, coordinate, mesh.shape, strict=True):
        if name in wanted:
            rank, size = rank * length + at, size * length
    return rank, size


def _nodes_of(world_size: int) -> int:
    """Return the number of nodes, if the launcher sets the ranks per node; else 1."""
    of_node = ranks_on_node()
    return world_size // of_node if of_node and world_size % of_node == 0 else 1


def can_have_workers() -> bool:
    """Return whether this system can hand open files to a new process, which workers need."""
    return hasattr(os, "fork")


def resolve_workers(num_workers: int | Literal["auto"], *, least: int = 0) -> int:
    """Check a number of workers, and raise it to `least`, the number that the data needs. "auto" is
    this rank's share of the cores, at most 4, or 0 on a system that cannot have workers.

    Raises:
        ConfigError: The number is out of range, or workers cannot run here.
    """
    if num_workers == "auto":
        num_workers = min(_MOST_BY_DEFAULT, cores_per_rank()) if can_have_workers() else 0
    if not can_have_workers() and max(least, num_workers if isinstance(num_workers, int) else 0):
        remote = " Copy data sets of stores to this machine by `shards copy`." if least else ""
        raise ConfigError(
            f"`num_workers`={num_workers}: loader workers cannot run on Windows, which lacks what "
            f"they share memory by. `num_workers`=0 reads in this process.{remote}"
        )
    most = _WORKERS_PER_CORE * num_cores()
    asked = checks.whole("num_workers", num_workers, most=most, other=" here, or 'auto'")
    checked = max(least, asked)
    if checked and (getattr(sys, "frozen", False) or not sys.executable):
        raise ConfigError(
            "loader workers cannot run here: this program is frozen or embedded, so it has no "
            "Python to start them with. `num_workers`=0 needs none."
        )
    return checked


def is_of_lightning(frame: FrameType) -> bool:
    """Return whether a function of the Trainer of Lightning runs in a frame."""
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(("lightning.pytorch.", "pytorch_lightning."))


def check_not_ahead(reader: FrameType) -> None:
    """Raise a ConfigError if the Trainer of Lightning itself iterates over a loader of the training
    split: it saves the state of the loader, and may have fetched a batch ahead."""
    if is_of_lightning(reader):
        raise ConfigError(
            "the Trainer of Lightning fetches one batch ahead, so a run that resumes from its "
            "checkpoints would lose that batch. Pass `StatefulShardLoader(loader)` of "
            "`tokenfeed.integrations.dataloader` to it, or a ShardDataModule."
        )


def check_no_copies() -> None:
    """Raise a ConfigError in a worker of a torch DataLoader.

    A worker has a copy of the loader. Several workers would deliver all batches each. With one, the
    loader in the script would keep the position of the start, and save it.
    """
    of_torch: Any = sys.modules.get("torch.utils.data")
    if worker := of_torch and of_torch.get_worker_info():
        raise ConfigError(
            f"`num_workers`={worker.num_workers} of a DataLoader around a ShardLoader: each worker "
            "would deliver all batches from a copy of the loader, and a saved state would stay at "
            "the start. Set the `num_workers` of the ShardLoader, and that of the DataLoader to 0."
        )
