"""The copy of a run in another folder or in a bucket, with the same files as the run's folder.

Stores cannot rename folders. A checkpoint there is complete once its checkpoint.json exists: this
file is written last and deleted first.
"""

import contextlib
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import xxhash

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX
from tokenfeed.pipeline.format.store import LocalStore, open_place
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.trainer.checkpoints.checkpoint_format import CONTENT_FILE, files_of
from tokenfeed.trainer.checkpoints.retention import name_of
from tokenfeed.trainer.config.run_config import CHECKPOINTS_FOLDER

__all__ = ["PROBE", "RemoteRun", "reason"]

_GIVE_UP_S = 30.0
"""Seconds to repeat a request. Uploads then start again; a run that needs the answer ends."""
_COPIED_BYTES = 8 << 20
_STEP = re.compile(r"step-(\d{8})")
_ASIDE = CONTENT_FILE + ".damaged"
PROBE = "may-be-written"
"""A file that `check_writable` writes and deletes."""


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
        self._place = place
        self.url = place.name
        self._known: dict[str, str] = {}
        """Checksums of the small files that this process wrote: a new try skips them."""

    def is_in(self, folder: Path) -> bool:
        """Return whether it is a local folder equal to `folder` or inside it."""
        place = self._place
        return isinstance(place, LocalStore) and Path(place.root).resolve().is_relative_to(
            folder.resolve()
        )

    def holds_shards(self) -> bool:
        """Return whether it is a local folder with a data set in it."""
        return isinstance(self._place, LocalStore) and self._place.exists(MANIFEST_FILE)

    def check_writable(self) -> None:
        """Write a small file and delete it; raises the store's error."""
        self._place.write(PROBE, b"")
        self._place.delete(PROBE)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        return sorted(step for step, names in self._list().items() if CONTENT_FILE in names)

    def put(self, data: bytes, name: str) -> None:
        """Write a small file, unless this process wrote the same content before."""
        checksum = xxhash.xxh3_64_hexdigest(data)
        if self._known.get(name) != checksum:
            self._place.write(name, data)
            self._known[name] = checksum

    def get(self, name: str) -> bytes | None:
        """Return a small file; None if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            return self._place.read(name)
        return None

    def put_checkpoint(self, folder: Path) -> None:
        """Upload a checkpoint, unless the same one is there; a different one is replaced."""
        marker = (folder / CONTENT_FILE).read_bytes()
        there = _path(folder.name)
        content_file = f"{there}/{CONTENT_FILE}"
        if content_file in self._known or self.get(content_file) == marker:
            return
        self._place.delete(content_file)
        names = files_of(marker)
        stale = self._place.names(there) - {*names}
        self._place.delete(*(f"{there}/{name}" for name in stale))
        for name in names:
            path = folder / name
            self._place.write(f"{there}/{name}", path)
            size = self._place.size(f"{there}/{name}")
            if size != path.stat().st_size:
                raise OSError(f"{name} has {size} bytes there, not {path.stat().st_size}")
        self.put(marker, content_file)

    def get_checkpoint(self, step: int, folder: Path) -> None:
        """Download the files of a checkpoint into a folder. It does not check them."""
        there = _path(name_of(step))
        for name in _finished(self._place.names(there)):
            path = f"{there}/{name}"
            with (
                self._place.open(path, self._place.size(path)) as source,
                open(folder / name, "wb") as copy,
            ):
                shutil.copyfileobj(source, copy, _COPIED_BYTES)

    def set_aside(self, step: int) -> None:
        """Rename the checkpoint.json of a step, so that the step is no checkpoint any more."""
        there = _path(name_of(step))
        self._place.write(f"{there}/{_ASIDE}", self._place.read(f"{there}/{CONTENT_FILE}"))
        self._place.delete(f"{there}/{CONTENT_FILE}")

    def delete_old(self, latest: int, keep: int, best: int | None) -> None:
        """Delete checkpoints older than the latest `keep` except the best, and unfinished files.

        Checkpoints of steps above `latest` stay: this session did not write them.
        """
        there = {step: names for step, names in self._list().items() if step <= latest}
        complete = sorted(step for step, names in there.items() if CONTENT_FILE in names)
        for step, names in there.items():
            folder = _path(name_of(step))
            is_kept = step in (*complete[-keep:], best)
            stale = names - _finished(names) if is_kept else names
            if not is_kept:
                self._place.delete(f"{folder}/{CONTENT_FILE}")
            self._place.delete(*(f"{folder}/{name}" for name in stale - {CONTENT_FILE}))
            self._place.prune(folder)
        names = self._place.names()
        self._place.delete(*names - _finished(names))

    def _list(self) -> dict[int, set[str]]:
        """Return the files of each step."""
        steps = map(_STEP.fullmatch, self._place.names(CHECKPOINTS_FOLDER))
        return {int(step[1]): self._place.names(_path(step[0])) for step in steps if step}


def _path(step: str) -> str:
    return f"{CHECKPOINTS_FOLDER}/{step}"


def _finished(names: set[str]) -> set[str]:
    return {name for name in names if not name.endswith(TEMPORARY_SUFFIX)}


def reason(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
