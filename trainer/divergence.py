"""Messages about steps whose loss or gradients are not finite, with the records of such a step."""

import contextlib
import logging

import numpy as np

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.origins import write_origins

__all__ = ["diverged", "warn_of_skip"]

BAD_STEP_FILE = "bad-step.jsonl"
"""Files and records of the first step that was skipped."""

_log = logging.getLogger(__name__)


def warn_of_skip(step: int, config: TrainConfig, rows: np.ndarray) -> None:
    """Log that a step was skipped, and where its rows came from."""
    path = config.run_dir / BAD_STEP_FILE
    named = ""
    with contextlib.suppress(TokenfeedError, OSError):  # the run goes on
        first = write_origins(path, config.shards, rows)
        named = f". Its records, {first} and others, are named in {path}"
    _log.warning("step %d was skipped: its loss or gradients are not finite%s", step, named)


def diverged(finding: str, config: TrainConfig, rows: np.ndarray, way_on: str) -> ConfigError:
    """The error that ends a run. A file names where the rows of the first bad step came from."""
    path = config.run_dir / BAD_STEP_FILE
    first = write_origins(path, config.shards, rows)
    return ConfigError(
        f"{finding}. Lower --learning-rate or raise --warmup-steps, and {way_on}. If a checkpoint "
        "leads here again, delete it to go on from the one before. The records of that step, "
        f"{first} and others, are named in {path}."
    )
