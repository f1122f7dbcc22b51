"""Parts of a run, each a process of its own: on any machines, in any order, at once or repeated.

They share the output folder and nothing else. `.parts` there holds `job.json`, which says what
recipe this is, and for every finished unit a record, named when the unit's shards are in place; or
`distrusted.json` says that the fast engine was found wrong. Every file comes to be whole and at
once, and two of a name mean the same, so nobody need wait for anybody. The run that finishes the
data set takes the records over.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self

import msgspec

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import PARTS_FOLDER
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.tools.run.journal import recipe_in
from tokenfeed.tools.run.recipe import differences
from tokenfeed.tools.run.records import ResultT, whole
from tokenfeed.tools.run.versions import versions

__all__ = ["Part", "Parts", "parts_in", "remove_parts"]

_JOB_FILE, _DISTRUSTED_FILE = "job.json", "distrusted.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One of several processes that share the units of a run."""

    index: int
    count: int

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The part that `--part` names.

        Raises:
            ConfigError: It names none.
        """
        words = text.split("/")
        if len(words) == 2 and all(word.isascii() and word.isdecimal() for word in words):
            index, count = map(int, words)
            if index < count:
                return cls(index, count)
        raise ConfigError(
            f"`--part` {text}: expected I/N, the number of this part from 0 and how many there "
            "are, like 0/16."
        )

    def has(self, number: int) -> bool:
        """Whether the unit of this number is one of its own."""
        return number % self.count == self.index


class Parts(Generic[ResultT]):
    """What the parts of a run have left, and the place where one more leaves the like."""

    def __init__(self, folder: Path, kind: type[ResultT]) -> None:
        """Use `begin` or `left_in`."""
        self.results: dict[int, ResultT] = {}
        """Finished units by number."""
        self._output = folder
        self._folder = folder / PARTS_FOLDER
        self._kind = kind

    @classmethod
    def begin(cls, folder: Path, recipe: dict[str, Any], kind: type[ResultT], part: Part) -> Self:
        """Begin a part, or go on with it.

        Args:
            folder: The output folder; made if need be.
            recipe: Everything the output depends on.
            kind: What is kept of a finished unit.
            part: Which units are its own: only these are looked at.

        Raises:
            ConfigError: Other parts, or a run without parts, were begun by another command.
        """
        parts = cls(folder, kind)
        parts._check_same(recipe_in(folder) or recipe, recipe)
        parts._make_folder()
        parts._enter_job(recipe, part.count)
        parts._check_job(recipe)
        if (count := parts._job()["parts"]) != part.count:
            raise ConfigError(
                f"{folder}: was begun in {count} parts, and this is one of {part.count}. Say "
                f"`--part I/{count}`, or give another folder."
            )
        parts._load(part)
        return parts

    @classmethod
    def left_in(cls, folder: Path, recipe: dict[str, Any], kind: type[ResultT]) -> Self | None:
        """What parts have left in a folder; None where none was begun.

        Raises:
            ConfigError: They were begun by another command.
        """
        parts = cls(folder, kind)
        if not (parts._folder / _JOB_FILE).exists():
            return None
        parts._check_job(recipe)
        parts._load(Part(0, 1))
        return parts

    @property
    def engine_rejected(self) -> bool:
        """Whether any part has found the fast engine wrong."""
        return (self._folder / _DISTRUSTED_FILE).exists()

    def append(self, result: ResultT) -> None:
        """Record a finished unit, for good."""
        content: dict[str, Any] = dataclasses.asdict(result)  # type: ignore[call-overload]
        self._write(f"{result.unit:05d}.json", content)
        self.results[result.unit] = result

    def reject_engine(self, reason: str) -> None:
        """Record that the fast engine is wrong: what any part has made by it is made again."""
        self._write(_DISTRUSTED_FILE, {"reason": reason})
        self.results = {}

    def drop_damaged(self) -> bool:
        """Forget units whose shards are not as they were left; whether there are any."""
        found, self.results = self.results, whole(self._output, self.results)
        return len(self.results) < len(found)

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self._output}: cannot be made ({error.strerror}). Give a folder elsewhere."
            ) from error

    def _enter_job(self, recipe: dict[str, Any], count: int) -> None:
        """Say what is being made, unless another part has said it."""
        job = self._folder / _JOB_FILE
        own = job.with_name(f"{_JOB_FILE}.{os.urandom(8).hex()}")
        atomic_write(own, json.dumps({"parts": count, "recipe": _named(recipe)}).encode())
        try:
            os.link(own, job)
        except FileExistsError:
            pass
        except OSError:  # a file system without links: the last of those that begin at once says it
            if not job.exists():
                os.replace(own, job)
        own.unlink(missing_ok=True)

    def _check_job(self, recipe: dict[str, Any]) -> None:
        self._check_same(self._job()["recipe"], _named(recipe))

    def _check_same(self, was: dict[str, Any], now: dict[str, Any]) -> None:
        if difference := differences(was, now):
            raise ConfigError(
                f"{self._output}: was begun by another command, input or machine: {difference}. "
                "Repeat the first command, or give another folder."
            )

    def _job(self) -> dict[str, Any]:
        try:
            job: dict[str, Any] = json.loads((self._folder / _JOB_FILE).read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                f"{self._output}: another run has finished it, or was withdrawn, meanwhile."
            ) from None
        return job

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self._job()  # or the folder would be made anew
        atomic_write(self._folder / name, json.dumps(content).encode() + b"\n", is_shared=True)

    def _load(self, part: Part) -> None:
        """Read the records of a part, and look at the shards that they name."""
        self.results = whole(self._output, dict(self._records(part)))

    def _records(self, part: Part) -> Iterator[tuple[int, ResultT]]:
        for path in sorted(self._folder.glob("*.json")):
            if path.stem.isdecimal() and part.has(int(path.stem)):
                with contextlib.suppress(ValueError, FileNotFoundError):  # damaged: done again
                    record = msgspec.convert(json.loads(path.read_bytes()), self._kind)
                    yield record.unit, record


def parts_in(folder: Path) -> int | None:
    """How many parts a run was begun in; None where it was begun without."""
    try:
        count: int = json.loads((folder / PARTS_FOLDER / _JOB_FILE).read_bytes())["parts"]
    except FileNotFoundError:
        return None
    return count


def remove_parts(folder: Path) -> None:
    """Delete what parts have left in an output folder: it is taken over, or of no use."""
    shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)


def _named(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe, and the packages that every part must have."""
    return recipe | {"the packages": versions()}
