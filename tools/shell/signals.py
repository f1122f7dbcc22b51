"""Delay Ctrl-C and SIGTERM while code runs that must not be interrupted."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Deliver a signal that arrives within the block when it ends.

    Signal handlers delay the signal. A signal mask would not suffice: if another thread receives
    the signal, Python still interrupts the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, catch) for number in _HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
