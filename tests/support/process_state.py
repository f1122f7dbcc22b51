"""State of this process, which tests share."""

import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGALRM")  # Windows has two of them


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Take back which handlers of signals, environment, folder, settings of Python and handlers of
    the log the block sets."""
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    environment, folder = os.environ.copy(), os.getcwd()
    argv, path, hook = sys.argv, [*sys.path], sys.excepthook
    format_warning = warnings.formatwarning
    log = logging.getLogger("tokenfeed")
    log_handlers, level = [*log.handlers], log.level
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:  # else other threads would miss all for a moment
                os.environ[name] = value
        os.chdir(folder)
        sys.argv, sys.path[:], sys.excepthook = argv, path, hook
        warnings.formatwarning = format_warning
        log.handlers = log_handlers
        log.setLevel(level)
