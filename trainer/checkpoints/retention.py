"""The checkpoints in a run's folder: list, read, write, and delete old ones."""

import contextlib
import errno
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, sync_folder
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint, Kind, write_content
from tokenfeed.trainer.checkpoints.metadata import Best, CheckpointMeta
from tokenfeed.trainer.checkpoints.ranks import Gather
from tokenfeed.trainer.checkpoints.tensor_file import HostCopy, write_tensors
from tokenfeed.trainer.config.run_config import CHECKPOINTS_FOLDER
from tokenfeed.trainer.distributed.world import State

__all__ = ["DAMAGE", "Checkpoints", "Held", "Snapshot", "name_of"]

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")
_DAMAGED_SUFFIX = ".damaged"
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged checkpoint may raise."""


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a rank saves."""

    meta: CheckpointMeta
    rest: State
    """The state without tensors, with names where tensors belong."""
    tensors: dict[str, Kind]
    copy: HostCopy
    """The shards of this rank."""
    rank: int
    gather: Gather
    """Returns the values of all ranks that save, by rank."""


@dataclass(frozen=True, slots=True)
class Held:
    """Steps whose checkpoints must not be deleted for now."""

    latest: int | None
    best: Best | None


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: set[int] = set()
        self._lock = threading.Lock()
        """Guards renames: a held checkpoint keeps its name."""
        self._changed: Callable[[], None] = lambda: None

    @classmethod
    def of_run(cls, run_dir: Path) -> "Checkpoints":
        """Return the checkpoints in a run's folder."""
        return cls(run_dir / CHECKPOINTS_FOLDER)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self._folder / name_of(step)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        if not self._folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each new checkpoint, on the thread that wrote it."""
        self._changed = listener

    def latest(self) -> Path | None:
        """Return the checkpoint of the highest step; None if there is no checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def to_resume(self) -> Path:
        """Return the latest checkpoint.

        Raises:
            ResumeError: There are no checkpoints.
        """
        latest = self.latest()
        if latest is None:
            raise ResumeError(
                f"{self._folder}: no checkpoint to resume from. Give --run-dir the folder of an "
                "earlier run, or start a new one without --resume."
            )
        return latest

    def way_on(self) -> str:
        """Return advice for an error message: how to continue after an error that ended the run."""
        latest = self.latest()
        return f"go on with --resume from {latest}" if latest else "start again: nothing was saved"

    def best(self) -> Best | None:
        """Return the best step according to the latest checkpoint.

        None if nothing was evaluated yet, or if the checkpoint of that step is missing.

        Raises:
            ResumeError: The latest checkpoint is damaged.
        """
        meta = self.latest_meta()
        best = meta and meta.best
        return best if best and self.path(best.step).is_dir() else None

    def latest_meta(self) -> CheckpointMeta | None:
        """Return the progress of the latest checkpoint; None if there is no checkpoint.

        Raises:
            ResumeError: The checkpoint is damaged.
        """
        latest = self.latest()
        if latest is None:
            return None
        with _reading(latest):
            return Checkpoint.meta_in(latest)

    def best_of(self, meta: CheckpointMeta) -> Best | None:
        """Return the best step according to a checkpoint; None if nothing was evaluated yet.

        If the checkpoint of that step is missing, log a warning and return None.
        """
        best = meta.best
        if best is None or self.path(best.step).is_dir():
            return best
        _log.warning(
            "%s: the best checkpoint so far is gone. Going on without it", self.path(best.step)
        )
        return None

    def open_best(self) -> tuple[Best | None, Checkpoint]:
        """Verify and return the best checkpoint, or the latest one if no best step is known.

        Raises:
            ResumeError: There are no checkpoints, or the one to read is damaged.
        """
        latest = self.to_resume()
        with _reading(latest):
            best = self.best_of(Checkpoint.meta_in(latest))
        return best, self.open(best.step if best else None)

    def open(self, step: int | None = None) -> Checkpoint:
        """Verify and return the checkpoint of a step, or the latest one.

        Raises:
            ResumeError: The checkpoint is missing or damaged.
        """
        path = self.to_resume() if step is None else self.path(step)
        with _reading(path):
            return _verified(path)

    def write(self, snapshot: Snapshot, keep: int) -> None:
        """Write a checkpoint. Then delete all but the latest `keep` checkpoints and the best one.

        If several ranks save, each rank writes its shards into the same folder. Rank 0 does the
        rest.

        Raises:
            OSError: Writing failed on one of the ranks. Earlier checkpoints are unchanged.
        """
        final = self.path(snapshot.meta.step)
        temporary = _unfinished(final)
        try:
            _on_all_ranks(snapshot, lambda: self._make(temporary, snapshot.rank))
            files = _on_all_ranks(snapshot, lambda: _write_shards(temporary, snapshot))
            if snapshot.rank:
                return
            for name, _ in files:
                if not (temporary / name).exists():  # on the disk of another machine
                    missing = f"rank 0 does not find {name}: all ranks need the same --run-dir"
                    raise OSError(errno.ENOENT, missing)
            write_content(temporary, snapshot.meta, snapshot.rest, snapshot.tensors, dict(files))
            temporary.rename(final)
            sync_folder(self._folder)
        except OSError as error:
            if snapshot.rank == 0:
                self.delete_unfinished()  # frees space on a full disk
            reason = f"{error.strerror}. After fixing this, {self.way_on()}"
            raise OSError(error.errno, reason, str(final)) from error
        self.delete_old(keep)
        self._changed()

    def damage(self, step: int) -> str | None:
        """Read all bytes of a checkpoint; return what is wrong with them, or None."""
        try:
            _verified(self.path(step))
        except DAMAGE as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def hold(self) -> Iterator[Held]:
        """Protect the latest and the best checkpoint from deletion within the block.

        Only one block may be open at a time.
        """
        with self._lock:
            held = Held(max(self.steps(), default=None), self.best())
            self._held = {step for step in (held.latest, held.best and held.best.step) if step}
        try:
            yield held
        finally:
            self._held = set()

    def delete_old(self, keep: int) -> None:
        """Delete all but the latest `keep` checkpoints, the best one, and held ones.

        If the latest checkpoint is damaged, the best one is unknown. Then nothing is deleted.
        """
        try:
            best = self.best()
        except ResumeError:
            return
        with self._lock:
            kept = {*self._held, best and best.step}
            old = [self.path(step) for step in self.steps()[:-keep] if step not in kept]
            unnamed = [path.rename(_unfinished(path)) for path in old]
        for path in unnamed:  # renamed first: a kill half-way leaves no damaged checkpoint
            shutil.rmtree(path)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is ignored from now on; return the new path."""
        path = self.path(step)
        aside = path.with_name(path.name + _DAMAGED_SUFFIX)
        shutil.rmtree(aside, ignore_errors=True)
        return path.rename(aside)

    @contextlib.contextmanager
    def receive(self, step: int) -> Iterator[Path]:
        """Yield an empty folder to copy a checkpoint into. Afterwards the folder becomes the
        checkpoint.

        An existing checkpoint of this step is renamed, as by `set_aside`. If the block raises,
        nothing changes.
        """
        final = self.path(step)
        temporary = _unfinished(final)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if final.exists():
            self.set_aside(step)
        temporary.rename(final)
        sync_folder(self._folder)

    def _make(self, temporary: Path, rank: int) -> None:
        """Make an empty folder, on rank 0."""
        if rank == 0:
            self.delete_unfinished()
            temporary.mkdir(parents=True)

    def delete_unfinished(self) -> None:
        """Delete what a killed process left of checkpoints that it wrote or deleted."""
        for path in self._folder.glob(f"step-*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)


def _verified(path: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    if name_of(checkpoint.meta.step) != path.name:
        raise ValueError(f"its checkpoint.json is of step {checkpoint.meta.step}")
    return checkpoint


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def _on_all_ranks(snapshot: Snapshot, job: Callable[[], Result]) -> list[Result]:
    """Run a job on each rank that saves; return its results, by rank.

    Raises:
        OSError: What a job raised, on all ranks.
    """
    own: Result | OSError
    try:
        own = job()
    except OSError as error:
        own = error
    results: list[Result | OSError] = snapshot.gather(own)
    for result in results:
        if isinstance(result, OSError):
            raise result
    return cast(list[Result], results)


def _write_shards(folder: Path, snapshot: Snapshot) -> tuple[str, str]:
    """Write a rank's file; return its name and checksum."""
    name = f"state-{snapshot.rank}.safetensors"
    return name, write_tensors(folder / name, snapshot.copy)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise ResumeError(
            f"{path}: the checkpoint is damaged ({error}). Delete this folder to resume from the "
            "one before it."
        ) from error
