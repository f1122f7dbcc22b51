"""An iterable whose `next` is charged to `data`."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tokenfeed.trainer.stall.causes import Cause, Phase

__all__ = ["LoaderUse", "Watched"]

Batch = TypeVar("Batch")

_END: Any = object()


@dataclass(slots=True)
class LoaderUse:
    """What a loader takes of the time of a loop."""

    name: str
    """Its class."""
    num_workers: int | None
    """None if the loader does not say."""
    batch_size: int | None
    """Items in a batch; None if the loader does not say."""
    _count: int = 0
    _seconds: float = 0.0
    _began_s: float = 0.0
    _ended_s: float = 0.0

    @classmethod
    def of_loader(cls, loader: object) -> "LoaderUse":
        """The use of a loader that has given no batch yet."""
        workers, rows = getattr(loader, "num_workers", None), getattr(loader, "batch_size", None)
        return cls(
            type(loader).__name__,
            workers if isinstance(workers, int) else None,
            rows if isinstance(rows, int) and rows > 0 else None,
        )

    @property
    def batch_seconds(self) -> float:
        """Seconds in `next` per batch, without the first, for which workers start."""
        return self._seconds / max(1, self._count - 1)

    @property
    def share(self) -> float:
        """Share of the time from the first to the latest batch that was spent in `next`."""
        return self._seconds / max(1e-9, self._ended_s - self._began_s)

    def add(self, began_s: float, ended_s: float) -> None:
        """Add a batch."""
        if self._count:
            self._seconds += ended_s - began_s
        else:
            self._began_s = ended_s
        self._count, self._ended_s = self._count + 1, ended_s


class _Meter(Protocol):
    """The meter's brackets."""

    def enter(self, name: Cause) -> Phase: ...
    def leave(self, outer: Phase) -> None: ...


class Watched(Generic[Batch]):
    """A loader whose batches are timed. Every other attribute is the loader's own."""

    def __init__(self, meter: _Meter, batches: Iterable[Batch]) -> None:
        self._meter, self._batches = meter, batches
        self.use = LoaderUse.of_loader(batches)

    def __iter__(self) -> Iterator[Batch]:
        meter = self._meter
        outer = meter.enter("data")
        try:
            iterator = iter(self._batches)  # workers start here
        finally:
            meter.leave(outer)
        while True:
            outer, began_s = meter.enter("data"), time.perf_counter()
            try:
                batch = next(iterator, _END)
            finally:
                meter.leave(outer)
            if batch is _END:
                return
            self.use.add(began_s, time.perf_counter())
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # as far as the loader knows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy that is being made has no batches yet
            raise AttributeError(name)
        return getattr(self.__dict__["_batches"], name)
