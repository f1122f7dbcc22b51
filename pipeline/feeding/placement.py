"""Where a loader stands: as which rank of how many, with how many workers."""

from dataclasses import dataclass
from typing import Literal

import torch.distributed

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.cores import first_number, num_cores, ranks_on_node
from tokenfeed.pipeline.feeding.process import check_workers_can_run

__all__ = ["Ranks", "resolve_ranks", "resolve_workers"]

_PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How torchrun, srun, Open MPI and MPICH say how many processes they have started."""
_WORKERS_PER_CORE = 16
"""More could only be a slip of the finger, and would bring the machine down."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank among all, and within the group of ranks that share a stream of windows."""

    rank: int
    world_size: int
    num_streams: int = 1

    @property
    def group_size(self) -> int:
        """Ranks of a group."""
        return self.world_size // self.num_streams

    @property
    def stream(self) -> int:
        """Which of the streams its group reads."""
        return self.rank // self.group_size

    @property
    def rank_in_group(self) -> int:
        """Which rank of its group."""
        return self.rank % self.group_size


def resolve_ranks(
    rank: int | None, world_size: int | None, num_streams: int | Literal["nodes"] = 1
) -> Ranks:
    """Return which rank this is, of how many. The defaults are torch.distributed's, or 0 of 1.

    Raises:
        ConfigError: There is no such rank, or torch.distributed will know only later.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    name, launched = first_number(*_PROCESSES)
    if None in (rank, world_size) and not running and (launched or 1) > 1:
        raise ConfigError(
            f"{name}={launched} says that {launched} processes train together, but which one this "
            "is will be known after `init_process_group`, and each would get all rows. Make the "
            "loader after it, or pass `rank` and `world_size` (0 and 1 if they train apart)."
        )
    if rank is None:
        rank = torch.distributed.get_rank() if running else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if running else 1
    world_size = checks.whole("world_size", world_size, least=1, most=checks.MOST)
    if num_streams == "nodes":
        num_streams = _nodes_of(world_size)
    num_streams = checks.whole("num_streams", num_streams, least=1, other=", or 'nodes'")
    if world_size % num_streams:
        raise ConfigError(f"`num_streams`={num_streams} does not divide `world_size`={world_size}.")
    rank = checks.whole("rank", rank, most=world_size - 1, other=", below `world_size`")
    return Ranks(rank, world_size, num_streams)


def _nodes_of(world_size: int) -> int:
    """Nodes that ranks are on, if the launcher says how many each has, else 1."""
    of_node = ranks_on_node()
    return world_size // of_node if of_node and world_size % of_node == 0 else 1


def resolve_workers(num_workers: int, *, least: int = 0) -> int:
    """A number of workers that this machine can run; at least as many as the data need.

    Raises:
        ConfigError: It is no number or out of range, or workers cannot run here.
    """
    most = _WORKERS_PER_CORE * num_cores()
    asked = checks.whole("num_workers", num_workers, most=most, other=" here, or 'auto'")
    checked = max(least, asked)
    if checked:
        check_workers_can_run()
    return checked
