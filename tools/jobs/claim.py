"""Decide whether a command may write into an output.

A command may begin a new or empty output. Only the command that began an unfinished run may
continue the run. Finished data sets and other folders are never changed. `.made_by.json` stores the
command and the input of a data set. The manifest does not, because both contain paths and times of
this machine.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from tokenfeed.pipeline.errors import ConfigError, ManifestError
from tokenfeed.pipeline.format.manifest import (
    MADE_BY_FILE,
    MANIFEST_FILE,
    PARTS_FOLDER,
    TOKENIZER_FILE,
    Manifest,
)
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX
from tokenfeed.pipeline.format.store import LocalStore, Place
from tokenfeed.pipeline.remote.retrying import results_of
from tokenfeed.tools.jobs.run_records import RunRecords, differences, is_begun, remove_records

_AT_ONCE = 16
"""Number of files whose sizes are read at the same time."""
_UNITS = "the number of units"
"""The entry of .made_by.json that does not belong to the recipe."""

State = Literal["new", "unfinished", "finished"]


def state_of(output: Place) -> State:
    """Return the state of an output: new, an unfinished run, or a finished data set.

    Raises:
        ConfigError: The output is not a folder, has other files, or lacks `.made_by.json`.
    """
    if isinstance(output, LocalStore) and not _is_folder(output.folder):
        return "new"
    names = output.names()
    if PARTS_FOLDER in names and is_begun(output):
        return "unfinished"
    if {MANIFEST_FILE, MADE_BY_FILE} <= names:
        return "finished"
    if MANIFEST_FILE in names:
        raise ConfigError(
            f"{output}: already holds a finished data set, and no {MADE_BY_FILE} that says what "
            "made it. Give another folder, or delete this one."
        )
    if others := sorted(names - {PARTS_FOLDER}):
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


def remember(
    output: Place,
    recipe: dict[str, Any],
    num_units: int,
) -> None:
    """Store the recipe of the data set for `recognise`.

    Args:
        output: Folder or store of the data set.
        recipe: Everything that the output depends on.
        num_units: Number of units of the run.
    """
    content = recipe | {_UNITS: num_units}
    output.write(MADE_BY_FILE, json.dumps(content, indent=1).encode() + b"\n")


def _made_by(output: Place) -> dict[str, Any]:
    """Read the recipe of the finished data set in an output.

    Raises:
        ConfigError: The file is damaged.
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


def recognise(output: Place, recipe: dict[str, Any]) -> tuple[Manifest, int]:
    """Return the manifest and the number of units of a data set, if `recipe` made it.

    Raises:
        ConfigError: Another command or another input made it.
        ManifestError: The manifest is damaged, or a file that it names is missing or cut short.
    """
    was = _made_by(output)
    num_units = was.pop(_UNITS, 0)
    if difference := differences(was, recipe):
        raise ConfigError(
            f"{output}: already holds a finished data set, of another command or input: "
            f"{difference}. Give another folder, or delete this one."
        )
    manifest = Manifest.read(output)
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


def withdraw(output: Place, records: RunRecords, splits: Iterable[str]) -> None:
    """Delete all files of a run that failed, and the folders that are empty then."""
    for split in splits:
        output.delete(*(f"{split}/{name}" for name in output.names(split) if ".arrow" in name))
    left = (name for name in output.names() if name.endswith(TEMPORARY_SUFFIX))
    output.delete(TOKENIZER_FILE, MADE_BY_FILE, *left)
    output.prune(*splits)
    records.remove()
