"""Checkpoints: whole or absent, checked when read; the latest two and the best one kept.

`checkpoints/step-00000100/` holds state.pt (tensors: model, optimizer, scaler, random state) and
progress.json (integers: step, tokens, the loader's position, and the checksum of state.pt). Both
are written and synced under a temporary folder name, and one rename makes them a checkpoint. What a
killed save left under such a name counts for nothing, and the next save deletes it. Saving waits
for the disk: simple, and charged to the run as checkpoint stall. best.json names the checkpoint
that was best on the validation split, and says by what.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.pipeline.format.storage import (
    TEMPORARY_SUFFIX,
    atomic_file,
    atomic_write,
    file_xxh3,
    sync_folder,
)
from tokenfeed.trainer.config import CHECKPOINTS_FOLDER, TrainConfig

__all__ = ["Best", "CheckpointMeta", "Checkpoints", "random_state", "set_random_state"]

KEPT = 2
_WORDS = {
    "model": "--model",
    "task": "task",
    "vocabulary_size": "vocabulary size",
    "optimizer": "--optimizer",
}
_STATE, _PROGRESS, _BEST = "state.pt", "progress.json", "best.json"
_NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    """How far a run has come, and what may not change when it goes on."""

    step: int
    """Steps trained."""
    tokens: int
    """Real tokens trained."""
    slots: int
    """Token slots these came in, padding included."""
    model: str
    vocabulary_size: int
    task: str = "lm"
    """What was trained; the first checkpoints lack it, and the optimizer."""
    optimizer: str = "adamw"
    loader: dict[str, Any]
    """`ShardLoader.state_dict()` after the last batch of `step`."""

    def check(self, config: TrainConfig, ours: "CheckpointMeta") -> None:
        """Refuse to go on with another model, or with fewer steps than were trained.

        Raises:
            ConfigError: The run is asked for fewer steps.
            ResumeError: It trains something else than `ours`, a new run by `config`.
        """
        if self.step > config.steps:
            raise ConfigError(
                f"`--steps`={config.steps}: {config.run_dir} has trained {self.step} steps "
                "already. Raise it to go on."
            )
        for name in ("model", "task", "vocabulary_size", "optimizer"):
            saved, wanted = getattr(self, name), getattr(ours, name)
            if saved != wanted:
                raise ResumeError(
                    f"cannot resume: the checkpoint has {_WORDS[name]} {saved}, this run has "
                    f"{wanted}. Use the same, or start a new run in another --run-dir."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The step whose weights did best on the validation split."""

    step: int
    metric: str
    """The one that decided."""
    metrics: dict[str, float]
    """All metrics at that step."""

    @property
    def rank(self) -> float:
        """The larger, the better."""
        value = self.metrics[self.metric]
        return -value if self.metric == "loss" else value


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

    def save(self, progress: CheckpointMeta, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then delete those older than the latest two, but for the best.

        Raises:
            OSError: The disk refused it, and the earlier checkpoints are as they were.
        """
        final = self.path(progress.step)
        temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
        self._delete_unfinished()
        try:
            self._write(temporary, progress, state)
        except (OSError, RuntimeError) as error:
            self._delete_unfinished()  # its bytes may be what the disk lacks
            if refusal := _refusal_of_disk(error):
                reason = f"{refusal.strerror}. When this is mended, {self.way_on()}"
                raise OSError(refusal.errno, reason, str(final)) from error
            raise
        temporary.rename(final)
        sync_folder(self._folder)
        best = self.best()
        for path in self._whole()[:-KEPT]:
            if best is None or path != self.path(best.step):
                shutil.rmtree(path)
        return final

    def load(
        self, device: torch.device, step: int | None = None
    ) -> tuple[CheckpointMeta, dict[str, Any]]:
        """Read the checkpoint of a step, or the latest; its tensors land on `device`.

        Raises:
            ResumeError: There is none, or it is damaged.
        """
        path = self.to_resume() if step is None else self.path(step)
        try:
            content = json.loads((path / _PROGRESS).read_bytes())
            checksum = content.pop("state_xxh3")
            progress = msgspec.convert(content, CheckpointMeta)
            if file_xxh3(path / _STATE) != checksum:
                raise ValueError(f"{_STATE} fails its checksum")
            state = torch.load(path / _STATE, map_location=device, weights_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResumeError(
                f"{path}: the checkpoint is damaged ({error}). Delete this folder to resume from "
                "the one before it."
            ) from error
        return progress, state

    def _whole(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))

    def _delete_unfinished(self) -> None:
        for path in self._folder.glob(f"step-*{TEMPORARY_SUFFIX}"):
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, folder: Path, progress: CheckpointMeta, state: dict[str, Any]) -> None:
        with atomic_file(folder / _STATE) as file:
            torch.save(state, file)
        content = asdict(progress) | {"state_xxh3": file_xxh3(folder / _STATE)}
        atomic_write(folder / _PROGRESS, json.dumps(content, indent=1).encode() + b"\n")


def _refusal_of_disk(error: BaseException | None) -> OSError | None:
    """The error of the operating system behind one of `torch.save`, which hides it."""
    while not (error is None or isinstance(error, OSError)):
        error = error.__context__
    return error


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's random generators: the host's, and the device's where it has its own."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = accelerator(device).module.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on with random numbers where `random_state` was taken; on another device, start anew."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type != "cpu" and device.type in state:
        accelerator(device).module.set_rng_state(state[device.type].cpu(), device)
