"""Messages about steps whose loss or gradients are not finite, with the records of such a step.

Each row of the step is traced back to its file and the record in the file.
"""

import contextlib
import json
import logging
from pathlib import Path

import numpy as np

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.windows.origins import origins_of
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.config.values import Shards
from tokenfeed.trainer.data.datasets import weights_of

__all__ = ["diverged", "warn_of_skip", "write_origins"]


def write_origins(path: Path, shards: Shards, rows: np.ndarray) -> str:
    """Write a line for each of some rows of the train split; gives the first, for a message.

    Of several data sets the rows are numbered through, in their order.
    """
    rows = np.unique(rows)
    whole = np.zeros(len(rows), np.int64)
    places = origins_of(open_splits(weights_of(shards), "train"), rows, whole, whole)
    lines = [json.dumps({"file": place.file, "record": place.record}) for place in places]
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
    return f"{places[0].file} record {places[0].record}"


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


def diverged(
    finding: str, step: int, config: TrainConfig, rows: np.ndarray, way_on: str
) -> ConfigError:
    """The error that ends a run. A file names where the rows of a step came from."""
    path = config.run_dir / BAD_STEP_FILE
    first = write_origins(path, config.shards, rows)
    return ConfigError(
        f"{finding}. Lower --learning-rate or raise --warmup-steps, and {way_on}. If a checkpoint "
        f"leads here again, delete it to go on from the one before. The records of step {step}, "
        f"{first} and others, are named in {path}."
    )
