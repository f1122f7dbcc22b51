"""The copy of a run in another folder or in a bucket, with the same files as the run's folder.

Stores cannot rename folders. A checkpoint there is complete once its checkpoint.json exists: this
file is written last and deleted first.
"""

import contextlib
import math
import shutil
from dataclasses import replace
from pathlib import Path

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX
from tokenfeed.pipeline.format.store import open_place
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.trainer.checkpoints.checkpoint_format import CONTENT_FILE, files_of
from tokenfeed.trainer.checkpoints.retention import name_of, steps_of
from tokenfeed.trainer.config.run_config import CHECKPOINTS_FOLDER

_GIVE_UP_S = 30.0
"""Seconds to repeat a request. Uploads then start again; a run that needs the answer ends."""
_COPIED_BYTES = 8 << 20


class RemoteRun:
    """The copy of a run at a URL or in another folder.

    Raises:
        ConfigError: The URL is invalid, or nothing can be written there.
    """

    def __init__(self, url: str) -> None:
        try:
            place = open_place(url)
        except ConfigError as error:
            raise ConfigError(f"`--upload`: {error}") from error
        if isinstance(place, ObjectStore):  # the caller logs what fails
            give_up_s = min(_GIVE_UP_S, place.timing.give_up_s)
            timing = replace(place.timing, give_up_s=give_up_s, warn_after_s=math.inf)
            place = replace(place, timing=timing)
        self.place = place
        self.url = place.name

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        return [step for step, names in self._list().items() if CONTENT_FILE in names]

    def get(self, name: str) -> bytes | None:
        """Return a small file; None if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            return self.place.read(name)
        return None

    def put_checkpoint(self, folder: Path) -> None:
        """Upload a checkpoint, unless the same one is there; a different one is replaced."""
        marker = (folder / CONTENT_FILE).read_bytes()
        there = f"{CHECKPOINTS_FOLDER}/{folder.name}"
        if self.get(f"{there}/{CONTENT_FILE}") == marker:
            return
        self.place.delete(f"{there}/{CONTENT_FILE}")
        names = files_of(marker)
        self._delete(there, self.place.names(there) - {*names})
        for name in names:
            path = folder / name
            self.place.write(f"{there}/{name}", path)
            size = self.place.size(f"{there}/{name}")
            if size != path.stat().st_size:
                raise OSError(f"{name} has {size} bytes there, not {path.stat().st_size}")
        self.place.write(f"{there}/{CONTENT_FILE}", marker)

    def get_checkpoint(self, step: int, folder: Path) -> None:
        """Download the files of a checkpoint into a folder. It does not check them."""
        there = f"{CHECKPOINTS_FOLDER}/{name_of(step)}"
        names = self.place.names(there)
        for name in names - _unfinished(names):
            path = f"{there}/{name}"
            with (
                self.place.open(path, self.place.size(path)) as source,
                open(folder / name, "wb") as copy,
            ):
                shutil.copyfileobj(source, copy, _COPIED_BYTES)

    def set_aside(self, step: int) -> None:
        """Rename the checkpoint.json of a step, so that the step is ignored from now on."""
        path = f"{CHECKPOINTS_FOLDER}/{name_of(step)}/{CONTENT_FILE}"
        self.place.write(f"{path}.damaged", self.place.read(path))
        self.place.delete(path)

    def delete_old(self, latest: int, keep: int, best: int | None) -> None:
        """Delete checkpoints older than the latest `keep` except the best, and unfinished files.

        Checkpoints of steps above `latest` stay: this session did not write them.
        """
        there = {step: names for step, names in self._list().items() if step <= latest}
        complete = [step for step, names in there.items() if CONTENT_FILE in names]
        for step, names in there.items():
            folder = f"{CHECKPOINTS_FOLDER}/{name_of(step)}"
            if step in (*complete[-keep:], best):
                self._delete(folder, _unfinished(names))
            else:
                self.place.delete(f"{folder}/{CONTENT_FILE}")
                self._delete(folder, names - {CONTENT_FILE})
                self.place.prune(folder)
        self.place.delete(*_unfinished(self.place.names()))

    def _delete(self, folder: str, names: set[str]) -> None:
        self.place.delete(*(f"{folder}/{name}" for name in names))

    def _list(self) -> dict[int, set[str]]:
        """Return the files of each step, in the order of steps."""
        steps = steps_of(self.place.names(CHECKPOINTS_FOLDER))
        return {step: self.place.names(f"{CHECKPOINTS_FOLDER}/{name_of(step)}") for step in steps}


def _unfinished(names: set[str]) -> set[str]:
    return {name for name in names if name.endswith(TEMPORARY_SUFFIX)}


def reason(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
