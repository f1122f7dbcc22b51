"""A thread that reads sensors once a second, so that no training has to."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Sampler"]

Reading = TypeVar("Reading")


class Sampler(Generic[Reading]):
    """Keeps the latest reading.

    with Sampler(sensor.read, every_s=1.0) as sampler:
        print(sampler.latest)
    """

    def __init__(self, read: Callable[[], Reading], every_s: float) -> None:
        """
        Args:
            read: Called in the thread; what it raises ends the sampling and nothing else.
            every_s: Seconds between two calls.
        """
        self._read, self._every_s = read, every_s
        self._end = threading.Event()
        self.latest: Reading | None = None
        """None before the first reading, and after one that failed."""
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler[Reading]":
        self.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; waits for a reading that is under way, at most a second."""
        self._end.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self.latest = self._read()
            except Exception:  # see above: a driver that fails is no reason to stop a training
                self.latest = None
                return
            self._end.wait(self._every_s)
