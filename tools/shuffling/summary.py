"""What a shuffle has to say at its end, for people and for scripts."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenfeed.pipeline.format.manifest import Manifest

__all__ = ["ShuffleSummary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleSummary:
    """The figures of a shuffled data set and of the run that finished it."""

    out: str
    seed: int
    splits: dict[str, int]
    """Rows by split."""
    tokens: int
    shards: int
    shard_bytes: int
    """All shards on disk."""
    already_finished: bool
    """Whether there was nothing left to do."""
    units: int
    resumed_units: int
    """Units that an earlier, interrupted run had finished."""
    workers: int
    seconds: float
    mb_per_s: float
    """Shards of the input in 10^6 bytes, as far as this run has shuffled them, over `seconds`."""

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest,
        *,
        folder: Path,
        already_finished: bool,
        units: int,
        resumed_units: int,
        workers: int,
        new_bytes: float,
        seconds: float,
    ) -> "ShuffleSummary":
        """Draw it up from what the run has left."""
        assert manifest.shuffled is not None
        splits = manifest.splits
        return cls(
            out=str(folder),
            seed=manifest.shuffled.seed,
            splits={name: split.rows for name, split in splits.items()},
            tokens=sum(split.tokens for split in splits.values()),
            shards=sum(len(split.shards) for split in splits.values()),
            shard_bytes=sum(shard.bytes for split in splits.values() for shard in split.shards),
            already_finished=already_finished,
            units=units,
            resumed_units=resumed_units,
            workers=workers,
            seconds=round(seconds, 2),
            mb_per_s=round(new_bytes / 1e6 / seconds, 2),
        )

    def as_json(self) -> dict[str, Any]:
        """A JSON object of all fields."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = ", ".join(f"{rows:,} {name}" for name, rows in self.splits.items())
        resumed = f", {self.resumed_units:,} of them by earlier runs" if self.resumed_units else ""
        lines = {
            "rows": f"{sum(self.splits.values()):,}: {rows}",
            "tokens": f"{self.tokens:,}",
            "shards": f"{self.shards:,}, {self.shard_bytes / 1e6:,.1f} MB",
            "order": f"seed {self.seed}",
            "speed": f"{self.mb_per_s:,.1f} MB/s of shards, {self.units:,} units{resumed}",
            "time": f"{self.seconds:,.1f} s",
            "output": self.out,
        }
        return "\n".join(f"{name:<12}{text}" for name, text in lines.items())
