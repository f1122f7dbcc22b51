"""What loader and trainer need from a CUDA device: page-locking, and the device of a name."""

import contextlib
from typing import Any

import torch

from tokenfeed.pipeline.errors import ConfigError

_PORTABLE = 1  # cudaHostRegisterPortable: locked for the contexts of all devices


cuda: Any = torch.cuda
"""Mostly untyped."""


def page_lock(device: torch.device, address: int, num_bytes: int) -> str | None:
    """Page-lock memory of this process for asynchronous copies. Return the error, or None."""
    error = _call(device, "cudaHostRegister", address, num_bytes, _PORTABLE)
    return f"CUDA error {error}" if error else None


def page_unlock(device: torch.device, address: int) -> None:
    """Undo `page_lock`.

    Raises:
        RuntimeError: The device has failed.
    """
    _call(device, "cudaHostUnregister", address)


def _call(device: torch.device, name: str, *arguments: int) -> int:
    """Call the CUDA runtime; return its error code, 0 for success. No later call raises it."""
    with cuda.device(device):  # the current device may be another one
        error = int(getattr(cuda.cudart(), name)(*arguments))
        if error:  # clear it: the next kernel launch would raise it
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)
    return error


def default_device() -> torch.device:
    """Return the current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a torch device, with its index.

    Raises:
        ConfigError: torch does not know or find the device, or its type is not supported.
    """
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        array = "; `.numpy()` of a CPU tensor is an array" if device == "numpy" else ""
        raise ConfigError(
            f"`device`={device!r}: unknown torch device. Use cpu or cuda{array}."
        ) from None
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device`={device!r} is not supported. Use cpu or cuda.")
    if resolved.type == "cpu":
        return resolved
    if not torch.cuda.is_available():
        raise ConfigError(f"`device`={device!r}: torch finds no CUDA device. Use cpu.")
    if resolved.index is None:  # the current device may change
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
