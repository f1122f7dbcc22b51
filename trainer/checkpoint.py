"""Checkpoints: whole or absent, checked when read, the latest two kept.

`checkpoints/step-00000100/` holds state.pt (tensors: model, optimizer, scaler, random state) and
progress.json (integers: step, tokens, the loader's position, and the checksum of state.pt). Both
are written and synced under a temporary folder name, and one rename makes them a checkpoint. Saving
waits for the disk: simple, and charged to the run as checkpoint stall.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.format.storage import (
    TEMPORARY_SUFFIX,
    atomic_file,
    atomic_write,
    file_xxh3,
    sync_folder,
)

__all__ = ["Checkpoints", "Progress", "random_state", "set_random_state"]

KEPT = 2
_STATE, _PROGRESS = "state.pt", "progress.json"
_NAME = re.compile(r"step-\d{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come, and what may not change when it goes on."""

    step: int
    """Steps trained."""
    tokens: int
    """Real tokens trained."""
    slots: int
    """Token slots these came in, padding included."""
    model: str
    vocabulary_size: int
    loader: dict[str, Any]
    """`ShardLoader.state_dict()` after the last batch of `step`."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def latest(self) -> Path | None:
        """The whole checkpoint of the highest step, if there is any."""
        if not self._folder.is_dir():
            return None
        return max((p for p in self._folder.iterdir() if _NAME.fullmatch(p.name)), default=None)

    def save(self, progress: Progress, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then delete those older than the latest two."""
        final = self._folder / f"step-{progress.step:08d}"
        temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed while saving
        with atomic_file(temporary / _STATE) as file:
            torch.save(state, file)
        content = asdict(progress) | {"state_xxh3": file_xxh3(temporary / _STATE)}
        atomic_write(temporary / _PROGRESS, json.dumps(content, indent=1).encode() + b"\n")
        temporary.rename(final)
        sync_folder(self._folder)
        self._prune()
        return final

    def load(self, device: torch.device) -> tuple[Progress, dict[str, Any]]:
        """Read the latest checkpoint; its tensors land on `device`.

        Raises:
            ResumeError: There is none, or it is damaged.
        """
        path = self.latest()
        if path is None:
            raise ResumeError(
                f"{self._folder}: no checkpoint to resume from. Give --run-dir the folder of an "
                "earlier run, or start a new one without --resume."
            )
        try:
            content = json.loads((path / _PROGRESS).read_bytes())
            checksum = content.pop("state_xxh3")
            progress = Progress(**content)
            if file_xxh3(path / _STATE) != checksum:
                raise ValueError(f"{_STATE} fails its checksum")
            state = torch.load(path / _STATE, map_location=device, weights_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResumeError(
                f"{path}: the checkpoint is damaged ({error}). Delete this folder to resume from "
                "the one before it."
            ) from error
        return progress, state

    def _prune(self) -> None:
        whole = sorted(p for p in self._folder.iterdir() if _NAME.fullmatch(p.name))
        for path in whole[:-KEPT]:
            shutil.rmtree(path)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's random generators: the host's, and the device's where it has its own."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on with random numbers where `random_state` was taken; on another device, start anew."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
