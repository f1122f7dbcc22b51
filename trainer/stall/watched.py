"""An iterable whose `next` is charged to `data`."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from tokenfeed.trainer.stall.causes import Cause, Phase

__all__ = ["Watched"]

Batch = TypeVar("Batch")

_END: Any = object()


class _Meter(Protocol):
    """What brackets are of."""

    def enter(self, name: Cause) -> Phase: ...
    def leave(self, outer: Phase) -> None: ...


class Watched(Generic[Batch]):
    """Batches of a loader, as often as they are asked for; all else is the loader's."""

    def __init__(self, meter: _Meter, batches: Iterable[Batch]) -> None:
        self._meter, self._batches = meter, batches

    def __iter__(self) -> Iterator[Batch]:
        meter = self._meter
        outer = meter.enter("data")
        try:
            iterator = iter(self._batches)  # workers start here
        finally:
            meter.leave(outer)
        while True:
            outer = meter.enter("data")
            try:
                batch = next(iterator, _END)
            finally:
                meter.leave(outer)
            if batch is _END:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # as far as the loader knows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy that is being made has no batches yet
            raise AttributeError(name)
        return getattr(self.__dict__["_batches"], name)
