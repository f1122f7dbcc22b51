"""Accelerators: what loader and trainer need of a device that is not the CPU, in one place.

Streams and events are those of torch's module of the device, `torch.cuda` or one like it; the
backend between ranks is torch's for the type. What torch has not, each accelerator says itself: it
is a class here, and a line of `ACCELERATORS`.
"""

import contextlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tokenfeed.pipeline.errors import ConfigError

__all__ = ["ACCELERATORS", "Accelerator", "accelerator", "default_device", "resolve_device"]

_PORTABLE = 1  # cudaHostRegisterPortable: locked for the contexts of all devices


@dataclass(frozen=True, slots=True)
class Accelerator(ABC):
    """A device that copies and computes beside the host, on streams."""

    device: torch.device

    @property
    def module(self) -> Any:
        """What torch has for devices of its type."""
        return torch.get_device_module(self.device)

    def new_stream(self, priority: int) -> torch.Stream:
        """A stream beside the one that computes; below 0 it is served first."""
        stream: torch.Stream = self.module.Stream(self.device, priority)
        return stream

    def on(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """What is queued inside goes to `stream`."""
        context: AbstractContextManager[None] = self.module.stream(stream)
        return context

    def current_stream(self) -> torch.Stream:
        """The stream of this device on which this thread queues its work."""
        stream: torch.Stream = self.module.current_stream(self.device)
        return stream

    def has_bfloat16(self) -> bool:
        """Whether it computes in bf16 by itself, and does not merely emulate it."""
        return bool(self.module.is_bf16_supported(including_emulation=False))

    @abstractmethod
    def lock(self, address: int, num_bytes: int) -> str | None:
        """Page-lock memory of this process, so that copies from it need no host; or say why not."""

    @abstractmethod
    def unlock(self, address: int) -> None:
        """Undo `lock`. Raises a RuntimeError where the device has failed."""


class Cuda(Accelerator):
    """A GPU by CUDA."""

    __slots__ = ()

    def lock(self, address: int, num_bytes: int) -> str | None:
        """Page-lock memory for the contexts of all devices."""
        error = self._call("cudaHostRegister", address, num_bytes, _PORTABLE)
        return f"CUDA error {error}" if error else None

    def unlock(self, address: int) -> None:
        """Undo `lock`."""
        self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> int:
        """Call the CUDA runtime: its error, which nothing raises later, or 0."""
        with torch.cuda.device(self.device):  # the current one may be another rank's
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(getattr(runtime, name)(*arguments))
            if error:  # stays the thread's last one until a kernel's launch raises it as its own
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self.device)
        return error


ACCELERATORS: dict[str, type[Accelerator]] = {"cuda": Cuda}
"""By torch's name of their type."""


def accelerator(device: torch.device) -> Accelerator:
    """The accelerator that a device of `resolve_device` is; the CPU is none."""
    return ACCELERATORS[device.type](device)


def default_device() -> torch.device:
    """The current device of the first kind of accelerator that is here, else the CPU."""
    for kind in ACCELERATORS:
        if _is_available(kind):
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of torch that is meant.

    Raises:
        ConfigError: torch knows no such device, finds none, or it is no CPU and no accelerator
            that is known here.
    """
    known = ("cpu", *ACCELERATORS)
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"`device`={device!r} is no device of torch: try {' or '.join(known)}."
        ) from None
    if resolved.type not in known:
        raise ConfigError(f"`device`={device!r} is not supported: {' and '.join(known)} are.")
    if resolved.type == "cpu":
        return resolved
    if not _is_available(resolved.type):
        raise ConfigError(
            f"`device`={device!r}: torch finds no {resolved.type.upper()} device. Use cpu."
        )
    if resolved.index is None:
        current = accelerator(resolved).module.current_device()
        return torch.device(resolved.type, current)  # another may be current later
    return resolved


def _is_available(kind: str) -> bool:
    """Whether torch finds a device of a type; the module of some types comes with a plugin."""
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())
