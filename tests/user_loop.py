"""A loop as a user writes it: `make editor` checks that an editor knows the types of its names, and
shows the mistakes at the end."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import torch

import tokenfeed
from tokenfeed import Batch, Packed, Padded, ShardLoader

loader = ShardLoader("out/", batching=Padded(16_384), micro_batches_per_step=4)
assert_type(loader, ShardLoader)
for batch in loader:
    assert_type(batch, Batch)
    assert_type(batch["input_ids"], torch.Tensor)
    assert_type(batch.num_targets, int)
assert_type(Packed(1024, batch_size=16), Packed)

tokenfeed.Paded  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
ShardLoader("out/")  # pyright: ignore[reportCallIssue]
Padded("many")  # pyright: ignore[reportArgumentType]


def misspelled() -> None:
    import tokenfeed.pipelines  # noqa: F401  # pyright: ignore[reportMissingImports]
