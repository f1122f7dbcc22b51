"""Whose folder is this? Decides whether a command may write into its output folder.

A new or empty folder may be begun; an unfinished run may be continued by the command that began it
and by no other; a finished data set and anything else are never touched.
"""

import os
from pathlib import Path
from typing import Any

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import JOURNAL_FILE, MANIFEST_FILE
from tokenfeed.tools.job.journal import Journal

__all__ = ["claim", "is_unfinished"]


def is_unfinished(folder: Path) -> bool:
    """Whether `folder` holds an unfinished run; if not, it is new or empty.

    Raises:
        ConfigError: It holds a finished data set or anything else, or is no folder.
    """
    if not os.path.lexists(folder):
        _check_can_be_made(folder)
        return False
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder. Give a new or empty folder for the output.")
    names = set(os.listdir(folder))
    if JOURNAL_FILE in names:
        return True
    if MANIFEST_FILE in names:
        raise ConfigError(
            f"{folder}: already holds a finished data set. Give another folder, or delete this one."
        )
    if others := sorted(names):
        raise ConfigError(
            f"{folder}: already holds other data ({others[0]}). Give a new or empty folder."
        )
    return False


def _check_can_be_made(folder: Path) -> None:
    """Now, not after an hour of reading: the folder itself is made with the first file."""
    nearest = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot be made, for {nearest} is no folder to write into.")


def claim(folder: Path, job: dict[str, Any]) -> Journal:
    """Begin a run in `folder`, or continue the unfinished one there.

    Args:
        folder: The output folder; made if need be.
        job: Everything the output depends on, by the name a user knows it by.

    Raises:
        ConfigError: The unfinished run there is of another command or another input.
    """
    is_unfinished(folder)
    journal = Journal.open(folder, job)
    if journal.is_new and (folder / MANIFEST_FILE).exists():  # another run has just finished
        journal.remove()
        journal.close()
        is_unfinished(folder)
    differences = [
        f"{name} was {_shown(journal.job.get(name))}, is {_shown(job.get(name))}"
        for name in sorted(job.keys() | journal.job.keys())
        if job.get(name) != journal.job.get(name)
    ]
    if differences:
        journal.close()
        raise ConfigError(
            f"{folder}: holds an unfinished run of another command or input: "
            f"{'; '.join(differences)}. Repeat the first command, or give another folder."
        )
    return journal


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
