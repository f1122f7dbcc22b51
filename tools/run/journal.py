"""The journal: what an unfinished run has behind it, so that the same command continues there.

`.journal.jsonl` in the output folder. Its first line says what recipe this is; each further line is
one finished unit, appended and synced when the unit's shards are in place; or it says that the fast
engine was found wrong, and then no unit before it counts. A kill can only cut the last line short,
which then counts as not written. One run at a time holds it, by a file lock.
"""

import dataclasses
import io
import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self

import msgspec

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.locking import hold
from tokenfeed.pipeline.format.manifest import JOURNAL_FILE
from tokenfeed.tools.outputs.output import is_as_written
from tokenfeed.tools.run.records import ResultT, whole

__all__ = [
    "Journal",
    "recipe_in",
    "says_its_recipe",
]

logger = logging.getLogger(__name__)

_REJECTED = "distrusted"
"""The key as journals of unfinished runs have it."""


class Journal(Generic[ResultT]):
    """The journal of an output folder, locked for this process until it is closed."""

    def __init__(self, folder: Path, file: io.FileIO, kind: type[ResultT]) -> None:
        """Use `open`."""
        self.path = folder / JOURNAL_FILE
        self.recipe: dict[str, Any] = {}
        self.results: dict[int, ResultT] = {}
        """Finished units by number."""
        self.engine_rejected = False
        """Whether the fast engine was found wrong, so that the reference makes all ids."""
        self.is_new = False
        self.made_folders: list[Path] = []
        """Folders above the output folder that had to be made, the innermost first."""
        self._file = file
        self._kind = kind
        self._lock()

    @classmethod
    def open(cls, folder: Path, recipe: dict[str, Any], kind: type[ResultT]) -> "Journal[ResultT]":
        """Open the journal that an unfinished run left in `folder`, or begin one for `recipe`.

        Its results are of the given kind; of another recipe's journal only the recipe is read.

        Raises:
            ConfigError: Another run is writing into this folder.
            ManifestError: The journal is damaged.
        """
        missing = [parent for parent in folder.parents if not parent.exists()]
        journal = cls(folder, _opened(folder), kind)
        journal._load(recipe)
        journal.made_folders = missing
        if not journal.recipe:
            journal._write(recipe)
            journal.recipe = recipe
            journal.is_new = True
        return journal

    def append(self, result: ResultT) -> None:
        """Record a finished unit, for good."""
        self._write(dataclasses.asdict(result))  # type: ignore[call-overload]
        self.results[result.unit] = result

    def take_over(self, results: dict[int, ResultT], *, rejected: bool) -> None:
        """Record units that others have finished, and whether they found the fast engine wrong."""
        if rejected and not self.engine_rejected:
            self.reject_engine("by another part")
        new = {n: result for n, result in results.items() if self.results.get(n) != result}
        self._write(*map(dataclasses.asdict, new.values()))  # type: ignore[arg-type]
        self.results |= new

    def reject_engine(self, reason: str) -> None:
        """Record that the fast engine is wrong: what it has made is to be made again."""
        self._write({_REJECTED: reason})
        self.engine_rejected = True
        self.results = {}

    def _write(self, *lines: dict[str, Any]) -> None:
        rest = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
        try:
            while rest:  # unbuffered: what a full disk refuses, closing the file does not try again
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            error.filename = str(self.path)
            raise

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
        _hold(self._file, self.path)

    def _load(self, recipe: dict[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        try:
            lines = [_decoded(line) for line in content[:whole].splitlines()]
            self.recipe = lines[0] if lines else {}
            for line in lines[1:] if self.recipe == recipe else []:
                self._enter(line)
        except (ValueError, RecursionError) as error:  # msgspec's errors are kinds of ValueError
            self.close()
            raise ManifestError(
                f"{self.path}: is damaged ({error}). Delete the folder {self.path.parent} and "
                "start again."
            ) from error
        self._file.truncate(whole)
        self.drop_damaged()

    def _enter(self, line: dict[str, Any]) -> None:
        if _REJECTED in line:
            self.engine_rejected = True
            self.results = {}
        else:
            result = msgspec.convert(line, self._kind)
            self.results[result.unit] = result

    def drop_damaged(self) -> bool:
        """Forget units whose shards are not as they were left; they are simply run again.

        Returns:
            Whether there are any. All shards are read for it.
        """
        has = partial(is_as_written, self.path.parent)
        found, self.results = self.results, whole(has, self.results)
        if damaged := len(found) - len(self.results):
            logger.warning(
                "%s: shards of %d finished units are missing or damaged, and made again",
                self.path.parent,
                damaged,
            )
        return bool(damaged)


def _opened(folder: Path) -> io.FileIO:
    """The journal of a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made ({error.strerror}). Give a folder elsewhere."
        ) from error
    return open(folder / JOURNAL_FILE, "a+b", buffering=0)


def _hold(file: io.FileIO, path: Path) -> None:
    """Keep other runs out until the file is closed."""
    opened = os.fstat(file.fileno())
    try:
        held = hold(file) and os.path.samestat(opened, os.stat(path))
    except FileNotFoundError:
        held = False
    if not held:  # locked by another run, or by one that has just ended and removed it
        file.close()
        raise ConfigError(f"{path.parent}: another run is writing here. Wait for it or end it.")


def says_its_recipe(folder: Path) -> bool:
    """Whether the journal in `folder` has a whole first line. A kill or a full disk can leave one
    without; the next command may then begin anew."""
    try:
        with open(folder / JOURNAL_FILE, "rb") as file:
            return file.readline().endswith(b"\n")
    except FileNotFoundError:  # of a run that has just finished, as opening it will tell
        return True


def recipe_in(folder: Path) -> dict[str, Any] | None:
    """The recipe of the unfinished run in `folder`, if it says one."""
    try:
        with open(folder / JOURNAL_FILE, "rb") as file:
            line = file.readline()
        return _decoded(line) if line.endswith(b"\n") else None
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _decoded(line: bytes) -> dict[str, Any]:
    """A line of the journal. Not by msgspec: a name that is no UTF-8 has lone surrogates here."""
    content: dict[str, Any] = msgspec.convert(json.loads(line), dict[str, Any])
    return content
