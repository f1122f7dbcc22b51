"""Where rows came from: the file and the record in it, for rows that a training failed on."""

import json
from pathlib import Path

import numpy as np

from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.windows.origins import origins_of
from tokenfeed.trainer.data_sets import weights_of
from tokenfeed.trainer.settings import Shards

__all__ = ["write_origins"]


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
