"""tokenfeed: keep a GPU fed with text.

    from tokenfeed import Padded, ShardLoader, StallMeter

`tokenfeed.pipeline` is the shard format and the loader, `tokenfeed.integrations` has adapters for
other frameworks, `tokenfeed.trainer` is the training loop and its stall meter, and
`tokenfeed.tools` has the commands. The public names below are imported on first use, so that
`pretokenize`, which needs only the shard format, does not import torch.
"""

import os
import sys

_SCRIPTS = ("tokenfeed", "pretokenize", "train", "report", "shards")
_folder, _name = os.path.split(os.path.realpath(next(iter(getattr(sys, "argv", ())), "")))
if _name in _SCRIPTS and _folder == os.path.dirname(sys.executable):
    import _signal as signal  # type: ignore[import-not-found]  # `signal` takes milliseconds

    # Ctrl-C while a command imports is no error: end at once, until `run_command` takes over.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    __version__: str
    from tokenfeed.pipeline.feeding.batch import Batch as Batch
    from tokenfeed.pipeline.feeding.dataset import ShardDataset as ShardDataset
    from tokenfeed.pipeline.feeding.loader import ShardLoader as ShardLoader
    from tokenfeed.pipeline.feeding.placement import ranks_of as ranks_of
    from tokenfeed.pipeline.format.manifest import Manifest as Manifest
    from tokenfeed.pipeline.format.shard import ShardReader as ShardReader
    from tokenfeed.pipeline.format.shard_writer import ShardWriter as ShardWriter
    from tokenfeed.pipeline.planning.mixture import Mixture as Mixture
    from tokenfeed.pipeline.planning.policies import Fixed as Fixed
    from tokenfeed.pipeline.planning.policies import Packed as Packed
    from tokenfeed.pipeline.planning.policies import Padded as Padded
    from tokenfeed.pipeline.planning.stages import Stage as Stage
    from tokenfeed.pipeline.planning.state import merge_states as merge_states
    from tokenfeed.tools.python_api import Pretokenized as Pretokenized
    from tokenfeed.tools.python_api import pretokenize as pretokenize
    from tokenfeed.trainer.stall.meter import StallMeter as StallMeter
    from tokenfeed.trainer.watch.watch import watch as watch

_HOME = {
    "Batch": "pipeline.feeding.batch",
    "Fixed": "pipeline.planning.policies",
    "Manifest": "pipeline.format.manifest",
    "Mixture": "pipeline.planning.mixture",
    "Packed": "pipeline.planning.policies",
    "Padded": "pipeline.planning.policies",
    "Pretokenized": "tools.python_api",
    "ShardDataset": "pipeline.feeding.dataset",
    "ShardLoader": "pipeline.feeding.loader",
    "ShardReader": "pipeline.format.shard",
    "ShardWriter": "pipeline.format.shard_writer",
    "Stage": "pipeline.planning.stages",
    "StallMeter": "trainer.stall.meter",
    "merge_states": "pipeline.planning.state",
    "pretokenize": "tools.python_api",
    "ranks_of": "pipeline.feeding.placement",
    "watch": "trainer.watch.watch",
}

__all__ = ["__version__", *sorted(name for name in _HOME if not _HOME[name].startswith("tools."))]
"""All that needs no tokenizer library. `pretokenize` is imported by its name."""


if not TYPE_CHECKING:  # or type checkers would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import (
                version,  # takes 0.04 s, too long for the start of a command
            )

            return version("tokenfeed")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        """Return the public names, for completion in a REPL or notebook."""
        return [*_HOME, "__version__"]
