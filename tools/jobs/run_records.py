"""The records of an unfinished run, in its output: a folder or a store.

    .parts/job.json       the recipe of the run
    .parts/plan.json      units, labels and tokenizer, which take a pass over the corpus
    .parts/00012.json     a finished unit; written after the unit's shards
    .parts/00012.rejects  the rejected records of the unit, if there are any
    .parts/distrusted.json  the fast engine had wrong ids, so its units are encoded again
    .parts/failed-1-3.json  the error of part 1 of 3, until it is started again
    .parts/lock           locked by the part that makes the plan

Each file is written atomically, and any process writes the same content under the same name. So any
number of processes on any machines may work on one run, at the same time or repeatedly, without
locks. The first process creates job.json. The others compare their recipe with it.

The versions of packages that the bytes of a shard depend on: the same wherever a run works.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Self

import msgspec
import xxhash

from tokenfeed.pipeline.errors import ConfigError, RemoteError, TokenfeedError
from tokenfeed.pipeline.format.manifest import JOB_FILE, MANIFEST_FILE, PARTS_FOLDER
from tokenfeed.pipeline.format.storage import held, waited_for
from tokenfeed.pipeline.format.store import LocalStore, Place
from tokenfeed.pipeline.remote.retrying import results_of

if TYPE_CHECKING:
    from tokenfeed.tools.encoding.record_blocks import UnitResult


_PACKAGES = ("tokenfeed", "pyarrow", "tokenizers", "gigatoken")


def versions() -> list[str]:
    """Return name and version of each package, `none` if it is not installed."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {_version_of(name)}")
        except PackageNotFoundError:
            found.append(f"{name} none")
    return found


@cache
def _version_of(package: str) -> str:
    """Return the version of a package, which is the same as long as the process lives."""
    return version(package)


logger = logging.getLogger(__name__)

_AT_ONCE = 16
"""Number of files that are read at the same time."""
_DAMAGED = (ValueError, KeyError, TypeError, RecursionError)
"""Exceptions of reading a damaged record."""
_PLAN_FILE = f"{PARTS_FOLDER}/plan.json"
_LOCK_FILE = f"{PARTS_FOLDER}/lock"
_FAILED = "failed-"
_DISTRUSTED_FILE = f"{PARTS_FOLDER}/distrusted.json"


@dataclass(frozen=True, slots=True)
class JobPart:
    """One of several processes that share the units of a run."""

    index: int
    count: int

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the part that `--part` names.

        Raises:
            ConfigError: The value is not of the form I/N.
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

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, number: int) -> bool:
        """Return whether the unit with this number belongs to the part."""
        return number % self.count == self.index


class RunRecords:
    """The records of a run."""

    def __init__(self, output: Place) -> None:
        """Use `begin`."""
        self.results: dict[int, UnitResult] = {}
        """Finished units by number. A part has only its own units."""
        self._output = output

    @classmethod
    @contextlib.contextmanager
    def begin(
        cls,
        output: Place,
        recipe: dict[str, Any],
        part: JobPart | None = None,
    ) -> Iterator[Self]:
        """Begin a run in an output, or continue its unfinished run. A folder is locked until the
        block ends; parts share the lock.

        Args:
            output: Folder or store of the data set. A missing folder is made.
            recipe: Everything that the output depends on, by the names that users know.
            part: The units of this process; None: all units.

        Raises:
            ConfigError: The unfinished run has another recipe, or another process has locked the
                folder or has just finished the data set.
        """
        records = cls(output)
        output.prepare()
        with alone_in_folder(output, is_shared=part is not None):
            is_new = _create_job(output, _named(recipe))
            try:
                if is_new and output.exists(MANIFEST_FILE):
                    raise ConfigError(
                        f"{output}: already holds a finished data set, which another run has just "
                        "made."
                    )
                check_recipe(output, recipe)
                records._load(part or JobPart(0, 1))
            except BaseException:
                if is_new:
                    records.remove()
                raise
            yield records

    @property
    def engine_rejected(self) -> bool:
        """Whether any process found wrong ids of the fast engine."""
        return self._output.exists(_DISTRUSTED_FILE)

    def check(self) -> None:
        """Check that the run still exists.

        Raises:
            ConfigError: Another process has finished or deleted the run.
        """
        _job_of(self._output)

    def append(self, result: "UnitResult") -> None:
        """Record a finished unit."""
        written_at = {info.file: self._output.written_at(info.file) for info in result.files}
        content = {
            "result": dataclasses.asdict(result),
            "written_at": written_at,
        }
        self._write(f"{PARTS_FOLDER}/{result.unit:05d}.json", content)
        self.results[result.unit] = result

    def keep_plan(self, plan: dict[str, Any]) -> None:
        """Store the plan of the run for other processes; see `kept_plan`."""
        content = json.dumps(plan)
        self._write(_PLAN_FILE, {"plan": plan, "xxh3": xxhash.xxh3_64_hexdigest(content.encode())})

    def reject_engine(self, reason: str) -> None:
        """Record that the fast engine has wrong ids. All its units are encoded again."""
        self._write(_DISTRUSTED_FILE, {"reason": reason})
        self.results = {}

    @contextlib.contextmanager
    def noting_failure(self, part: JobPart) -> Iterator[None]:
        """Keep the error of a part for `shards inspect`, until the part is started again."""
        name = f"{_FAILED}{part.index}-{part.count}.json"
        self._output.delete(f"{PARTS_FOLDER}/{name}")
        try:
            yield
        except TokenfeedError as error:
            with contextlib.suppress(TokenfeedError, OSError):  # the first error counts
                self._write(f"{PARTS_FOLDER}/{name}", {"part": str(part), "error": str(error)})
            raise

    def drop_damaged(self) -> bool:
        """Drop the records of units whose files have changed. Return whether there are any.

        Reads all files of a folder.
        """
        return self._keep_whole({})

    def remove(self) -> None:
        """Delete all records of the run."""
        remove_records(self._output)
        self._output.prune("")

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self.check()  # or the folder would be made anew
        self._output.write(name, json.dumps(content).encode() + b"\n")

    def _load(self, part: JobPart) -> None:
        """Read the records of a part, and check the files that they name."""
        names = recorded_units(self._output, part)
        records = [each for each in results_of(self._record, names, _AT_ONCE) if each]
        self.results = {result.unit: result for result, _ in records}
        self._keep_whole({file: time for _, times in records for file, time in times.items()})

    def _record(self, name: str) -> "tuple[UnitResult, dict[str, int | None]] | None":
        """Read a record; None if it is damaged. Its unit is then done again."""
        from tokenfeed.tools.encoding.record_blocks import UnitResult  # which `shards` does without

        with contextlib.suppress(*_DAMAGED, FileNotFoundError):
            content = json.loads(self._output.read(f"{PARTS_FOLDER}/{name}"))
            result = msgspec.convert(content["result"], UnitResult)
            return result, msgspec.convert(content["written_at"], dict[str, int | None])
        return None

    def _keep_whole(self, written_at: dict[str, int | None]) -> bool:
        """Drop the records of units with missing or changed files. Return whether there are any."""

        def is_whole(result: "UnitResult") -> bool:
            return all(self._output.has(info, written_at.get(info.file)) for info in result.files)

        found = list(self.results.values())
        are_whole = results_of(is_whole, found, _AT_ONCE)
        kept = [each for each, is_kept in zip(found, are_whole, strict=True) if is_kept]
        self.results = {result.unit: result for result in kept}
        if damaged := len(found) - len(kept):
            logger.warning(
                "%s: shards of %d finished units are missing or damaged, and made again",
                self._output,
                damaged,
            )
        return bool(damaged)


def progress_of(output: Place) -> dict[str, Any] | None:
    """Return how far the unfinished run in an output is, as `shards inspect --json` prints it; None
    if it has none."""
    if not is_begun(output):
        return None
    plan, records = kept_plan(output), RunRecords(output)
    found = results_of(records._record, recorded_units(output), _AT_ONCE)
    results = {each[0].unit: each[0] for each in found if each}
    failures: dict[str, str] = {}
    for name in sorted(output.names(PARTS_FOLDER)):
        if name.startswith(_FAILED):
            with contextlib.suppress(*_DAMAGED, FileNotFoundError):
                failure = json.loads(output.read(f"{PARTS_FOLDER}/{name}"))
                failures[str(failure["part"])] = str(failure["error"])
    first, planned = None, len(plan["units"]) if plan else None
    rejects = (result.reject_file for result in results.values() if result.reject_file)
    if reject_file := next(rejects, None):
        with contextlib.suppress(*_DAMAGED, FileNotFoundError):
            first = json.loads(output.read(reject_file.file).splitlines()[0])
    shards = [shard for result in results.values() for shard in result.shards.values()]
    return {
        "finished": False,
        "corpus": list(map(str, _job_of(output)["recipe"].get("CORPUS", []))),
        "units_done": len(results),
        "units_planned": planned,
        "units_missing": [number for number in range(planned or 0) if number not in results],
        "rows": sum(shard.rows for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "rejected": sum(result.rejected for result in results.values()),
        "first_reject": first,
        "failures": failures,
    }


def check_recipe(output: Place, recipe: dict[str, Any], changed: str = "") -> None:
    """Check that a command is the same as the command that began the unfinished run in an output.

    Args:
        output: The folder or store of the run.
        recipe: Everything that the output depends on.
        changed: How the input files differ, if this is known.

    Raises:
        ConfigError: The commands differ.
    """
    was, now = _job_of(output)["recipe"], _named(recipe)
    if difference := differences(was, now):
        raise ConfigError(
            f"{output}: holds an unfinished run of another command, input or machine: "
            f"{difference}{changed}. Repeat the first command, delete {output}, or give another "
            "folder."
        )


@contextlib.contextmanager
def claimed(output: Place, recipe: dict[str, Any]) -> Iterator[None]:
    """Keep other commands out of a folder or store until the block ends.

    In a store, two commands with the same recipe may run at once: they write the same bytes.

    Raises:
        ConfigError: Another command is writing there, or has left an unfinished run.
    """
    output.prepare()
    with alone_in_folder(output):
        try:
            is_ours = _create_job(output, recipe) or _job_of(output)["recipe"] == recipe
        except RemoteError as error:
            if error.errno != errno.EOPNOTSUPP:  # a store without conditional writes
                raise
            is_ours = not is_begun(output)
        if not is_ours:
            raise ConfigError(
                f"{output}: holds an unfinished run. Give another place; if nothing is running "
                f"there, delete {output.path(JOB_FILE)}."
            )
        try:
            yield
        finally:
            remove_records(output)


@contextlib.contextmanager
def alone_in_folder(output: Place, *, is_shared: bool = False) -> Iterator[None]:
    """Lock a folder until the block ends. Parts of a run share the lock.

    The lock only avoids double work: two runs of one command write the same bytes. Stores have
    no such lock.

    Raises:
        ConfigError: Another command is writing to the folder.
    """
    if not isinstance(output, LocalStore):
        yield
        return
    with held(output.folder, is_shared=is_shared) as is_held:
        if not is_held:
            raise ConfigError(
                f"{output}: another run is writing here, or a part of a run. Wait for it or end it."
            )
        yield


@contextlib.contextmanager
def planning_alone(output: Place) -> Iterator[None]:
    """Let one part at a time make the plan of a run. The others wait for the plan.

    In stores and file systems without locks, several parts may make the plan.
    """
    if not isinstance(output, LocalStore):
        yield
        return
    output.prepare()
    path = output.folder / _LOCK_FILE
    path.parent.mkdir(exist_ok=True)
    try:
        with waited_for(path):
            yield
    except BaseException:
        if not is_begun(output):
            output.delete(_LOCK_FILE)
            output.prune(PARTS_FOLDER, "")
        raise


def kept_plan(output: Place) -> dict[str, Any] | None:
    """Return the plan of the unfinished run in an output; None if missing or damaged."""
    with contextlib.suppress(FileNotFoundError, *_DAMAGED):
        content = json.loads(output.read(_PLAN_FILE))
        plan: dict[str, Any] = content["plan"]
        if xxhash.xxh3_64_hexdigest(json.dumps(plan).encode()) == content["xxh3"]:
            return plan
    return None


def recorded_units(output: Place, part: JobPart | None = None) -> list[str]:
    """Return the names of the records of finished units, of a part or of the whole run."""
    share = part or JobPart(0, 1)
    return sorted(name for name in output.names(PARTS_FOLDER) if _is_record(name, share))


def is_begun(output: Place) -> bool:
    """Return whether an output has an unfinished run."""
    return output.exists(JOB_FILE)


def remove_records(output: Place, *, job_first: bool = False) -> None:
    """Delete the records of a run. A kill leaves an unfinished run, or with `job_first` none."""
    names = {f"{PARTS_FOLDER}/{name}" for name in output.names(PARTS_FOLDER)}
    if job_first:
        output.delete(JOB_FILE)
    output.delete(*names - {JOB_FILE})
    output.delete(*names & {JOB_FILE})
    output.prune(PARTS_FOLDER)


def differences(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Return how two recipes differ; empty if they are equal."""
    return "; ".join(
        f"{name}: before {_shown(was.get(name))}, now {_shown(now.get(name))}"
        for name in sorted(now.keys() | was.keys())
        if now.get(name) != was.get(name)
    )


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _named(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with the versions of the packages that decide the bytes of shards."""
    return recipe | {"the packages": versions()}


def _create_job(output: Place, recipe: dict[str, Any]) -> bool:
    """Create job.json unless it exists. Return whether this call wrote it."""
    own = os.urandom(8).hex()  # a store compares contents: no two processes write the same
    return output.create(JOB_FILE, json.dumps({"recipe": recipe, "by": own}).encode())


def _job_of(output: Place) -> dict[str, Any]:
    """Read job.json.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    try:
        content = output.read(JOB_FILE)
    except FileNotFoundError:
        raise ConfigError(
            f"{output}: another run has finished it, or was withdrawn, meanwhile."
        ) from None
    except IsADirectoryError:
        content = b""
    with contextlib.suppress(ValueError, RecursionError):
        job = json.loads(content)
        if isinstance(job, dict) and isinstance(job.get("recipe"), dict):
            return job
    raise ConfigError(
        f"{output.path(JOB_FILE)}: is damaged, so what was begun there is unknown. Give another "
        f"output, or delete {PARTS_FOLDER} there and begin anew."
    )


def _is_record(name: str, part: JobPart) -> bool:
    number, _, ending = name.partition(".")
    return ending == "json" and number.isdecimal() and part.has(int(number))
