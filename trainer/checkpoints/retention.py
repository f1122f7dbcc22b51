"""The checkpoints in a run's folder: list, open, add, and delete old ones."""

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_folder
from tokenfeed.trainer.checkpoints.checkpoint_format import Best, Checkpoint, CheckpointMeta
from tokenfeed.trainer.config.run_config import CHECKPOINTS_FOLDER

_log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged checkpoint may raise."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_run(cls, run_dir: Path) -> "Checkpoints":
        """Return the checkpoints in a run's folder."""
        return cls(run_dir / CHECKPOINTS_FOLDER)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self._folder / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        """Return the folder of a step's checkpoint while it is made or deleted."""
        return self._folder / f"step-{step:08d}{TEMPORARY_SUFFIX}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in found if name)

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
                "earlier run, or leave --resume out to start again."
            )
        return latest

    def way_on(self) -> str:
        """Return advice for an error message: how to continue after an error that ended the run."""
        latest = self.latest()
        return f"go on with --resume from {latest}" if latest else "start again: nothing was saved"

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

    def best(self) -> Best | None:
        """Return the best step according to the latest checkpoint.

        If nothing was evaluated yet, return None. If the checkpoint of that step is missing, log a
        warning and return None.

        Raises:
            ResumeError: The latest checkpoint is damaged.
        """
        meta = self.latest_meta()
        best = meta.best if meta else None
        if best is None or self.path(best.step).is_dir():
            return best
        _log.warning(
            "%s: the best checkpoint so far is gone. Going on without it", self.path(best.step)
        )
        return None

    def open(self, step: int | None = None) -> Checkpoint:
        """Verify and return the checkpoint of a step, or the latest one.

        Raises:
            ResumeError: The checkpoint is missing or damaged.
        """
        path = self.to_resume() if step is None else self.path(step)
        with _reading(path):
            checkpoint = Checkpoint.open(path)
            if self.path(checkpoint.meta.step) != path:
                raise ValueError(f"its checkpoint.json is of step {checkpoint.meta.step}")
            return checkpoint

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """Yield an empty folder, `temporary(step)`. Afterwards the folder becomes the checkpoint.

        An existing checkpoint of this step is replaced. If the block raises, nothing changes.
        """
        with atomic_folder(self.path(step)) as temporary:
            yield temporary
            shutil.rmtree(self.path(step), ignore_errors=True)

    def delete_old(self, keep: int) -> None:
        """Delete all but the latest `keep` checkpoints and the best one.

        If the latest checkpoint is damaged, the best one is unknown. Then nothing is deleted.
        """
        try:
            best = self.best()
        except ResumeError:
            return
        old = [step for step in self.steps()[:-keep] if best is None or step != best.step]
        unnamed = [self.path(step).rename(self.temporary(step)) for step in old]
        for path in unnamed:  # renamed first: a kill half-way leaves no damaged checkpoint
            shutil.rmtree(path)

    def delete_unfinished(self) -> None:
        """Delete what a killed process left of checkpoints that it wrote or deleted."""
        for path in self._folder.glob(f"step-*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise ResumeError(
            f"{path}: the checkpoint is damaged ({error}). Delete this folder to resume from the "
            "one before it."
        ) from error
