"""The library that other projects import: shard format and loader.

    from tokenfeed.pipeline import Padded, ShardLoader

The names below are looked up when first used, so that `pretokenize`, which needs only the shard
format, does not pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenfeed.pipeline.feeding.batch import Batch as Batch
    from tokenfeed.pipeline.feeding.dataset import ShardDataset as ShardDataset
    from tokenfeed.pipeline.feeding.loader import ShardLoader as ShardLoader
    from tokenfeed.pipeline.format.manifest import Manifest as Manifest
    from tokenfeed.pipeline.format.shard import ShardReader as ShardReader
    from tokenfeed.pipeline.format.shard import ShardWriter as ShardWriter
    from tokenfeed.pipeline.planning.mixture import Mixture as Mixture
    from tokenfeed.pipeline.planning.policy import Fixed as Fixed
    from tokenfeed.pipeline.planning.policy import Packed as Packed
    from tokenfeed.pipeline.planning.policy import Padded as Padded
    from tokenfeed.pipeline.planning.state import merge_states as merge_states

_HOME = {
    "Batch": "feeding.batch",
    "Fixed": "planning.policy",
    "Manifest": "format.manifest",
    "Mixture": "planning.mixture",
    "Packed": "planning.policy",
    "Padded": "planning.policy",
    "ShardDataset": "feeding.dataset",
    "ShardLoader": "feeding.loader",
    "ShardReader": "format.shard",
    "ShardWriter": "format.shard",
    "merge_states": "planning.state",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
