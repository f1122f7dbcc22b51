"""Lists what would make the host wait for a GPU, each with the line of ours that asked for it.

A GPU works behind the host. Who asks for a value stops the host until the device has caught up,
and then the device has nothing to do until the host is ahead again. On CPU tensors, with real
values, an operator is known by its name; on fake tensors of a CUDA device, copies are seen too.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_VALUES = {"_local_scalar_dense", "allclose", "equal", "is_nonzero", "item"}
_SHAPES = {
    "_unique",
    "_unique2",
    "bincount",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
_CHECKS = {"multinomial"}
"""What looks at values by itself, below the operator that is seen."""
_OF_THE_HOST = {torch.Tensor.tolist: "tolist", torch.Tensor.cpu: "cpu"}
"""What is no operator on the CPU, because nothing has to be copied there."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One operator that would wait."""

    operator: str
    file: str
    """Of the innermost function that is not torch's; empty in a thread of autograd."""
    line: int
    cause: str | None = None
    """What `now` said at that moment."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator}"


class HostWaits(TorchDispatchMode):
    """While it is entered, keeps every wait of this thread, and of its backward passes, in `seen`.

    with HostWaits() as waits:
        step()
    assert waits.seen == []
    """

    def __init__(self, now: Callable[[], str | None] = lambda: None) -> None:
        """`now` says what the program is doing: kept with each wait."""
        super().__init__()
        self.seen: list[Wait] = []
        self._now = now
        self._methods = _HostMethods(self._add)

    def __enter__(self) -> Self:
        self._methods.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._methods.__exit__(*raised)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().removeprefix("aten::")
        if _waits(name, args, kwargs or {}):
            self._add(name)
        return function(*args, **(kwargs or {}))

    def _add(self, operator: str) -> None:
        frame = next(_our_frames(), None)
        where = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
        self.seen.append(Wait(operator, *where, self._now()))


class _HostMethods(TorchFunctionMode):
    """Methods that read a CPU tensor at once, and would copy one from a device."""

    def __init__(self, add: Callable[[str], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _OF_THE_HOST and args[0].device.type == "cpu":
            self._add(_OF_THE_HOST[function])
        return function(*args, **(kwargs or {}))


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    operator = name.split(".")[0]
    if operator in ("_to_copy", "copy_"):
        return _is_blocking_copy(operator, args, kwargs)
    if operator.lstrip("_").startswith("index"):
        return _has_mask(args) and not _is_masked_fill(args)
    if name == "repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return operator in _VALUES | _SHAPES | _CHECKS


def _is_blocking_copy(operator: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it waits for a copy between host and device, in either direction."""
    if operator == "copy_":
        target, source = args[0].device, args[1].device
        flag = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        source = args[0].device
        target, flag = kwargs.get("device") or source, kwargs.get("non_blocking", False)
    return source.type != target.type and not flag


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_masked_fill(args: Any) -> bool:
    """Whether one number is put where a mask is true: torch fills then, and counts nothing."""
    return len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"


_FOREIGN = (
    os.path.dirname(torch.__file__) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    __file__,
)


def _our_frames() -> Iterator[FrameType]:
    """From the innermost one outwards."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        is_mode = code.co_name in ("__torch_dispatch__", "__torch_function__")
        if not (is_mode or code.co_filename.startswith((*_FOREIGN, "<"))):
            yield frame
        frame = frame.f_back
