"""Whose output is this? Decides whether a command may write there.

A new or empty folder may be begun; an unfinished run may be continued by the command that began it
and by no other; a finished data set and anything else are never touched. What command and input
made a data set is kept in `.made_by.json`: not in the manifest, for it has the paths and times of
this machine.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.manifest import (
    JOURNAL_FILE,
    MADE_BY_FILE,
    MANIFEST_FILE,
    PARTS_FOLDER,
    TOKENIZER_FILE,
    Manifest,
)
from tokenfeed.tools.outputs.output import FolderOutput, Output
from tokenfeed.tools.outputs.store import StoreOutput
from tokenfeed.tools.run.claimed import ClaimedStore
from tokenfeed.tools.run.journal import Journal, says_its_recipe
from tokenfeed.tools.run.lease import CLAIM_FILE, clear_away
from tokenfeed.tools.run.parts import Parts, is_begun, remove_parts
from tokenfeed.tools.run.recipe import differences
from tokenfeed.tools.run.records import Records, ResultT

__all__ = [
    "Run",
    "State",
    "claim",
    "claim_folder",
    "made_by",
    "recognise",
    "remember",
    "state_of",
    "withdraw",
]


State = Literal["new", "unfinished", "finished"]


class Run(Records[ResultT], Protocol):
    """A run that has its output for itself, and has begun or goes on there."""

    is_new: bool

    @property
    def made_folders(self) -> list[Path]:
        """Folders above the output that had to be made, the innermost first."""
        ...

    def remove(self) -> None:
        """Delete what says that it is unfinished."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None:
        """Leave the output to others."""
        ...


def state_of(output: Output) -> State:
    """What an output holds: nothing or nothing yet, an unfinished run, or a finished data set.

    Raises:
        ConfigError: It holds anything else, or a data set that does not say what made it, or is no
            folder.
    """
    if isinstance(output, FolderOutput) and not _is_folder(output.folder):
        return "new"
    names = output.names()
    if _is_begun(output, names):
        return "unfinished"
    if {MANIFEST_FILE, MADE_BY_FILE} <= names:
        return "finished"
    if MANIFEST_FILE in names:
        raise ConfigError(
            f"{output}: already holds a finished data set, and no {MADE_BY_FILE} that says what "
            "made it. Give another folder, or delete this one."
        )
    if PARTS_FOLDER in names:
        return "unfinished"
    if others := sorted(names - {JOURNAL_FILE, CLAIM_FILE}):
        raise ConfigError(
            f"{output}: already holds other data ({others[0]}). Give a new or empty folder."
        )
    return "new"


def _is_begun(output: Output, names: set[str]) -> bool:
    """Whether a run there says so itself; it may have written the manifest."""
    if not isinstance(output, FolderOutput):
        return PARTS_FOLDER in names and is_begun(output)
    if JOURNAL_FILE not in names:
        return False
    return MANIFEST_FILE in names or says_its_recipe(output.folder)


def _is_folder(folder: Path) -> bool:
    """Whether there is a folder; if not, it can be made.

    Raises:
        ConfigError: It is something else, or cannot be made.
    """
    if folder.parts[:1] and re.fullmatch("[a-z][a-z0-9+.-]*:", folder.parts[0]):
        raise ConfigError(
            f"{folder}: looks like an address of another place. Give a folder of this machine, and "
            "copy it there afterwards."
        )
    if not os.path.lexists(folder):
        _check_can_be_made(folder)
        return False
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder. Give a new or empty folder for the output.")
    return True


def _check_can_be_made(folder: Path) -> None:
    """Refuse a folder that cannot be made now, not after an hour of reading."""
    nearest = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot be made, for {nearest} is no folder to write into.")


def claim(output: Output, recipe: dict[str, Any], kind: type[ResultT]) -> Run[ResultT]:
    """Begin a run in an output, or continue the unfinished one there; see `claim_folder`."""
    if isinstance(output, StoreOutput):
        return ClaimedStore.take(output, recipe, kind)
    assert isinstance(output, FolderOutput)
    return claim_folder(output.folder, recipe, kind)


def claim_folder(folder: Path, recipe: dict[str, Any], kind: type[ResultT]) -> Journal[ResultT]:
    """Begin a run in `folder`, or continue the unfinished one there; what parts of it have left
    counts as done.

    Args:
        folder: The output folder; made if need be.
        recipe: Everything the output depends on, by the name a user knows it by.
        kind: What is kept of a finished unit.

    Raises:
        ConfigError: The unfinished run there is of another command or another input.
    """
    journal = Journal.open(folder, recipe, kind)
    if journal.is_new and (folder / MANIFEST_FILE).exists():  # another run has just finished
        journal.remove()
        journal.close()
        raise ConfigError(
            f"{folder}: already holds a finished data set, which another run has just made."
        )
    try:
        _check_same(folder, journal.recipe, recipe)
        if parts := Parts.left_in(FolderOutput(folder), recipe, kind):
            journal.take_over(parts.results, rejected=parts.engine_rejected)
    except BaseException:
        if journal.is_new:
            journal.remove()
        journal.close()
        raise
    return journal


def _check_same(folder: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    if difference := differences(was, now):
        raise ConfigError(
            f"{folder}: holds an unfinished run of another command or input: {difference}. "
            "Repeat the first command, or give another folder."
        )


def remember(output: Output, recipe: dict[str, Any]) -> None:
    """Keep what makes the data set there, for `recognise`."""
    output.write(MADE_BY_FILE, json.dumps(recipe, indent=1).encode() + b"\n")


def made_by(output: Output) -> dict[str, Any]:
    """The recipe that made the finished data set there.

    Raises:
        ConfigError: The file that says so is damaged.
    """
    try:
        recipe = json.loads(output.read(MADE_BY_FILE))
    except ValueError:
        recipe = None
    if not isinstance(recipe, dict):
        raise ConfigError(
            f"{output.path(MADE_BY_FILE)}: is damaged, so what made this finished data set is "
            "unknown. Give another folder, or delete this one."
        )
    return recipe


def recognise(output: Output, recipe: dict[str, Any]) -> Manifest:
    """The manifest of the finished data set there, if `recipe` is what made it.

    Raises:
        ConfigError: It was another command or another input.
        ManifestError: The manifest is damaged, or a file that it names is not there whole.
    """
    if difference := differences(made_by(output), recipe):
        raise ConfigError(
            f"{output}: already holds a finished data set, of another command or input: "
            f"{difference}. Give another folder, or delete this one."
        )
    manifest = Manifest.read(output.place)
    _check_files(output, manifest)
    if isinstance(output, StoreOutput):
        clear_away(output.store)
    return manifest


def _check_files(output: Output, manifest: Manifest) -> None:
    """Look for what is lost or cut short; to read it all is for `shards verify`."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    for info in (manifest.tokenizer, manifest.sources, manifest.rejects, *shards):
        if output.size(info.file) != info.bytes:
            raise ManifestError(
                f"{output.path(info.file)}: is missing or of another size, and the data set was "
                "finished. Restore the file, or delete the folder and start again."
            )


def withdraw(output: Output, run: Run[Any], splits: Iterable[str]) -> None:
    """Delete all files of a run that failed, and the folders that are empty then."""
    for split in splits:
        output.delete(*(f"{split}/{name}" for name in output.names(split) if ".arrow" in name))
    output.delete(TOKENIZER_FILE, MADE_BY_FILE)
    remove_parts(output)
    run.remove()
    output.prune(*splits, "")
    for emptied in run.made_folders:
        with contextlib.suppress(OSError):
            emptied.rmdir()
