"""Report on SIGTERM, before the signal ends the process as it would without a watch."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_GRACE_S = 1.0
"""Seconds after which a main thread that has not handled the signal counts as stuck."""


_current: list["Termination"] = []
_masks = threading.local()


def _before_fork() -> None:
    """Hold the signal, or a child that gets it at once would write into the pipe of its parent."""
    if _current:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    if (before := _masks.__dict__.pop("before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    """Leave the signal to the system in a child, as without a watch."""
    for each in _current:
        each._forget()
    _current.clear()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


class Termination:
    """Handles SIGTERM, if the script leaves it to the system. Only for the main thread.

    A Python handler does not run while the main thread is stuck in C code, such as a collective
    whose peer is gone. Then a thread reports and ends the process.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._is_handled = threading.Event()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        _current.append(self)
        threading.Thread(target=self._wait, daemon=True, name="tokenfeed-stall").start()

    @classmethod
    def install(cls, report: Callable[[], None]) -> "Termination | None":
        """Return a new object, or None if this thread or the script's handler does not allow it."""
        is_main = threading.current_thread() is threading.main_thread()
        if os.name != "posix" or not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return None
        return cls(report)

    @property
    def is_ours(self) -> bool:
        """Whether the script still leaves the signal to the system."""
        return bool(signal.getsignal(signal.SIGTERM) == self._handle)

    def close(self) -> None:
        """Leave the signal to the system again."""
        _current.remove(self)
        with contextlib.suppress(OSError, ValueError):  # ValueError: not in the main thread
            self._forget()
        with contextlib.suppress(OSError):
            os.write(self._writing, b"\0")
            os.close(self._writing)

    def _forget(self) -> None:
        if self.is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (current := signal.set_wakeup_fd(self._wakeup_before)) != self._writing:
            signal.set_wakeup_fd(current)  # somebody else's

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_handled.set()
        self._report()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _wait(self) -> None:
        """End the process if the main thread does not handle the signal."""
        while (number := os.read(self._reading, 1)) not in (b"\0", b""):
            if number[0] == signal.SIGTERM and self.is_ours and not self._is_handled.wait(_GRACE_S):
                self._report()
                ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # 0: as the system does
                os.kill(os.getpid(), signal.SIGTERM)
        os.close(self._reading)
