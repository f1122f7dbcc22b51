"""The copy of a run in another folder or in a bucket, with the same files as the run's folder.

Stores cannot rename folders. A checkpoint there is complete once its checkpoint.json exists: this
file is written last and deleted first.

A thread uploads the run. The training loop does not wait for uploads, and survives their errors.
The thread uploads the best checkpoint, then the latest, so that a run that resumes there knows the
best.
Checkpoints written meanwhile are skipped, except the latest. A checkpoint stays on the disk until
it is uploaded.
"""

import contextlib
import logging
import math
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX
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
"""Seconds to repeat a request. Uploads then start again; a run that needs the answer ends."""
_COPIED_BYTES = 8 << 20
OF_THE_END = (PAGE_FILE, REPORT_FILE)
"""Files that a run writes at its end. The report is last, for it promises the others."""
PROBE = "may-be-written"
"""A file that `check_upload` writes and deletes."""

RETRY_S = 60.0
"""Seconds until an upload that failed is repeated."""
FINISH_S = 600.0
"""Seconds that a run waits for the last upload at its end."""

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


class Uploads:
    """Keep the copy of a run up to date. Without --upload, do nothing."""

    def __init__(self, config: TrainConfig, checkpoints: Checkpoints) -> None:
        self._remote = RemoteRun(config.upload) if config.upload else None
        self._config, self._checkpoints = config, checkpoints
        self._is_behind = threading.Event()
        self._is_ending = self._is_over = False
        self._step: int | None = None
        """The latest step of the copy."""
        self._cause: str | None = None
        """Why the latest try failed."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Upload the existing files, and from now on each new checkpoint."""
        if self._remote is not None:
            self._checkpoints.on_change = self._is_behind.set
            self._is_behind.set()
            work = partial(self._work, self._remote)
            self._thread = threading.Thread(target=work, daemon=True, name="upload")
            self._thread.start()

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the last upload, for at most `seconds`, and log the result.

        Afterwards no checkpoint is held.
        """
        if self._remote is None or self._thread is None:
            return
        url, seconds = self._remote.url, FINISH_S if seconds is None else seconds
        self._is_ending = True
        self._is_behind.set()
        _log.info("uploading to %s, for %.0f s at most", url, seconds)
        self._thread.join(seconds)
        self._is_over = True
        self._checkpoints.delete_old(self._config.keep)
        if self._thread.is_alive():
            there = "no checkpoint is there" if self._step is None else f"has step {self._step}"
            _log.warning(
                "%s: the end of the run was not uploaded, %s (%s). Start the run again with "
                "--resume to upload it.",
                url,
                there,
                self._cause or "it takes longer",
            )
        else:
            _log.info("uploaded to %s", url)

    def _work(self, remote: RemoteRun) -> None:
        """Upload until the run has ended and its end is uploaded. Repeat an upload that failed."""
        while True:
            self._is_behind.wait(RETRY_S if self._cause else None)
            self._is_behind.clear()
            is_end = self._is_ending
            try:
                self._copy(remote)
            except Exception as error:  # each store has its own errors
                self._cause = reason(error)
                _log.warning("upload to %s fails (%s)", remote.url, self._cause)
                if self._is_over:
                    return
            else:
                self._cause = None
                if is_end:
                    return

    def _copy(self, remote: RemoteRun) -> None:
        """Upload everything that changed: first what a checkpoint needs, last the report.

        The report is read first. A finished report promises the last checkpoint and the best.
        """
        ends = self._read(OF_THE_END)
        with self._checkpoints.hold() as (best, steps):
            self._write(remote, self._read((CONFIG_FILE, METRICS_FILE)))
            for step in steps:
                remote.put_checkpoint(self._checkpoints.path(step))
            if steps:
                remote.delete_old(steps[-1], self._config.keep, best)
        self._write(remote, ends)
        self._step = steps[-1] if steps else None

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
