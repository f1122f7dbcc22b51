"""The shell around every command: what an error, a Ctrl-C or a closed pipe looks like outside.

A command is a function that returns an exit code or None. What a user can cause ends in one line on
stderr and an exit code (1 an error, 2 a setting that cannot work, like the command line's own
mistakes, 130 an interruption); everything else is a bug of ours and keeps its traceback.
"""

import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError

__all__ = ["print_json", "run_command"]

_FAILED, _USAGE, _INTERRUPTED, _PIPE_CLOSED = 1, 2, 130, 141
_MACHINE_REFUSES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}
"""Errors of the operating system that are the user's to solve: full disks, missing rights, paths
that lead nowhere."""


def run_command(body: Callable[[], int | None]) -> NoReturn:
    """Run a command's body and leave the process with its exit code.

    Raise `KeyboardInterrupt("what is kept, how to go on")` to say more than `interrupted`; SIGTERM
    arrives in the body as a KeyboardInterrupt too.
    """
    _set_up()
    try:
        code = body() or 0
        if sys.stdout:  # it may have been closed
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush stays quiet
        code = _PIPE_CLOSED
    except KeyboardInterrupt as interruption:
        code = _say(f"interrupted{': ' if str(interruption) else ''}{interruption}", _INTERRUPTED)
    except ConfigError as error:
        code = _say(f"error: {error}", _USAGE)
    except TokenfeedError as error:
        code = _say(f"error: {error}", _FAILED)
    except OSError as error:
        if error.errno not in _MACHINE_REFUSES:
            raise
        where = f"{error.filename}: " if error.filename else ""
        code = _say(f"error: {where}{error.strerror or error}", _FAILED)
    sys.exit(code)


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout, for scripts."""
    print(json.dumps(value))


def _set_up() -> None:
    logger = logging.getLogger("tokenfeed")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # odd file names under an ASCII locale
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(line: str, code: int) -> int:
    print(" ".join(line.split("\n")), file=sys.stderr)
    return code


class _Formatter(logging.Formatter):
    """Information as it is; anything graver with its level in front."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno <= logging.INFO:
            return message
        return f"{record.levelname.lower()}: {message}"
