"""Environment variables set by a launcher: torchrun, or srun with variables of the same names."""

import os
from dataclasses import dataclass
from typing import Self

from tokenfeed.pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One process of those that train together."""

    rank: int
    size: int
    local_rank: int
    """Number of the process on its machine, and of its GPU."""
    restarts: int
    """How often the launcher restarted the processes."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and logs progress."""
        return self.rank == 0

    @classmethod
    def of_environment(cls) -> Self:
        """Read the environment. Without a launcher, the process is alone.

        Raises:
            ConfigError: A variable is missing or not a number.
        """
        size = _number("WORLD_SIZE", 1)
        return cls(
            rank=_number("RANK", 0 if size == 1 else None),
            size=size,
            local_rank=_number("LOCAL_RANK", 0),
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
        )


def _number(name: str, default: int | None) -> int:
    found = os.environ.get(name)
    if found is None and default is not None:
        return default
    if found is None or not found.isdecimal():
        raise ConfigError(
            f"{name}={found or ''}: expected a number, beside WORLD_SIZE="
            f"{os.environ.get('WORLD_SIZE', '')}. Start with torchrun, which sets both."
        )
    return int(found)
