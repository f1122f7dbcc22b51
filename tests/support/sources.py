"""Stands in for sources of a mixture: rows of likely lengths, counted and not written."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tokenfeed.pipeline.format.manifest import ShardInfo, SplitInfo, length_histogram

__all__ = ["rows_of", "source_of"]

BATCH_TOKENS = 65_536
TOKENS = 120_000_000


def rows_of(mean: float, spread: float) -> np.ndarray:
    middle = np.log(mean) - spread**2 / 2
    count = int(TOKENS / mean)
    lengths = np.random.default_rng(0).lognormal(middle, spread, count)
    return np.clip(lengths, 1, 16_384).astype(np.int64)


def source_of(lengths: np.ndarray) -> Any:
    batches = int(lengths.sum()) // BATCH_TOKENS
    shard = ShardInfo(
        file="train/00000.arrow",
        bytes=1,
        xxh3="0" * 16,
        rows=len(lengths),
        tokens=int(lengths.sum()),
        batches=batches,
        longest_row=int(lengths.max()),
    )
    split = SplitInfo(shards=(shard,), length_histogram=tuple(length_histogram(lengths).tolist()))
    return SimpleNamespace(
        name="memory",
        split=split,
        rows=split.rows,
        tokens=split.tokens,
        batches=batches,
    )
