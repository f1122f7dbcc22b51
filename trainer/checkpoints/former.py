"""The former format, which is read and no longer written: state.pt, and progress.json."""

import json
from pathlib import Path

import msgspec
import torch

from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.trainer.checkpoints.meta import CheckpointMeta
from tokenfeed.trainer.checkpoints.tree import State

__all__ = ["is_former", "read_checkpoint", "verify_checkpoint"]

_STATE, _PROGRESS = "state.pt", "progress.json"


def is_former(folder: Path) -> bool:
    """Whether a checkpoint is of this format."""
    return (folder / _PROGRESS).exists()


def read_checkpoint(folder: Path, device: torch.device) -> tuple[CheckpointMeta, State]:
    """Read a checkpoint. Of the optimizer it gives what torch calls its state, with numbers instead
    of names.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: It is damaged.
    """
    meta = verify_checkpoint(folder)
    return meta, torch.load(folder / _STATE, map_location=device, weights_only=True)


def verify_checkpoint(folder: Path) -> CheckpointMeta:
    """Read all bytes of a checkpoint; the errors are those of reading it."""
    content = json.loads((folder / _PROGRESS).read_bytes())
    checksum = content.pop("state_xxh3")
    meta = msgspec.convert(content, CheckpointMeta)
    if file_xxh3(folder / _STATE) != checksum:
        raise ValueError(f"{_STATE} fails its checksum")
    return meta
