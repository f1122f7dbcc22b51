"""Sizes as people write them: 256MB, 1GiB, 1000."""

import re

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["bytes_of"]

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def bytes_of(size: str, *, flag: str, otherwise: str = "") -> int:
    """The bytes that a size means, at least 1.

    Args:
        size: A whole number, with or without a unit.
        flag: The option that it was given for.
        otherwise: What else may be given there.

    Raises:
        ConfigError: It is no size, or 0.
    """
    match = re.fullmatch(r"(\d{1,18}) ?([KMG]i?B)?", size, re.IGNORECASE)
    num_bytes = int(match[1]) * _UNITS[(match[2] or "B").upper()] if match else 0
    if not num_bytes:
        also = f", or {otherwise}" if otherwise else ""
        shown = 0 if match else repr(size)
        raise ConfigError(f"`{flag}` {shown}: expected a size like 256MB{also}.")
    return num_bytes
