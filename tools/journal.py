"""The journal: what an unfinished run has behind it, so that the same command continues there.

`.journal.jsonl` in the output folder. Its first line says what job this is; each further line is
one finished unit, appended and synced when the unit's shards are in place. A kill can only cut the
last line short, which then counts as not written. One run at a time holds it, by a file lock.
"""

import dataclasses
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.manifest import ShardInfo

__all__ = ["JOURNAL_FILE", "Journal", "SourceCounts", "UnitResult"]

JOURNAL_FILE = ".journal.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """What became of the records of one input file, within one unit."""

    source: int
    bytes: int
    """Bytes of text encoded, as UTF-8."""
    written: int
    empty: int
    rejected: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """All that is kept of a finished unit, beside its shards."""

    unit: int
    shards: dict[str, ShardInfo]
    """The shard of each split that has rows."""
    histograms: dict[str, list[int]]
    """Rows by length, of the same splits."""
    sources: list[SourceCounts]
    rejects: list[tuple[int, int, str]]
    """Source, record and reason, in the order of the input."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "UnitResult":
        """Build it from a line of the journal."""
        return cls(
            unit=content["unit"],
            shards={split: ShardInfo(**shard) for split, shard in content["shards"].items()},
            histograms=content["histograms"],
            sources=[SourceCounts(**counts) for counts in content["sources"]],
            rejects=[(source, record, reason) for source, record, reason in content["rejects"]],
        )


class Journal:
    """The journal of an output folder, locked for this process until it is closed."""

    def __init__(self, folder: Path, file: IO[bytes]) -> None:
        """Use `open`."""
        self.path = folder / JOURNAL_FILE
        self.job: dict[str, Any] = {}
        self.results: dict[int, UnitResult] = {}
        """Finished units by number."""
        self.is_new = False
        self._file = file
        self._lock()
        self._load()

    @classmethod
    def open(cls, folder: Path, job: dict[str, Any]) -> "Journal":
        """Open the journal that an unfinished run left in `folder`, or begin one for `job`.

        Raises:
            ConfigError: Another run is writing into this folder.
            ManifestError: The journal is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        journal = cls(folder, open(folder / JOURNAL_FILE, "a+b"))  # noqa: SIM115 - open as long as the run
        if not journal.job:
            journal._write(job)
            journal.job = job
            journal.is_new = True
        return journal

    def append(self, result: UnitResult) -> None:
        """Record a finished unit, for good."""
        self._write(dataclasses.asdict(result))
        self.results[result.unit] = result

    def _write(self, content: dict[str, Any]) -> None:
        self._file.write(_line(content))
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Delete the journal of a run that needs it no longer."""
        self.path.unlink()

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:  # locked by another run, or by one that has just ended and removed it
            self.close()
            raise ConfigError(
                f"{self.path.parent}: another run is writing here. Wait for it or end it."
            )

    def _has_shards(self, result: UnitResult) -> bool:
        """Whether a unit's shards are where it left them; if not, it is simply run again."""
        paths = {self.path.parent / shard.file: shard.bytes for shard in result.shards.values()}
        return all(path.exists() and path.stat().st_size == n for path, n in paths.items())

    def _load(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in content[:whole].splitlines()]
            self.job, units = lines[0] if lines else {}, lines[1:]
            results = [UnitResult.from_json(unit) for unit in units]
        except (ValueError, TypeError, KeyError) as error:
            self.close()
            raise ManifestError(
                f"{self.path}: is damaged ({error}). Delete the folder {self.path.parent} and "
                "start again."
            ) from error
        self.results = {result.unit: result for result in results if self._has_shards(result)}
        self._file.truncate(whole)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
