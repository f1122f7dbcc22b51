"""The copy of a run in another folder or in a bucket, with the same files as the run's folder.

Stores cannot rename folders. A checkpoint there is complete once its checkpoint.json exists: this
file is written last and deleted first.

The training loop survives errors of uploads, and does not wait for an upload before the next save.
The best checkpoint is uploaded before the latest, so that a run that resumes there knows the best.
"""

import contextlib
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE
from tokenfeed.pipeline.format.store import LocalStore, open_place
from tokenfeed.pipeline.remote.object_store import ObjectStore
from tokenfeed.trainer.checkpoints.checkpoint_format import CONTENT_FILE, files_of
from tokenfeed.trainer.checkpoints.retention import Checkpoints, name_of, steps_of
from tokenfeed.trainer.config.run_config import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    PAGE_FILE,
    REPORT_FILE,
    TrainConfig,
)

_GIVE_UP_S = 30.0
"""Seconds to repeat a request. The upload then fails; a run that needs the answer ends."""
_COPIED_BYTES = 8 << 20
OF_THE_END = (PAGE_FILE, REPORT_FILE)
"""Files that a run writes at its end. The report is last, for it promises the others."""
PROBE = "may-be-written"
"""A file that `check_upload` writes and deletes."""

_log = logging.getLogger(__name__)


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
        marker = self.place.read(f"{there}/{CONTENT_FILE}")
        (folder / CONTENT_FILE).write_bytes(marker)
        for name in files_of(marker):
            path = f"{there}/{name}"
            with (
                self.place.open(path, self.place.size(path)) as source,
                open(folder / name, "wb") as copy,
            ):
                shutil.copyfileobj(source, copy, _COPIED_BYTES)

    def path_of(self, step: int) -> str:
        """Return the folder of a step's checkpoint, for messages."""
        return f"{self.url}/{CHECKPOINTS_FOLDER}/{name_of(step)}"

    def delete_old(self, latest: int, keep: int, best: int | None) -> None:
        """Delete checkpoints older than the latest `keep` except the best.

        Checkpoints of steps above `latest` stay: this session did not write them.
        """
        there = {step: names for step, names in self._list().items() if step <= latest}
        complete = [step for step, names in there.items() if CONTENT_FILE in names]
        for step in there.keys() - {*complete[-keep:], best}:
            folder = f"{CHECKPOINTS_FOLDER}/{name_of(step)}"
            self.place.delete(f"{folder}/{CONTENT_FILE}")
            self._delete(folder, there[step] - {CONTENT_FILE})
            self.place.prune(folder)

    def _delete(self, folder: str, names: set[str]) -> None:
        self.place.delete(*(f"{folder}/{name}" for name in names))

    def _list(self) -> dict[int, set[str]]:
        """Return the files of each step, in the order of steps."""
        steps = steps_of(self.place.names(CHECKPOINTS_FOLDER))
        return {step: self.place.names(f"{CHECKPOINTS_FOLDER}/{name_of(step)}") for step in steps}


def reason(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


class Uploads:
    """Keeps the copy of a run up to date. Without --upload, does nothing.

    The thread that saves a checkpoint uploads it too, so the next save waits for the upload. An
    upload that fails is logged, and the next one makes up for it.
    """

    def __init__(self, config: TrainConfig, checkpoints: Checkpoints) -> None:
        self._remote = RemoteRun(config.upload) if config.upload else None
        self._config, self._checkpoints = config, checkpoints
        checkpoints.on_change = self.copy

    def copy(self) -> bool:
        """Upload everything that changed. Return whether the copy is complete."""
        if self._remote is None:
            return False
        try:
            self._copy(self._remote)
        except Exception as error:  # each store has its own errors
            _log.warning(
                "upload to %s fails (%s). The next checkpoint uploads again, or `train --resume`",
                self._remote.url,
                reason(error),
            )
            return False
        return True

    def finish(self) -> None:
        """Upload the end of the run, and log that it is there."""
        if self.copy() and self._remote is not None:
            _log.info("uploaded to %s", self._remote.url)

    def _copy(self, remote: RemoteRun) -> None:
        """Upload first what a checkpoint needs, then the best checkpoint and the latest, and last
        the report.

        The report is read first. A finished report promises the last checkpoint and the best.
        """
        best, latest = self._checkpoints.best(), self._checkpoints.steps()[-1:]
        steps = latest if best is None else sorted({best.step, *latest})
        ends = self._read(OF_THE_END)
        self._write(remote, self._read((CONFIG_FILE, METRICS_FILE)))
        for step in steps:
            remote.put_checkpoint(self._checkpoints.path(step))
        if latest:
            remote.delete_old(latest[0], self._config.keep, best.step if best else None)
        self._write(remote, ends)

    def _read(self, names: tuple[str, ...]) -> dict[str, bytes]:
        paths = [self._config.run_dir / name for name in names]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def _write(self, remote: RemoteRun, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            remote.place.write(name, data)


def check_upload(config: TrainConfig) -> None:
    """Reject --upload if its URL holds shards or later steps than the run's folder, or cannot be
    written.

    Raises:
        ConfigError: One of these is the case, or a new run cannot read the URL.
    """
    if config.upload is None:
        return
    remote, steps = RemoteRun(config.upload), Checkpoints.of_run(config.run_dir).steps()
    place, url = remote.place, remote.url
    if isinstance(place, LocalStore):
        if Path(place.root).resolve().is_relative_to(config.run_dir.resolve()):
            raise ConfigError(f"`--upload`: {url} is in --run-dir. Give another place.")
        if place.exists(MANIFEST_FILE):
            raise ConfigError(
                f"`--upload`: {url} holds shards, and a run would mix its files with them. "
                "Give another URL."
            )
    try:
        done = "read"
        there = remote.steps()
        if there and there[-1] > max(steps, default=0):
            raise ConfigError(
                f"`--upload`: {url} holds step {there[-1]}, and {config.run_dir} does not. "
                "Add --resume auto to go on from there, or give another URL."
            )
        done = "written"
        place.write(PROBE, b"")
        place.delete(PROBE)
    except ConfigError:
        raise
    except Exception as error:  # each store has its own errors
        if not steps:
            raise ConfigError(
                f"`--upload`: {url} cannot be {done} ({reason(error)}). Make it accessible, "
                "or leave --upload out."
            ) from error
        _log.warning("%s cannot be %s (%s); the run goes on", url, done, reason(error))
