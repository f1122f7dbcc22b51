"""The folder of a run's checkpoints: which are there, which are kept, what was best."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, atomic_write, sync_folder
from tokenfeed.trainer.checkpoints import former
from tokenfeed.trainer.checkpoints.format import read_checkpoint, write_checkpoint
from tokenfeed.trainer.checkpoints.host_copy import HostCopy
from tokenfeed.trainer.checkpoints.meta import Best, CheckpointMeta
from tokenfeed.trainer.checkpoints.tree import State
from tokenfeed.trainer.config import CHECKPOINTS_FOLDER

__all__ = ["Checkpoints"]

_BEST = "best.json"
_NAME = re.compile(r"step-\d{8}")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_run(cls, run_dir: Path) -> "Checkpoints":
        """Those in a run's folder."""
        return cls(run_dir / CHECKPOINTS_FOLDER)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step stands, if there is one."""
        return self._folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        """The whole checkpoint of the highest step, if there is any."""
        return max(self._whole(), default=None)

    def to_resume(self) -> Path:
        """The latest checkpoint, which there must be.

        Raises:
            ResumeError: There is none.
        """
        latest = self.latest()
        if latest is None:
            raise ResumeError(
                f"{self._folder}: no checkpoint to resume from. Give --run-dir the folder of an "
                "earlier run, or start a new one without --resume."
            )
        return latest

    def way_on(self) -> str:
        """For messages: what to do after an error that ended the run."""
        latest = self.latest()
        return f"go on with --resume from {latest}" if latest else "start again: nothing was saved"

    def best(self) -> Best | None:
        """The best one so far; None where there was no evaluation, or its checkpoint is gone."""
        try:
            best = msgspec.json.decode((self._folder / _BEST).read_bytes(), type=Best)
        except (OSError, msgspec.MsgspecError):
            return None
        return best if self.path(best.step).is_dir() else None

    def keep_best(self, best: Best) -> None:
        """From now on keep the checkpoint of this step instead of the best one before."""
        atomic_write(self._folder / _BEST, json.dumps(asdict(best)).encode() + b"\n")

    def write(self, meta: CheckpointMeta, rest: State, copy: HostCopy, keep: int) -> None:
        """Write a checkpoint, then delete those older than the latest `keep`, but for the best.

        Raises:
            OSError: The disk refused it, and the earlier checkpoints are as they were.
        """
        final = self.path(meta.step)
        temporary = _unfinished(final)
        self._delete_unfinished()
        try:
            write_checkpoint(temporary, meta, rest, copy)
            temporary.rename(final)
            sync_folder(self._folder)
        except OSError as error:
            self._delete_unfinished()  # its bytes may be what the disk lacks
            reason = f"{error.strerror}. When this is mended, {self.way_on()}"
            raise OSError(error.errno, reason, str(final)) from error
        self._delete_old(keep)

    def load(self, device: torch.device, step: int | None = None) -> tuple[CheckpointMeta, State]:
        """Read the checkpoint of a step, or the latest; its tensors land on `device`.

        Raises:
            ResumeError: There is none, or it is damaged.
        """
        path = self.to_resume() if step is None else self.path(step)
        read = former.read_checkpoint if former.is_former(path) else read_checkpoint
        try:
            return read(path, device)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResumeError(
                f"{path}: the checkpoint is damaged ({error}). Delete this folder to resume from "
                "the one before it."
            ) from error

    def _whole(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))

    def _delete_old(self, keep: int) -> None:
        best = self.best()
        for path in self._whole()[:-keep]:
            if best is None or path != self.path(best.step):
                shutil.rmtree(path.rename(_unfinished(path)))  # a half of one is no checkpoint

    def _delete_unfinished(self) -> None:
        for path in self._folder.glob(f"step-*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)
