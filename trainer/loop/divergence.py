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

BAD_STEP_FILE = "bad-step.jsonl"
"""Files and records of the first step that was skipped."""

_log = logging.getLogger(__name__)


def write_origins(path: Path, shards: Shards, rows: np.ndarray) -> str:
    """Write the file and record of each row to `path`, and return the first one for a message.

    Rows are numbers in the train split, counted through all data sets in their order.
    """
    rows = np.unique(rows)
    whole = np.zeros(len(rows), np.int64)
    places = origins_of(open_splits(weights_of(shards), "train"), rows, whole, whole)
    lines = [json.dumps({"file": place.file, "record": place.record}) for place in places]
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
    return f"{places[0].file} record {places[0].record}"


def warn_of_skip(step: int, config: TrainConfig, rows: np.ndarray) -> None:
    """Log that a step was skipped, and where its rows came from."""
    path = config.run_dir / BAD_STEP_FILE
    named = ""
    with contextlib.suppress(TokenfeedError, OSError):  # the run goes on
        first = write_origins(path, config.shards, rows)
        named = f". Its records, {first} and others, are listed in {path}"
    _log.warning("step %d was skipped: its loss or gradients are not finite%s", step, named)


def divergence_error(
    finding: str, step: int, config: TrainConfig, rows: np.ndarray, way_on: str
) -> ConfigError:
    """Return the error that ends a run, and write the records of a step's rows to a file."""
    path = config.run_dir / BAD_STEP_FILE
    first = write_origins(path, config.shards, rows)
    return ConfigError(
        f"{finding}. Lower --learning-rate or raise --warmup-steps, and {way_on}. If the run fails "
        f"again after that checkpoint, delete it to go on from the one before. The records of step "
        f"{step}, {first} and others, are listed in {path}."
    )
