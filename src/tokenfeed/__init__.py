"""tokenfeed: keep a GPU fed with text.

The front door re-exports nothing: import the room you need. `tokenfeed.pipeline` is the library
(shard format and loader), `tokenfeed.trainer` the lean loop, `tokenfeed.tools` what people run.
"""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("tokenfeed")
