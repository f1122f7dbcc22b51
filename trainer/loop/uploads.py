"""The copy of a run in a bucket or in another folder. It has the files of the run's folder.

A thread uploads what is new after each checkpoint, so neither steps nor saves wait for the place.
If checkpoints come faster than the place takes them, the best and the latest go first. A place that
fails costs a warning: the next upload makes up for it.

A bucket cannot rename. A checkpoint there is complete once its checkpoint.json exists, which is
written last and deleted first. In a folder, a checkpoint has a temporary name until it is complete.
"""

import contextlib
import datetime
import errno
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenfeed.pipeline.errors import ConfigError, ResumeError, TokenfeedError
from tokenfeed.pipeline.format.manifest import MANIFEST_FILE
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.format.store import LocalStore, open_place
from tokenfeed.trainer.checkpoints.checkpoint_files import (
    CONTENT_FILE,
    Checkpoint,
    Checkpoints,
    files_of,
    reading,
    step_of,
)
from tokenfeed.trainer.config.run_config import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    PAGE_FILE,
    REPORT_FILE,
    TrainConfig,
)
from tokenfeed.trainer.report.run_files import TRACKED_FILE, MetricsFile

THREAD = "upload"
"""Name of the thread."""
MARK_FILE = "upload.json"
"""Names the run in its folder and in the copy."""
_FIRST = (CONFIG_FILE, METRICS_FILE, TRACKED_FILE)
"""Files that a resumed run reads. They are uploaded before the checkpoint that they belong to."""
_LAST = (PAGE_FILE, REPORT_FILE)
"""A finished report promises the last checkpoint and the best one, so it follows them."""
_COPIED_BYTES = 8 << 20
_LEAST_BYTES_PER_S = 1e6
_PATIENCE_S = 600.0
"""Seconds to wait for the last upload of a run, besides the time that its bytes take."""
_PATIENCE_AFTER_ERROR_S = 20.0
"""Seconds to wait for the last upload when a run fails."""
_QUIET_S = 1.0
"""Seconds to wait before a line says so."""

_log = logging.getLogger(__name__)


class _File(NamedTuple):
    """A file as `Place.has` compares it."""

    file: str
    bytes: int
    xxh3: str


class RunCopy:
    """The copy of a run at a place.

    Raises:
        ConfigError: The address is invalid, or nothing can be written there.
    """

    def __init__(self, address: str) -> None:
        try:
            self.place = place = open_place(address)
        except ConfigError as error:
            raise ConfigError(f"`--upload`: {error}") from error
        self.name = place.name
        self._folder = None
        if isinstance(place, LocalStore):
            self._folder = Checkpoints.of_run(Path(place.root))

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        if self._folder:
            return self._folder.steps()
        return [step for step, names in self._files().items() if CONTENT_FILE in names]

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            return self.place.read(name)
        return None

    def put(self, folder: Path) -> None:
        """Upload a checkpoint, unless the same one is there; another one of this step is replaced.

        Files that an earlier upload has left there complete are not sent again.
        """
        content, there = (folder / CONTENT_FILE).read_bytes(), f"{CHECKPOINTS_FOLDER}/{folder.name}"
        if self.read(f"{there}/{CONTENT_FILE}") == content:
            return
        files = files_of(content)
        if self._folder:
            with self._folder.new(step_of(folder.name)) as made:
                for name in (*files, CONTENT_FILE):
                    shutil.copyfile(folder / name, made / name)
            return
        self.place.delete(f"{there}/{CONTENT_FILE}")
        for name, checksum in files.items():
            facts = _File(f"{there}/{name}", (folder / name).stat().st_size, checksum)
            if self.place.has(facts):
                continue
            self.place.write(facts.file, folder / name)
            if not self.place.has(facts):
                raise OSError(errno.EIO, f"{name} has arrived damaged", self.place.path(there))
        self.place.write(f"{there}/{CONTENT_FILE}", content)

    def get(self, step: int, folder: Path) -> Checkpoint:
        """Download a checkpoint into a folder, and verify it.

        Raises:
            ResumeError: It is damaged.
        """
        there = f"{CHECKPOINTS_FOLDER}/{Checkpoints.name_of(step)}"
        content = self.place.read(f"{there}/{CONTENT_FILE}")
        with reading(self.place.path(there)):
            files = files_of(content)
        (folder / CONTENT_FILE).write_bytes(content)
        for name in files:
            path = f"{there}/{name}"
            with (
                self.place.open(path, self.place.size(path)) as source,
                (folder / name).open("wb") as made,
            ):
                shutil.copyfileobj(source, made, _COPIED_BYTES)
        with reading(self.place.path(there)):
            return Checkpoint.open(folder)

    def delete_old(self, keep: int, latest: int, best: int | None) -> None:
        """Delete all but the latest `keep` checkpoints up to `latest`, and the best one.

        Later ones are of an earlier session, and stay until this session reaches their steps.
        """
        if self._folder:
            self._folder.delete_old(keep)
            self._folder.delete_unfinished()
            return
        there = {step: names for step, names in self._files().items() if step <= latest}
        complete = [step for step, names in there.items() if CONTENT_FILE in names]
        for step in there.keys() - {*complete[-keep:], best}:
            folder = f"{CHECKPOINTS_FOLDER}/{Checkpoints.name_of(step)}"
            self.place.delete(f"{folder}/{CONTENT_FILE}")
            self.place.delete(*(f"{folder}/{name}" for name in there[step]))

    def _files(self) -> dict[int, set[str]]:
        """Return the files of each checkpoint, complete or not, in the order of steps."""
        names = filter(step_of, sorted(self.place.names(CHECKPOINTS_FOLDER)))
        return {step_of(name): self.place.names(f"{CHECKPOINTS_FOLDER}/{name}") for name in names}


class Uploads:
    """Keeps the copy of a run up to date, in a thread that does not keep the process alive.

    Args:
        config: The settings of the run.
        checkpoints: The checkpoints of the run.
    """

    def __init__(self, config: TrainConfig, checkpoints: Checkpoints) -> None:
        assert config.upload is not None
        self._copy = RunCopy(config.upload)
        self._run_dir, self._keep, self._checkpoints = config.run_dir, config.keep, checkpoints
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._failure = ""
        """Why the latest upload has failed; empty if it has not."""
        self._sent: dict[str, bytes] = {}

    def start(self) -> None:
        """Upload what is new, after an upload that is running. Do not wait."""
        with self._lock:
            self._is_due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=THREAD)
                self._thread.start()

    def finish(self) -> None:
        """Upload the end of the run. Wait for it up to a limit, and log the outcome."""
        self.start()
        self._wait(_QUIET_S)
        if self._thread:
            patience_s = _PATIENCE_S + self._checkpoints.num_bytes() / _LEAST_BYTES_PER_S
            name = self._copy.name
            _log.info("waiting for the upload to %s, for at most %.0f s", name, patience_s)
            self._wait(patience_s)
        if self._thread:
            self._failure = "it takes too long"
        if self._failure:
            _log.warning(
                "%s lacks the end of the run (%s). `train --run-dir %s --resume` uploads it",
                self._copy.name,
                self._failure,
                self._run_dir,
            )
        else:
            _log.info("uploaded to %s", self._copy.name)

    def wait_after_error(self) -> None:
        """Wait for a running upload for some seconds while an error ends the run."""
        self._wait(_PATIENCE_AFTER_ERROR_S)

    def _wait(self, seconds: float) -> None:
        if thread := self._thread:
            thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            try:
                self._upload()
                self._failure = ""
            except Exception as error:  # each store has its own errors
                self._failure = _reason(error)
                _log.warning(
                    "the upload to %s failed (%s). Training goes on, and the next checkpoint is "
                    "uploaded again",
                    self._copy.name,
                    self._failure,
                )

    def _upload(self) -> None:
        """Upload checkpoints, the best and the latest first, then what the place keeps."""
        ends, done = self._read(_LAST), set[int]()
        while steps := [step for step in self._in_order() if step not in done]:
            with self._checkpoints.pinned(steps[0]) as folder:
                if folder:
                    self._write(self._read(_FIRST))
                    self._copy.put(folder)
            done.add(steps[0])
        best = self._checkpoints.best()
        if done:
            self._copy.delete_old(self._keep, max(done), best.step if best else None)
        self._checkpoints.delete_old(self._keep)  # what was kept for the upload
        self._write(self._read(_FIRST) | ends)

    def _in_order(self) -> list[int]:
        """Return the steps of all checkpoints: the best, then from the latest to the first."""
        best, steps = self._checkpoints.best(), self._checkpoints.steps()
        return sorted(steps, key=lambda step: (not best or step != best.step, -step))

    def _read(self, names: tuple[str, ...]) -> dict[str, bytes]:
        paths = [self._run_dir / name for name in names]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def _write(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            if self._sent.get(name) != data:
                self._copy.place.write(name, data)
                self._sent[name] = data


def _reason(error: Exception) -> str:
    """Return an error as one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def is_ahead(address: str, run_dir: Path) -> bool:
    """Return whether the copy of a run has a later checkpoint than the run's folder.

    If the copy cannot be read, log a warning and return False.

    Raises:
        ConfigError: The address is invalid, or has another run.
        ResumeError: The copy cannot be read, and the folder has no checkpoint.
    """
    copy, here = RunCopy(address), Checkpoints.of_run(run_dir).steps()
    try:
        theirs, ours = _Mark.decoded(copy.read(MARK_FILE)), _Mark.of_run(run_dir)
        if theirs and here and theirs != ours:
            raise _another_run(copy, theirs, run_dir)
        return max(copy.steps(), default=0) > max(here, default=0)
    except OSError as error:
        if not here:
            raise ResumeError(
                f"{copy.name}: cannot be read ({_reason(error)}), and may have the newest "
                "checkpoint. Make it readable, or go on without --upload."
            ) from error
        _log.warning("%s: cannot be read (%s). Going on without it", copy.name, _reason(error))
        return False


def settings_there(address: str, run_dir: Path) -> TrainConfig | None:
    """Return the settings of the run that a copy has, for a folder; None if it has none."""
    copy = RunCopy(address)
    content = copy.read(CONFIG_FILE)
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).write_bytes(content)
        try:
            found = TrainConfig.of_run(Path(folder))
        except ConfigError as error:
            said = str(error).replace(f"{folder}/{CONFIG_FILE}", copy.place.path(CONFIG_FILE))
            raise ConfigError(said) from error
    return found and replace(found, run_dir=run_dir)


def fetch_newest(config: TrainConfig) -> None:
    """Download the newest checkpoint and the best one of a run that goes on, if only the copy has
    them, with the run's settings, metrics and report.

    The newest checkpoint gets its name last, so a killed download leaves no incomplete copy. The
    mark comes first: with a checkpoint and without a mark, the folder would be of another run.

    Raises:
        ResumeError: A checkpoint there is damaged, or the copy cannot be read.
    """
    address, run_dir = config.upload, config.run_dir
    if not address or not config.resume or not is_ahead(address, run_dir):
        return
    copy, here = RunCopy(address), Checkpoints.of_run(run_dir)
    step = copy.steps()[-1]
    _log.info("downloading step %d from %s", step, copy.name)
    try:
        if (mark := copy.read(MARK_FILE)) is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            atomic_write(run_dir / MARK_FILE, mark)
        with contextlib.closing(MetricsFile(run_dir)), here.new(step) as folder:
            best = copy.get(step, folder).meta.best
            if best and best.step not in (step, *here.steps()):
                with here.new(best.step) as other:
                    copy.get(best.step, other)
            for name in (*_FIRST, *_LAST):
                if (data := copy.read(name)) is not None:
                    atomic_write(run_dir / name, data)
    except TokenfeedError:
        raise
    except OSError as error:
        raise ResumeError(f"{copy.name}: cannot be downloaded ({_reason(error)}).") from error


class _Mark(msgspec.Struct, frozen=True):
    """What tells the copies of different runs apart."""

    run: str
    run_dir: str
    """The folder of the run when it began to upload."""
    begun: str

    @classmethod
    def decoded(cls, data: bytes | None) -> "_Mark | None":
        """Return a mark; None if it is missing or damaged."""
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(data, type=cls) if data else None
        return None

    @classmethod
    def of_run(cls, run_dir: Path) -> "_Mark | None":
        """Return the mark of the run in a folder; None if it has never uploaded."""
        path = run_dir / MARK_FILE
        return cls.decoded(path.read_bytes()) if path.is_file() else None


def _another_run(copy: RunCopy, theirs: _Mark, run_dir: Path) -> ConfigError:
    return ConfigError(
        f"`--upload`: {copy.name} holds another run than {run_dir}: {theirs.run_dir}, begun at "
        f"{theirs.begun}. Give another place."
    )


def _mark(copy: RunCopy, run_dir: Path) -> None:
    """Mark a copy as that of the run in a folder.

    A run that was broken off before its first checkpoint may have left a mark there. It is taken
    over if it names the same folder.

    Raises:
        ConfigError: The copy is that of another run.
    """
    folder = str(run_dir.absolute())
    now = datetime.datetime.now().isoformat(" ", "seconds")
    mark = _Mark.of_run(run_dir) or _Mark(os.urandom(8).hex(), folder, now)
    if (content := copy.read(MARK_FILE)) is None:
        # A run that was killed may have sent a mark that arrives only now, and is not to win.
        copy.place.create(MARK_FILE, msgspec.json.encode(mark))
        content = copy.read(MARK_FILE)
    theirs = _Mark.decoded(content)
    if theirs is None:  # damaged
        copy.place.write(MARK_FILE, msgspec.json.encode(mark))
    elif theirs != mark and (copy.steps() or theirs.run_dir != folder):
        raise _another_run(copy, theirs, run_dir)
    else:
        mark = theirs
    run_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(run_dir / MARK_FILE, msgspec.json.encode(mark))


def upload_report(address: str, run_dir: Path) -> None:
    """Upload settings and report of a run with phases, whose phases are runs of their own. Log a
    warning if that fails."""
    copy = RunCopy(address)
    try:
        for name in (CONFIG_FILE, *_LAST):
            copy.place.write(name, (run_dir / name).read_bytes())
    except OSError as error:
        _log.warning("the report was not uploaded to %s (%s)", copy.name, _reason(error))


def check_upload(config: TrainConfig) -> None:
    """Reject --upload of a new run if its address has another run or shards, or cannot be written.

    Raises:
        ConfigError: One of these is the case.
    """
    if config.upload is None:
        return
    copy = RunCopy(config.upload)
    place, name = copy.place, copy.name
    if isinstance(place, LocalStore):
        run_dir = config.run_dir.resolve()
        folder = Path(place.root).resolve()
        if folder.is_relative_to(run_dir):
            raise ConfigError(f"`--upload`: {name} is in --run-dir. Give another place.")
        if not any(each.exists() for each in (folder, *folder.parents[:2])):
            _log.warning(
                "`--upload`: %s: there is no folder %s, so the copy is on a disk of this machine. "
                "For a drive, end the run, and mount it first",
                name,
                folder.parents[1],
            )
    if config.resume:
        with contextlib.suppress(OSError):  # `is_ahead` has warned
            _mark(copy, config.run_dir)
        return
    try:
        if place.exists(MANIFEST_FILE):
            raise ConfigError(
                f"`--upload`: {name} holds shards, and a run would mix its files with them. Give "
                "another place."
            )
        if steps := copy.steps():
            raise ConfigError(
                f"`--upload`: {name} holds step {steps[-1]} of a run. Add --resume auto to go on "
                "with it, or give another place."
            )
        _mark(copy, config.run_dir)
        place.write(CONFIG_FILE, config.content())
    except OSError as error:
        raise ConfigError(
            f"`--upload`: {name} cannot be written ({_reason(error)}). Repair this, or leave "
            "--upload out."
        ) from error
