"""The checkpoints in a run's folder: list, read, write, and delete old ones."""

import contextlib
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, sync_folder
from tokenfeed.trainer.checkpoints.checkpoint_format import (
    read_checkpoint,
    read_meta,
    verify_checkpoint,
    write_checkpoint,
)
from tokenfeed.trainer.checkpoints.metadata import Best, CheckpointMeta
from tokenfeed.trainer.checkpoints.tensor_file import HostCopy
from tokenfeed.trainer.config.run_config import CHECKPOINTS_FOLDER
from tokenfeed.trainer.distributed.world import State

__all__ = ["DAMAGE", "Checkpoints", "Held", "name_of"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")
_DAMAGED_SUFFIX = ".damaged"
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged checkpoint may raise."""


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


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
        latest = self.latest()
        if latest is None:
            return None
        with _reading(latest):
            best = read_meta(latest).best
        return best if best and self.path(best.step).is_dir() else None

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

    def load_best(self, device: torch.device) -> tuple[Best | None, CheckpointMeta, State]:
        """Read the best checkpoint, or the latest one if no best step is known.

        Raises:
            ResumeError: There are no checkpoints, or the one to read is damaged.
        """
        latest = self.to_resume()
        with _reading(latest):
            best = self.best_of(read_meta(latest))
        return best, *self.load(device, best.step if best else None)

    def write(self, meta: CheckpointMeta, rest: State, copy: HostCopy, keep: int) -> None:
        """Write a checkpoint. Then delete all but the latest `keep` checkpoints and the best one.

        Raises:
            OSError: Writing failed. Earlier checkpoints are unchanged.
        """
        final = self.path(meta.step)
        temporary = _unfinished(final)
        self.delete_unfinished()
        try:
            write_checkpoint(temporary, meta, rest, copy)
            temporary.rename(final)
            sync_folder(self._folder)
        except OSError as error:
            self.delete_unfinished()  # frees space on a full disk
            reason = f"{error.strerror}. After fixing this, {self.way_on()}"
            raise OSError(error.errno, reason, str(final)) from error
        self.delete_old(keep)
        self._changed()

    def load(self, device: torch.device, step: int | None = None) -> tuple[CheckpointMeta, State]:
        """Read the checkpoint of a step, or the latest one. Place its tensors on `device`.

        Raises:
            ResumeError: The checkpoint is missing or damaged.
        """
        path = self.to_resume() if step is None else self.path(step)
        with _reading(path):
            return read_checkpoint(path, device)

    def damage(self, step: int) -> str | None:
        """Read all bytes of a checkpoint; return what is wrong with them, or None."""
        try:
            verify_checkpoint(self.path(step))
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

    def delete_unfinished(self) -> None:
        """Delete what a killed process left of checkpoints that it wrote or deleted."""
        for path in self._folder.glob(f"step-*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise ResumeError(
            f"{path}: the checkpoint is damaged ({error}). Delete this folder to resume from the "
            "one before it."
        ) from error
