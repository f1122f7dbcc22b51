"""A `DataModule` for `litgpt pretrain`, without a change of litgpt. Beside a copy of this file:

    PYTHONPATH=. litgpt pretrain pythia-160m --data litgpt_data.ShardData --data.path out/

litgpt takes rows of ids, one longer than its sequences, and makes the targets by itself. So rows
are concatenated documents, which see each other, and every id is a target. Only the last row of a
window has padding, which litgpt counts as targets too. A checkpoint includes the loader's state.
"""

from dataclasses import dataclass, field
from typing import Any

from litgpt.data import DataModule  # pyright: ignore[reportMissingImports]

from tokenfeed import Batch, Packed, ShardLoader
from tokenfeed.integrations.dataloader import StatefulShardLoader


@dataclass
class ShardData(DataModule):
    """Shards of `pretokenize`, for training and validation."""

    path: str
    seed: int = 42
    batch_size: int = field(init=False, repr=False, default=1)
    sequence_length: int = field(init=False, repr=False, default=2049)

    def __post_init__(self) -> None:
        super().__init__()

    def connect(
        self,
        tokenizer: Any = None,
        batch_size: int = 1,
        max_seq_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the sizes of a micro-batch. The tokenizer is that of the shards."""
        self.batch_size, self.sequence_length = batch_size, (max_seq_length or 2048) + 1

    def train_dataloader(self) -> StatefulShardLoader:
        """Make the training loader, for this rank."""
        return self._dataloader("train")

    def val_dataloader(self) -> StatefulShardLoader:
        """Make a loader of the validation split. Every validation starts anew."""
        return self._dataloader("validation")

    def _dataloader(self, split: str) -> StatefulShardLoader:
        batching = Packed(self.sequence_length, self.batch_size, split=True)
        loader = ShardLoader(self.path, batching=batching, split=split, seed=self.seed)
        return StatefulShardLoader(loader, ids)


def ids(batch: Batch) -> Any:
    return batch["input_ids"]
