"""`shards shuffle IN OUT`: what the command line says, and what it means."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.cores import num_cores
from tokenfeed.pipeline.sizes import bytes_of
from tokenfeed.tools.console import print_json
from tokenfeed.tools.shuffling.run import Settings, shuffle_dataset

__all__ = ["ShuffleRows"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleRows:
    """Put all rows of each split into a random order, in a new data set.

    The same command continues a run that was interrupted. While it runs it takes up to four times
    the room of OUT for temporary files in OUT, of a large IN about as much as OUT.
    """

    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="IN")]]
    """A finished data set, or an address that a store is registered for; it is only read."""
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """A new or empty folder, or the one of an interrupted run."""
    seed: int = 0
    """Another seed gives another order."""
    shard_size: str = "auto"
    """Text in a shard, like 256MB; auto: as many shards as IN has."""
    memory: str = "1GB"
    """What rows in memory may take, in all processes together; more helps beyond 100GB of rows. No
    influence on the output."""
    workers: int | Literal["auto"] = "auto"
    """Processes; auto: one a core, as far as they find room. No influence on the output."""
    json: bool = False
    """Print the summary as JSON."""

    def run(self) -> int:
        """Shuffle it."""
        summary = shuffle_dataset(self.source, self.out, self._settings())
        if summary.already_finished:
            logger.info("already finished: the same command and input made this data set")
        if self.json:
            print_json(summary.as_json())
        else:
            print(summary)
        return 0

    def _settings(self) -> Settings:
        workers = num_cores() if self.workers == "auto" else self.workers
        if workers < 1:
            raise ConfigError(f"`--workers` {self.workers}: expected at least 1, or auto.")
        is_auto = self.shard_size == "auto"
        return Settings(
            seed=self.seed,
            shard_bytes=None
            if is_auto
            else bytes_of(self.shard_size, flag="--shard-size", otherwise="auto"),
            memory_bytes=bytes_of(self.memory, flag="--memory"),
            workers=workers,
        )
