"""The lean loop: trains a model from a `ShardLoader` and reports the stall that is left.

    from tokenfeed.trainer import StallMeter

Uses `tokenfeed.pipeline`, and is used by `tokenfeed.tools`. Names are looked up when first used, so
that a module that needs no torch can be read without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenfeed.trainer.stall import StallMeter as StallMeter
    from tokenfeed.trainer.stall import StallReport as StallReport

_NAMES = ("StallMeter", "StallReport")

__all__ = [*_NAMES]


if not TYPE_CHECKING:  # or type checkers would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tokenfeed.trainer import stall

        return getattr(stall, name)
