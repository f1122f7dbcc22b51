"""The record of a run, in its output: a folder or a store.

    .made_by.json         the recipe of the run, and of its data set: the claim of the output
    .parts/plan.json      units, labels and tokenizer, which take a pass over the corpus
    .parts/00012.json     a finished unit with its result; written after the unit's shards
    .parts/00012.rejects  the rejected records of the unit, if there are any
    .parts/distrusted.json  the fast engine had wrong ids, so its units are encoded again
    .parts/failed-1-3.json  the error of part 1 of 3, until it is started again
    .parts/lock           locked by the process that makes the plan

The run ends when the manifest is there and the plan is not. Each file is written atomically, and
any process writes the same content under the same name. So any number of processes on any machines
may work on one run, at the same time or repeatedly, without locks. A folder is locked nevertheless,
by one command or by all parts of a run together, to avoid double work.

A command may begin a new or empty output, and continue a run with its own recipe. Finished data
sets and other folders are never changed.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import xxhash

from tokenfeed.pipeline.errors import ConfigError, ManifestError, RemoteError, TokenfeedError
from tokenfeed.pipeline.format.manifest import (
    MADE_BY_FILE,
    MANIFEST_FILE,
    PARTS_FOLDER,
    TOKENIZER_FILE,
    Manifest,
)
from tokenfeed.pipeline.format.storage import (
    TEMPORARY_SUFFIX,
    held,
    holder_of,
    waited_for,
)
from tokenfeed.pipeline.format.store import LocalStore, Place
from tokenfeed.pipeline.remote.retrying import results_of

if TYPE_CHECKING:
    from tokenfeed.tools.encoding.record_blocks import UnitResult

logger = logging.getLogger(__name__)

State = Literal["new", "unfinished", "finished"]

_PACKAGES = ("tokenfeed", "pyarrow", "tokenizers", "gigatoken")
"""Packages whose versions the bytes of a shard depend on."""
_AT_ONCE = 16
"""Number of files that are read at the same time."""
_DAMAGED = (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, RecursionError)
"""Exceptions of reading a missing or damaged record."""
_PLAN_FILE = f"{PARTS_FOLDER}/plan.json"
_LOCK_FILE = f"{PARTS_FOLDER}/lock"
_DISTRUSTED_FILE = f"{PARTS_FOLDER}/distrusted.json"
_FAILED = "failed-"
OF_FILES = {
    "the number of input files",
    "the bytes of the input",
    "the names, sizes and times of the input files",
    "--shard-size",
}
"""Entries of a recipe that differ if files are added to the input."""
_UNITS, _VERSIONS = "the number of units", "the packages"
"""Entries of .made_by.json beside the recipe. A finished data set may be of other packages."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """One of several processes that share the units of a run."""

    index: int = 0
    count: int = 1

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

    def num_units(self, of_run: int) -> int:
        """Return how many units of a run belong to the part."""
        return len(range(self.index, of_run, self.count))


WHOLE = JobPart()
"""All units of a run."""


class RunRecords:
    """The records of an unfinished run."""

    def __init__(self, output: Place, part: JobPart = WHOLE) -> None:
        """Use `begin`."""
        self.part = part
        self.results: dict[int, UnitResult] = {}
        """Finished units by number. A part has only its own units."""
        self._output = output

    @classmethod
    @contextlib.contextmanager
    def begin(
        cls, output: Place, recipe: dict[str, Any], num_units: int, part: JobPart = WHOLE
    ) -> Iterator[Self]:
        """Begin a run in an output, or continue its unfinished run. A folder is locked until the
        block ends; parts share the lock. An error of the block is kept for `shards inspect`, until
        the part is started again.

        Args:
            output: Folder or store of the data set. A missing folder is made.
            recipe: Everything that the output depends on, by the names that users know.
            num_units: Number of units of the run.
            part: The units of this process.

        Raises:
            ConfigError: The unfinished run has another recipe, or another process has locked the
                folder or has just finished the data set.
        """
        records = cls(output, part)
        failure = f"{PARTS_FOLDER}/{_FAILED}{part.index}-{part.count}.json"
        with _alone_in_folder(output, is_shared=part != WHOLE):
            output.create(MADE_BY_FILE, _encoded(recipe, num_units))
            check_recipe(output, recipe)
            if state_of(output) == "finished":
                raise ConfigError(
                    f"{output}: already holds a finished data set, which another run has just made."
                )
            records._load()
            output.delete(failure)
            try:
                yield records
            except TokenfeedError as error:
                with contextlib.suppress(TokenfeedError, OSError):  # the first error counts
                    records._write(failure, {"part": str(part), "error": str(error)})
                raise

    @property
    def engine_rejected(self) -> bool:
        """Whether any process found wrong ids of the fast engine."""
        return self._output.exists(_DISTRUSTED_FILE)

    def check(self) -> None:
        """Check that the run still exists.

        Raises:
            ConfigError: Another process has finished or deleted the run.
        """
        if not self._output.exists(_PLAN_FILE):
            raise ConfigError(
                f"{self._output}: another run has finished it, or was withdrawn, meanwhile."
            )

    def append(self, result: "UnitResult") -> None:
        """Record a finished unit."""
        written_at = {info.file: self._output.written_at(info.file) for info in result.files}
        content = {"result": dataclasses.asdict(result), "written_at": written_at}
        self._write(f"{PARTS_FOLDER}/{result.unit:05d}.json", content)
        self.results[result.unit] = result

    def keep_plan(self, plan: dict[str, Any]) -> None:
        """Store the plan of the run for other processes; see `kept_plan`."""
        checksum = xxhash.xxh3_64_hexdigest(json.dumps(plan).encode())
        self._output.write(_PLAN_FILE, json.dumps({"plan": plan, "xxh3": checksum}).encode())

    def reject_engine(self, reason: str) -> None:
        """Record that the fast engine has wrong ids. All its units are encoded again."""
        self._write(_DISTRUSTED_FILE, {"reason": reason})
        self.results = {}

    def drop_damaged(self) -> bool:
        """Drop the records of units whose files have changed. Return whether there are any.

        Reads all files of a folder.
        """
        return self._keep_whole({})

    def withdraw(self, splits: Iterable[str]) -> None:
        """Delete all files of a run that failed, and the folders that are empty then."""
        output = self._output
        for split in splits:
            output.delete(*(f"{split}/{name}" for name in output.names(split) if ".arrow" in name))
        left = (name for name in output.names() if name.endswith(TEMPORARY_SUFFIX))
        output.delete(TOKENIZER_FILE, *left)
        output.prune(*splits)
        remove_records(output)
        output.delete(MADE_BY_FILE)
        output.prune("")

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self.check()  # or the folder would be made anew
        self._output.write(name, json.dumps(content).encode() + b"\n")

    def _load(self) -> None:
        """Read the records of the part, and check the files that they name."""
        names = recorded_units(self._output, self.part)
        records = [each for each in results_of(self._record, names, _AT_ONCE) if each]
        self.results = {result.unit: result for result, _ in records}
        self._keep_whole({file: time for _, times in records for file, time in times.items()})

    def _record(self, name: str) -> "tuple[UnitResult, dict[str, int | None]] | None":
        """Read a record; None if it is damaged. Its unit is then done again."""
        from tokenfeed.tools.encoding.record_blocks import UnitResult  # which `shards` does without

        with contextlib.suppress(*_DAMAGED):
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


def versions() -> list[str]:
    """Return name and version of each package that the bytes of a shard depend on, `none` if it is
    not installed."""
    return [f"{name} {_version_of(name)}" for name in _PACKAGES]


@cache
def _version_of(package: str) -> str:
    """Return the version of a package, which is the same as long as the process lives."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def state_of(output: Place) -> State:
    """Return the state of an output: new, an unfinished run, or a finished data set.

    Raises:
        ConfigError: The output is not a folder, has other files, or lacks `.made_by.json`.
    """
    if isinstance(output, LocalStore) and not _is_folder(output.folder):
        return "new"
    names = output.names()
    if MADE_BY_FILE in names:
        is_finished = MANIFEST_FILE in names and not output.exists(_PLAN_FILE)
        return "finished" if is_finished else "unfinished"
    if MANIFEST_FILE in names:
        raise ConfigError(
            f"{output}: already holds a finished data set, and no {MADE_BY_FILE} that says what "
            "made it. Give another folder, or delete this one."
        )
    left_by_kill = {name for name in names if name.startswith(f"{MADE_BY_FILE}.")}
    if others := sorted(names - left_by_kill - {PARTS_FOLDER}):
        raise ConfigError(
            f"{output}: already holds other data ({others[0]}). Expected CORPUS... OUT, "
            "where OUT, the last path, is a new or empty folder."
        )
    return "new"


def _is_folder(folder: Path) -> bool:
    """Return whether the folder exists. If not, it can be made.

    Raises:
        ConfigError: The path is not a folder, or the folder cannot be made.
    """
    if not os.path.lexists(folder):
        nearest = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{folder}: cannot be made, for {nearest} is no folder to write into."
            )
        return False
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder. Give a new or empty folder for the output.")
    return True


def check_recipe(output: Place, recipe: dict[str, Any], changed: str = "") -> int:
    """Check that a command is the same as the command that began the unfinished run in an output,
    or that made its data set. Return the number of units.

    Args:
        output: The folder or store of the run.
        recipe: Everything that the output depends on.
        changed: How the input files differ, if this is known.

    Raises:
        ConfigError: The commands differ, or `.made_by.json` is damaged.
    """
    was = _made_by(output)
    num_units, packages = was.pop(_UNITS, 0), was.pop(_VERSIONS, None)
    if state_of(output) == "finished":
        holds = "already holds a finished data set, of another command or input"
        remedy = "Give another folder, or delete this one."
        if {name for name in recipe if recipe[name] != was.get(name)} <= OF_FILES:
            remedy += (
                " For new files alone: `pretokenize NEW OUT --tokenizer "
                f"{output}`, then `train --shards {output} OUT` reads both."
            )
    else:
        holds = "holds an unfinished run of another command, input or machine"
        remedy = f"Repeat the first command, delete {output}, or give another folder."
        was, recipe = was | {_VERSIONS: packages}, recipe | {_VERSIONS: versions()}
    if difference := _differences(was, recipe):
        raise ConfigError(f"{output}: {holds}: {difference}{changed}. {remedy}")
    return int(num_units)


def recognise(output: Place, recipe: dict[str, Any]) -> tuple[Manifest, int]:
    """Return the manifest and the number of units of a data set, if `recipe` made it.

    Raises:
        ConfigError: Another command or another input made it, or `.made_by.json` is damaged.
        ManifestError: The manifest is damaged, or a file that it names is missing or cut short.
    """
    num_units, manifest = check_recipe(output, recipe), Manifest.read(output)
    if changed := changed_file(output, manifest):
        raise ManifestError(
            f"{output.path(changed)}: is missing or of another size, and the data set was finished."
            " Restore the file, or delete the folder and start again."
        )
    remove_records(output)  # a kill may have left some
    return manifest, num_units


def changed_file(output: Place, manifest: Manifest) -> str | None:
    """Return the first file that is missing or has another size than a manifest says."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    infos = [*manifest.side_files, *shards]

    def size_of(name: str) -> int | None:
        try:
            return output.size(name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    sizes = results_of(size_of, [info.file for info in infos], _AT_ONCE)
    pairs = zip(infos, sizes, strict=True)
    return next((info.file for info, size in pairs if size != info.bytes), None)


def progress_of(output: Place) -> dict[str, Any] | None:
    """Return how far the unfinished run in an output is, as `shards inspect --json` prints it; None
    if it has none."""
    plan, records = kept_plan(output), RunRecords(output)
    if not output.exists(MADE_BY_FILE) or (plan is None and output.exists(MANIFEST_FILE)):
        return None
    found = results_of(records._record, recorded_units(output), _AT_ONCE)
    results = {each[0].unit: each[0] for each in found if each}
    failures: dict[str, str] = {}
    for name in sorted(output.names(PARTS_FOLDER)):
        if name.startswith(_FAILED):
            with contextlib.suppress(*_DAMAGED):
                failure = json.loads(output.read(f"{PARTS_FOLDER}/{name}"))
                failures[str(failure["part"])] = str(failure["error"])
    first, planned = None, len(plan["units"]) if plan else None
    rejects = (result.reject_file for result in results.values() if result.reject_file)
    if reject_file := next(rejects, None):
        with contextlib.suppress(*_DAMAGED):
            first = json.loads(output.read(reject_file.file).splitlines()[0])
    shards = [shard for result in results.values() for shard in result.shards.values()]
    return {
        "finished": False,
        "corpus": list(map(str, _made_by(output).get("CORPUS", []))),
        "units_done": len(results),
        "units_planned": planned,
        "units_missing": [number for number in range(planned or 0) if number not in results],
        "rows": sum(shard.rows for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "rejected": sum(result.rejected for result in results.values()),
        "first_reject": first,
        "failures": failures,
    }


@contextlib.contextmanager
def claimed(output: Place, recipe: dict[str, Any], copied: bytes | None) -> Iterator[None]:
    """Keep other commands out of a folder or store until the block ends, which copies a data set.

    A finished data set is not claimed. In a store, two commands with the same recipe may run at
    once: they write the same bytes.

    Args:
        output: Folder or store of the copy.
        recipe: What is copied.
        copied: Content of .made_by.json that is part of the copy.

    Raises:
        ConfigError: Another command is writing there, or has left an unfinished run.
    """

    def is_claimed() -> bool:
        was = _made_by(output)
        return {name: was[name] for name in {*was} - {_UNITS, _VERSIONS}} == recipe

    with _alone_in_folder(output):
        is_free = not output.exists(_PLAN_FILE)
        if is_free and not output.exists(MANIFEST_FILE):
            try:
                output.create(MADE_BY_FILE, _encoded(recipe))
            except RemoteError as error:
                if error.errno != errno.EOPNOTSUPP:  # a store without conditional writes
                    raise
                if not output.exists(MADE_BY_FILE):
                    output.write(MADE_BY_FILE, _encoded(recipe))
            is_free = is_claimed() or output.read(MADE_BY_FILE) == copied
        if not is_free:
            raise ConfigError(
                f"{output}: holds an unfinished run. Give another place; if nothing is running "
                f"there, delete {output.path(MADE_BY_FILE)}."
            )
        try:
            yield
        finally:
            if output.exists(MADE_BY_FILE) and is_claimed():
                output.delete(MADE_BY_FILE)


@contextlib.contextmanager
def _alone_in_folder(output: Place, *, is_shared: bool = False) -> Iterator[None]:
    """Make a folder, and lock it until the block ends. Stores have no such lock.

    Raises:
        ConfigError: Another command is writing to the folder.
    """
    output.prepare()
    if not isinstance(output, LocalStore):
        yield
        return
    with held(output.folder, is_shared=is_shared) as is_held:
        if not is_held:
            raise ConfigError(
                f"{output}: another run is writing here, or a part of a run"
                f"{holder_of(output.folder)}. Wait for it or end it."
            )
        yield


@contextlib.contextmanager
def planning_alone(output: Place) -> Iterator[None]:
    """Let one process at a time make the plan of a run. The others wait for the plan.

    In stores and file systems without locks, several processes may make the plan.
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
        if not output.exists(MADE_BY_FILE):
            output.delete(_LOCK_FILE)
            output.prune(PARTS_FOLDER, "")
        raise


def kept_plan(output: Place) -> dict[str, Any] | None:
    """Return the plan of the unfinished run in an output; None if missing or damaged."""
    with contextlib.suppress(*_DAMAGED):
        content = json.loads(output.read(_PLAN_FILE))
        plan: dict[str, Any] = content["plan"]
        if xxhash.xxh3_64_hexdigest(json.dumps(plan).encode()) == content["xxh3"]:
            return plan
    return None


def recorded_units(output: Place, part: JobPart = WHOLE) -> list[str]:
    """Return the names of the records of finished units of a part."""
    return sorted(name for name in output.names(PARTS_FOLDER) if _is_record(name, part))


def remove_records(output: Place) -> None:
    """Delete the records of a run, the plan first: a kill leaves none that others read."""
    names = {f"{PARTS_FOLDER}/{name}" for name in output.names(PARTS_FOLDER)}
    output.delete(*names & {_PLAN_FILE})
    output.delete(*names - {_PLAN_FILE})
    output.prune(PARTS_FOLDER)


def _differences(was: dict[str, Any], now: dict[str, Any]) -> str:
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


def _made_by(output: Place) -> dict[str, Any]:
    """Read .made_by.json.

    Raises:
        ConfigError: The file is damaged.
    """
    with contextlib.suppress(*_DAMAGED):
        was = json.loads(output.read(MADE_BY_FILE))
        if isinstance(was, dict):
            return was
    raise ConfigError(
        f"{output.path(MADE_BY_FILE)}: is damaged, so what made the data set there is unknown. "
        "Give another folder, or delete this one."
    )


def _encoded(recipe: dict[str, Any], num_units: int = 0) -> bytes:
    """Return the content of .made_by.json."""
    content = recipe | {_UNITS: num_units, _VERSIONS: versions()}
    return json.dumps(content, indent=1).encode() + b"\n"


def _is_record(name: str, part: JobPart) -> bool:
    number, _, ending = name.partition(".")
    return ending == "json" and number.isdecimal() and part.has(int(number))
