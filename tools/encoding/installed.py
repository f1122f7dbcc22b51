"""Which engines can be used here, and of which version."""

import contextlib
import importlib.metadata

import tokenizers

from tokenfeed.tools.encoding.engine import EngineName

__all__ = ["engine_version", "installed_engines"]


def installed_engines() -> list[str]:
    """Names and versions of the engines that can be used here."""
    engines: tuple[EngineName, ...] = ("tokenizers", "gigatoken")
    found = []
    for name in engines:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {engine_version(name)}")
    return found


def engine_version(name: EngineName) -> str:
    """The version of an engine's package."""
    return tokenizers.__version__ if name == "tokenizers" else importlib.metadata.version(name)
