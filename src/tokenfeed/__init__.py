"""tokenfeed: keep a GPU fed with text.

    from tokenfeed import Padded, ShardLoader

`tokenfeed.pipeline` holds the shard format and the loader, `tokenfeed.integrations` their way into
other frameworks, `tokenfeed.trainer` the lean loop, `tokenfeed.tools` what people run. The names
below are looked up when first used, so that `pretokenize`, which needs only the shard format, does
not pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from tokenfeed.pipeline.feeding.batch import Batch as Batch
    from tokenfeed.pipeline.feeding.dataset import ShardDataset as ShardDataset
    from tokenfeed.pipeline.feeding.loader import ShardLoader as ShardLoader
    from tokenfeed.pipeline.format.manifest import Manifest as Manifest
    from tokenfeed.pipeline.format.shard import ShardReader as ShardReader
    from tokenfeed.pipeline.format.shard import ShardWriter as ShardWriter
    from tokenfeed.pipeline.planning.mixture import Mixture as Mixture
    from tokenfeed.pipeline.planning.policies import Fixed as Fixed
    from tokenfeed.pipeline.planning.policies import Packed as Packed
    from tokenfeed.pipeline.planning.policies import Padded as Padded
    from tokenfeed.pipeline.planning.state import merge_states as merge_states

_HOME = {
    "Batch": "feeding.batch",
    "Fixed": "planning.policies",
    "Manifest": "format.manifest",
    "Mixture": "planning.mixture",
    "Packed": "planning.policies",
    "Padded": "planning.policies",
    "ShardDataset": "feeding.dataset",
    "ShardLoader": "feeding.loader",
    "ShardReader": "format.shard",
    "ShardWriter": "format.shard",
    "merge_states": "planning.state",
}

__all__ = ["__version__", *sorted(_HOME)]


if not TYPE_CHECKING:  # or type checkers would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version  # 0.04 s that no command should start with

            return version("tokenfeed")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.pipeline.{_HOME[name]}"), name)
