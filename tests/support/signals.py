"""Handlers of signals, which belong to a process."""

import contextlib
import signal
from collections.abc import Iterator

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGALRM")  # Windows has two of them


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Take back which handlers the block sets."""
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
