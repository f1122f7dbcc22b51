"""What is said of a run that diverged: often a few records of its last step are to blame."""

import numpy as np

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.origins import write_origins

__all__ = ["diverged"]

LAST_STEP_FILE = "last-step.jsonl"
"""Files and records of the step that a run ended on."""


def diverged(finding: str, config: TrainConfig, rows: np.ndarray, way_on: str) -> ConfigError:
    """The error to raise; it names a file of where the rows of the last step came from."""
    path = config.run_dir / LAST_STEP_FILE
    first = write_origins(path, config.shards, rows)
    return ConfigError(
        f"{finding}. Lower --learning-rate or raise --warmup-steps, and {way_on}. If a checkpoint "
        "leads here again, delete it to go on from the one before. The records of this step, "
        f"{first} and others, are named in {path}."
    )
