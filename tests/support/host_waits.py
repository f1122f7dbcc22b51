"""Which operators would make the host wait for a GPU, found on CPU tensors with real values."""

import traceback
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostWaits"]

WAITING = {
    "_local_scalar_dense",  # item, tolist, float(), bool(), and the way into `if`
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
}
"""Operators whose result is a number of the host, or a shape that depends on values."""


class HostWaits(TorchDispatchMode):
    """Lists what waits inside it: `with HostWaits() as waits: ...`, then `waits.seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in WAITING:
            self.seen.append(f"{name} at {_caller()}")
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))


def _caller() -> str:
    """The innermost line that is neither torch's nor this module's."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
    ours = next(f for f in reversed(frames) if f.filename != __file__)
    return f"{ours.filename}:{ours.lineno}"
