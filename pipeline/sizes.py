"""Parse sizes such as 256MB, 1GiB and 1000. Torch-free."""

import re

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["bytes_meant", "bytes_of"]

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def bytes_meant(size: str) -> int | None:
    """Return the bytes of a whole number with or without a unit; None if it is not a size."""
    match = re.fullmatch(r"(\d{1,18}) ?([KMG]i?B)?", size, re.IGNORECASE)
    return int(match[1]) * _UNITS[(match[2] or "B").upper()] if match else None


def bytes_of(size: str, *, flag: str, otherwise: str = "") -> int:
    """Return the bytes of a size, at least 1.

    Args:
        size: A whole number, with or without a unit.
        flag: Name of the option, for the message.
        otherwise: Other allowed values, for the message.

    Raises:
        ConfigError: `size` is not a size, or is 0.
    """
    num_bytes = bytes_meant(size)
    if not num_bytes:
        also = f", or {otherwise}" if otherwise else ""
        shown = repr(size) if num_bytes is None else 0
        raise ConfigError(f"`{flag}` {shown}: expected a size like 256MB{also}.")
    return num_bytes
