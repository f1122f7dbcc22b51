"""What a launcher says in the environment: torchrun, or srun with variables of the same names."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import atomic_write

__all__ = ["Launch"]

_MARK_FILE = "launch.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One process among those that train together."""

    rank: int
    size: int
    local_rank: int
    """Which process of its machine: it has the GPU of that number."""
    group: str
    """What a restart has in common with what it restarts; empty without a launcher that does."""
    restarts: int
    """How often the group was started again."""
    may_restart: bool

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    @classmethod
    def of_environment(cls) -> Self:
        """As the launcher has it; without one a process is alone.

        Raises:
            ConfigError: A variable is missing or no number.
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
        """Note that a run was begun by this group, so that a restart may go on with it."""
        if self.may_restart:
            run_dir.mkdir(parents=True, exist_ok=True)
            atomic_write(run_dir / _MARK_FILE, self.group.encode())

    def has_begun(self, run_dir: Path) -> bool:
        """Whether this is a restart, and the run was begun by this group before it."""
        if not self.restarts:
            return False
        try:
            return (run_dir / _MARK_FILE).read_text() == self.group
        except OSError:
            return False


def _number(name: str, default: int | None) -> int:
    said = os.environ.get(name)
    if said is None and default is not None:
        return default
    if said is None or not said.isdecimal():
        raise ConfigError(
            f"{name}={said or ''}: expected a number, beside WORLD_SIZE="
            f"{os.environ.get('WORLD_SIZE', '')}. Start with torchrun, which sets both."
        )
    return int(said)
