"""The library that other projects import: shard format and loader.

    from tokenfeed.pipeline import Padded, ShardLoader

The names below are looked up when first used, so that `pretokenize`, which needs only the shard
format, does not pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenfeed.pipeline.batch import Batch as Batch
    from tokenfeed.pipeline.dataset import ShardDataset as ShardDataset
    from tokenfeed.pipeline.loader import ShardLoader as ShardLoader
    from tokenfeed.pipeline.manifest import Manifest as Manifest
    from tokenfeed.pipeline.mixture import Mixture as Mixture
    from tokenfeed.pipeline.policy import Fixed as Fixed
    from tokenfeed.pipeline.policy import Packed as Packed
    from tokenfeed.pipeline.policy import Padded as Padded
    from tokenfeed.pipeline.shard import ShardReader as ShardReader
    from tokenfeed.pipeline.shard import ShardWriter as ShardWriter
    from tokenfeed.pipeline.state import merge_states as merge_states

_HOME = {
    "Batch": "batch",
    "Fixed": "policy",
    "Manifest": "manifest",
    "Mixture": "mixture",
    "Packed": "policy",
    "Padded": "policy",
    "ShardDataset": "dataset",
    "ShardLoader": "loader",
    "ShardReader": "shard",
    "ShardWriter": "shard",
    "merge_states": "state",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
