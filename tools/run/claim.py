"""Whose folder is this? Decides whether a command may write into its output folder.

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
from typing import Any, Literal

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.manifest import (
    JOURNAL_FILE,
    MANIFEST_FILE,
    PARTS_FOLDER,
    TOKENIZER_FILE,
    Manifest,
)
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.tools.run.journal import Journal, says_its_recipe
from tokenfeed.tools.run.parts import Parts, remove_parts
from tokenfeed.tools.run.recipe import differences
from tokenfeed.tools.run.records import ResultT

__all__ = [
    "MADE_BY_FILE",
    "UNSHUFFLED_FOLDER",
    "State",
    "claim",
    "made_by",
    "recognise",
    "remember",
    "state_of",
    "withdraw",
]

MADE_BY_FILE = ".made_by.json"
UNSHUFFLED_FOLDER = ".unshuffled"
"""Holds the data set that an unfinished `pretokenize --shuffle` is to shuffle."""

State = Literal["new", "unfinished", "finished"]


def state_of(folder: Path) -> State:
    """What `folder` holds: nothing or nothing yet, an unfinished run, or a finished data set.

    Raises:
        ConfigError: It holds anything else, or a data set that does not say what made it, or is no
            folder.
    """
    if folder.parts[:1] and re.fullmatch("[a-z][a-z0-9+.-]*:", folder.parts[0]):
        raise ConfigError(
            f"{folder}: looks like an address of another place. Give a folder of this machine, and "
            "copy it there afterwards."
        )
    if not os.path.lexists(folder):
        _check_can_be_made(folder)
        return "new"
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder. Give a new or empty folder for the output.")
    names = set(os.listdir(folder))
    if JOURNAL_FILE in names and (MANIFEST_FILE in names or says_its_recipe(folder)):
        return "unfinished"
    if {MANIFEST_FILE, MADE_BY_FILE} <= names:
        return "finished"
    if MANIFEST_FILE in names:
        raise ConfigError(
            f"{folder}: already holds a finished data set, and no {MADE_BY_FILE} that says what "
            "made it. Give another folder, or delete this one."
        )
    if PARTS_FOLDER in names:
        return "unfinished"
    if UNSHUFFLED_FOLDER in names:
        raise ConfigError(
            f"{folder}: holds an unfinished run of `pretokenize --shuffle`. Repeat that command, "
            "or give another folder."
        )
    if others := sorted(names - {JOURNAL_FILE}):
        raise ConfigError(
            f"{folder}: already holds other data ({others[0]}). Give a new or empty folder."
        )
    return "new"


def _check_can_be_made(folder: Path) -> None:
    """Refuse a folder that cannot be made now, not after an hour of reading."""
    nearest = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot be made, for {nearest} is no folder to write into.")


def claim(folder: Path, recipe: dict[str, Any], kind: type[ResultT]) -> Journal[ResultT]:
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
        if parts := Parts.left_in(folder, recipe, kind):
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


def remember(folder: Path, recipe: dict[str, Any]) -> None:
    """Keep what makes the data set in `folder`, for `recognise`."""
    atomic_write(folder / MADE_BY_FILE, json.dumps(recipe, indent=1).encode() + b"\n")


def made_by(folder: Path) -> dict[str, Any]:
    """The recipe that made the finished data set in `folder`.

    Raises:
        ConfigError: The file that says so is damaged.
    """
    try:
        recipe = json.loads((folder / MADE_BY_FILE).read_bytes())
    except ValueError:
        recipe = None
    if not isinstance(recipe, dict):
        raise ConfigError(
            f"{folder / MADE_BY_FILE}: is damaged, so what made this finished data set is unknown. "
            "Give another folder, or delete this one."
        )
    return recipe


def recognise(folder: Path, recipe: dict[str, Any]) -> Manifest:
    """The manifest of the finished data set in `folder`, if `recipe` is what made it.

    Raises:
        ConfigError: It was another command or another input.
        ManifestError: The manifest is damaged, or a file that it names is not there whole.
    """
    if difference := differences(made_by(folder), recipe):
        raise ConfigError(
            f"{folder}: already holds a finished data set, of another command or input: "
            f"{difference}. Give another folder, or delete this one."
        )
    manifest = Manifest.read(folder)
    _check_files(folder, manifest)
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Look for what is lost or cut short; to read it all is for `shards verify`."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    for info in (manifest.tokenizer, manifest.sources, manifest.rejects, *shards):
        path = folder / info.file
        if not path.is_file() or path.stat().st_size != info.bytes:
            raise ManifestError(
                f"{path}: is missing or of another size, and the data set was finished. Restore "
                "the file, or delete the folder and start again."
            )


def withdraw(journal: Journal[Any], splits: Iterable[str]) -> None:
    """Delete all files of a run that failed, and the folders that are empty then."""
    folder = journal.path.parent
    for split in splits:
        for shard in (folder / split).glob("*.arrow*"):
            shard.unlink()
    for name in (TOKENIZER_FILE, MADE_BY_FILE):
        (folder / name).unlink(missing_ok=True)
    remove_parts(folder)
    journal.remove()
    for emptied in (*(folder / split for split in splits), folder, *journal.made_folders):
        with contextlib.suppress(OSError):
            emptied.rmdir()
