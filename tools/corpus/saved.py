"""Data sets that `datasets` saved by `save_to_disk`: their folders name their own files."""

import json
from collections.abc import Collection
from pathlib import Path

from tokenfeed.pipeline.errors import CorpusError

__all__ = ["is_saved", "saved_entries"]

_SET, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""What is left in the folder of a data set, and in that of several splits."""


def is_saved(names: Collection[str]) -> bool:
    """Whether a folder of these names is a saved data set, or one of several splits."""
    return _SPLITS in names or {_SET, _INFO} <= set(names)


def saved_entries(
    folder: str, names: list[str], split: str | None
) -> list[tuple[str, str | None]] | None:
    """The names of the splits or Arrow files of a saved data set, each with its split. None if the
    folder is not a saved data set.

    Args:
        folder: Where `names` are.
        names: What is there.
        split: The split that `folder` belongs to.

    Raises:
        CorpusError: It looks like a saved data set, but cannot be read as one, or it names a file
            that is not in the folder.
    """
    entries: list[tuple[str, str | None]]
    try:
        if _SPLITS in names:
            splits = json.loads(Path(folder, _SPLITS).read_bytes())["splits"]
            entries = [(name, name) for name in splits]
        elif {_SET, _INFO} <= set(names):
            files = json.loads(Path(folder, _SET).read_bytes())["_data_files"]
            entries = [(file["filename"], split) for file in files]
        else:
            return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"{folder}: looks like a saved data set, but cannot be read as one: {error}."
        ) from error
    for name, _ in entries:
        if name not in names:
            raise CorpusError(
                f"{folder}: the saved data set names {name!r}, which is not in this folder. Save "
                "the data set again."
            )
    return entries
