"""Parts of a run, each a process of its own: on any machines, in any order, at once or repeated.

They share the output and nothing else. `.parts` there holds `job.json`, which says what recipe this
is, and for every finished unit a record, named when the unit's shards are in place; or
`distrusted.json` says that the fast engine was found wrong. Every file comes to be whole and at
once, and two of a name mean the same, so nobody need wait for anybody. The run that finishes the
data set takes the records over.
"""

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Generic, Self

import msgspec

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import JOB_FILE, PARTS_FOLDER
from tokenfeed.tools.at_once import results_of
from tokenfeed.tools.outputs.output import FolderOutput, Output
from tokenfeed.tools.run.journal import recipe_in
from tokenfeed.tools.run.recipe import differences
from tokenfeed.tools.run.records import ResultT, whole
from tokenfeed.tools.run.versions import versions

__all__ = ["Part", "Parts", "is_begun", "parts_in", "remove_parts"]

_AT_ONCE = 16
"""Records that are read at the same time."""
_DISTRUSTED_FILE = f"{PARTS_FOLDER}/distrusted.json"


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

    def __init__(self, output: Output, kind: type[ResultT]) -> None:
        """Use `begin` or `left_in`."""
        self.results: dict[int, ResultT] = {}
        """Finished units by number."""
        self._output = output
        self._kind = kind

    @classmethod
    def begin(cls, output: Output, recipe: dict[str, Any], kind: type[ResultT], part: Part) -> Self:
        """Begin a part, or go on with it.

        Args:
            output: Where the data set is made; made itself if need be.
            recipe: Everything the output depends on.
            kind: What is kept of a finished unit.
            part: Which units are its own: only these are looked at.

        Raises:
            ConfigError: Other parts, or a run without parts, were begun by another command.
        """
        parts = cls(output, kind)
        if isinstance(output, FolderOutput):
            parts._check_same(recipe_in(output.folder) or recipe, recipe)
        output.prepare()
        parts._enter_job(recipe, part.count)
        parts._check_job(recipe)
        if (count := parts._job()["parts"]) not in (part.count, None):
            raise ConfigError(
                f"{output}: was begun in {count} parts, and this is one of {part.count}. Say "
                f"`--part I/{count}`, or give another folder."
            )
        parts._load(part)
        return parts

    @classmethod
    def left_in(cls, output: Output, recipe: dict[str, Any], kind: type[ResultT]) -> Self | None:
        """What parts have left in an output; None where none was begun.

        Raises:
            ConfigError: They were begun by another command.
        """
        parts = cls(output, kind)
        if not is_begun(output):
            return None
        parts._check_job(recipe)
        parts._load(Part(0, 1))
        return parts

    @property
    def engine_rejected(self) -> bool:
        """Whether any part has found the fast engine wrong."""
        return self._output.size(_DISTRUSTED_FILE) is not None

    def append(self, result: ResultT) -> None:
        """Record a finished unit, for good."""
        content: dict[str, Any] = dataclasses.asdict(result)  # type: ignore[call-overload]
        self._write(f"{PARTS_FOLDER}/{result.unit:05d}.json", content)
        self.results[result.unit] = result

    def reject_engine(self, reason: str) -> None:
        """Record that the fast engine is wrong: what any part has made by it is made again."""
        self._write(_DISTRUSTED_FILE, {"reason": reason})
        self.results = {}

    def drop_damaged(self) -> bool:
        """Forget units whose shards are not as they were left; whether there are any."""
        found, self.results = self.results, whole(self._output.has, self.results)
        return len(self.results) < len(found)

    def _enter_job(self, recipe: dict[str, Any], count: int | None) -> None:
        """Say what is being made, unless another has said it."""
        job = {"parts": count, "recipe": _named(recipe)}
        self._output.create(JOB_FILE, json.dumps(job).encode())

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
            return _job_in(self._output)
        except FileNotFoundError:
            raise ConfigError(
                f"{self._output}: another run has finished it, or was withdrawn, meanwhile."
            ) from None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self._job()  # or the folder would be made anew
        self._output.write(name, json.dumps(content).encode() + b"\n")

    def _load(self, part: Part) -> None:
        """Read the records of a part, and look at the shards that they name."""
        names = sorted(name for name in self._output.names(PARTS_FOLDER) if _is_record(name, part))
        records = results_of(self._record, names, _AT_ONCE)
        found = {record.unit: record for record in records if record}
        self.results = whole(self._output.has, found)

    def _record(self, name: str) -> ResultT | None:
        """A record; None where it is damaged, so that its unit is done again."""
        with contextlib.suppress(ValueError, FileNotFoundError):
            content = json.loads(self._output.read(f"{PARTS_FOLDER}/{name}"))
            return msgspec.convert(content, self._kind)
        return None


def _is_record(name: str, part: Part) -> bool:
    number, _, ending = name.partition(".")
    return ending == "json" and number.isdecimal() and part.has(int(number))


def is_begun(output: Output) -> bool:
    """Whether anything there says what run its records are of."""
    return output.size(JOB_FILE) is not None


def parts_in(output: Output) -> int | None:
    """How many parts a run was begun in; None where it was begun without."""
    try:
        count: int | None = _job_in(output)["parts"]
    except FileNotFoundError:
        return None
    return count


def _job_in(output: Output) -> dict[str, Any]:
    """What the run there is.

    Raises:
        ConfigError: The file that says so is damaged.
        FileNotFoundError: There is none.
    """
    with contextlib.suppress(ValueError):
        job = json.loads(output.read(JOB_FILE))
        if isinstance(job, dict) and isinstance(job.get("recipe"), dict) and "parts" in job:
            return job
    raise ConfigError(
        f"{output.path(JOB_FILE)}: is damaged, so what was begun there is unknown. Give another "
        f"output, or delete {PARTS_FOLDER} there and begin anew."
    )


def remove_parts(output: Output) -> None:
    """Delete what parts have left in an output, what says whose it is last: it is taken over, or
    of no use."""
    names = {f"{PARTS_FOLDER}/{name}" for name in output.names(PARTS_FOLDER)}
    output.delete(*names - {JOB_FILE})
    output.delete(*names & {JOB_FILE})
    output.prune(PARTS_FOLDER)


def _named(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe, and the packages that every part must have."""
    return recipe | {"the packages": versions()}
