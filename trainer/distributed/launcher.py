"""Environment variables set by a launcher: torchrun, or srun with variables of the same names."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import atomic_write

_MARK_FILE = "launch.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One process of those that train together."""

    rank: int
    size: int
    local_rank: int
    """Number of the process on its machine, and of its GPU."""
    group: str
    """The same for a group and its restarts; empty if the launcher does not restart groups."""
    restarts: int
    """How often the launcher restarted the group."""
    may_restart: bool

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
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return cls(
            rank=_number("RANK", 0 if size == 1 else None),
            size=size,
            local_rank=_number("LOCAL_RANK", 0),
            group=f"{run_id} {os.getppid()}" if run_id == "none" else run_id,
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
            may_restart=_number("TORCHELASTIC_MAX_RESTARTS", 0) > 0,
        )

    def begin(self, run_dir: Path) -> None:
        """Record that this group started the run, so that a restart may resume it."""
        if self.may_restart:
            run_dir.mkdir(parents=True, exist_ok=True)
            atomic_write(run_dir / _MARK_FILE, self.group.encode())

    def has_begun(self, run_dir: Path) -> bool:
        """Return whether this is a restart of a group that started the run."""
        if not self.restarts:
            return False
        try:
            return (run_dir / _MARK_FILE).read_text() == self.group
        except OSError:
            return False


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
