"""A ShardDataset under a plain DataLoader, as tests read it."""

from itertools import islice
from pathlib import Path
from typing import Any

from delivery import POLICIES, WINDOW_TOKENS
from torch.utils.data import DataLoader

from tokenfeed import Batch, ShardDataset
from tokenfeed.pipeline.planning.policy import Batching

__all__ = ["open_dataset", "plain"]


def open_dataset(folder: Path, batching: Batching = POLICIES[0], **options: Any) -> ShardDataset:
    """A data set of several windows."""
    return ShardDataset(folder, batching, **{"window_tokens": WINDOW_TOKENS} | options)


def plain(dataset: ShardDataset, num_workers: int = 0, windows: int | None = None) -> list[Batch]:
    """The batches of a plain DataLoader."""
    shares = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    return [batch for share in islice(shares, windows) for batch in share]
