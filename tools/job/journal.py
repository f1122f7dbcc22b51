"""The journal: what an unfinished run has behind it, so that the same command continues there.

`.journal.jsonl` in the output folder. Its first line says what job this is; each further line is
one finished unit, appended and synced when the unit's shards are in place; or it says that the fast
engine was found wrong, and then no unit before it counts. A kill can only cut the last line short,
which then counts as not written. One run at a time holds it, by a file lock.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import IO, Any, Self

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.locking import hold
from tokenfeed.pipeline.format.manifest import JOURNAL_FILE
from tokenfeed.tools.encoding.ledger import UnitResult

__all__ = ["Journal"]

_DISTRUSTED = "distrusted"


class Journal:
    """The journal of an output folder, locked for this process until it is closed."""

    def __init__(self, folder: Path, file: IO[bytes]) -> None:
        """Use `open`."""
        self.path = folder / JOURNAL_FILE
        self.job: dict[str, Any] = {}
        self.results: dict[int, UnitResult] = {}
        """Finished units by number."""
        self.distrusted = False
        """Whether the fast engine was found wrong, so that the reference makes all ids."""
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

    def distrust(self, reason: str) -> None:
        """Record that the fast engine is wrong: what it has made is to be made again."""
        self._write({_DISTRUSTED: reason})
        self.distrusted = True
        self.results = {}

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
        opened = os.fstat(self._file.fileno())
        try:
            held = hold(self._file) and os.path.samestat(opened, os.stat(self.path))
        except FileNotFoundError:
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
            self.job = lines[0] if lines else {}
            for line in lines[1:]:
                self._enter(line)
        except (ValueError, TypeError, KeyError) as error:
            self.close()
            raise ManifestError(
                f"{self.path}: is damaged ({error}). Delete the folder {self.path.parent} and "
                "start again."
            ) from error
        self._file.truncate(whole)

    def _enter(self, line: dict[str, Any]) -> None:
        if _DISTRUSTED in line:
            self.distrusted = True
            self.results = {}
        elif self._has_shards(result := UnitResult.from_json(line)):
            self.results[result.unit] = result


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
