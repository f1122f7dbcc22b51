"""What loader and trainer need from a CUDA device: streams, page-locking, and its name."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tokenfeed.pipeline.errors import ConfigError

_PORTABLE = 1  # cudaHostRegisterPortable: locked for the contexts of all devices


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A CUDA device. It copies and computes on streams, concurrently with the host."""

    device: torch.device

    @property
    def module(self) -> Any:
        """The torch module of the device type."""
        return torch.get_device_module(self.device)

    def new_stream(self, priority: int) -> torch.Stream:
        """Return a new stream. A priority below 0 is higher than the default."""
        stream: torch.Stream = self.module.Stream(self.device, priority)
        return stream

    def on(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Queue work inside the block on `stream`."""
        context: AbstractContextManager[None] = self.module.stream(stream)
        return context

    def current_stream(self) -> torch.Stream:
        """Return the current stream of this device in this thread."""
        stream: torch.Stream = self.module.current_stream(self.device)
        return stream

    def has_bfloat16(self) -> bool:
        """Return whether the hardware computes in bf16, without emulation."""
        return bool(self.module.is_bf16_supported(including_emulation=False))

    def lock(self, address: int, num_bytes: int) -> str | None:
        """Page-lock memory of this process for asynchronous copies. Return the error, or None."""
        error = self._call("cudaHostRegister", address, num_bytes, _PORTABLE)
        return f"CUDA error {error}" if error else None

    def unlock(self, address: int) -> None:
        """Undo `lock`.

        Raises:
            RuntimeError: The device has failed.
        """
        self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> int:
        """Call the CUDA runtime; return its error code, 0 for success. No later call raises it."""
        with torch.cuda.device(self.device):  # the current device may be another one
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(getattr(runtime, name)(*arguments))
            if error:  # clear it: the next kernel launch would raise it
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self.device)
        return error


def accelerator(device: torch.device) -> Accelerator:
    """Return the accelerator of a device from `resolve_device`, which is not the CPU."""
    return Accelerator(device)


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
        raise ConfigError(f"`device`={device!r}: unknown torch device. Use cpu or cuda.") from None
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device`={device!r} is not supported. Use cpu or cuda.")
    if resolved.type == "cpu":
        return resolved
    if not torch.cuda.is_available():
        raise ConfigError(f"`device`={device!r}: torch finds no CUDA device. Use cpu.")
    if resolved.index is None:  # the current device may change
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
