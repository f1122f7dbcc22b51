"""The shell around every command: it turns errors, Ctrl-C and closed pipes into exit codes.

A command is a function that returns an exit code or None. Problems that a user can cause end with
one line on stderr and an exit code: 1 for an error, 2 for a wrong option or setting, 130 for an
interruption, 143 for SIGTERM. Any other exception is a bug of ours and keeps its traceback. This
file imports little, so that the handler for Ctrl-C is installed at once.
"""

import contextlib
import errno
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.text import printable, without_secrets

_FAILED, _USAGE, _PIPE_CLOSED, _BY_SIGNAL = 1, 2, 141, 128
_NO_ROOM = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
"""Messages of the dynamic loader if there is no memory for a library."""
_NO_THREAD = "can't start new thread"
"""Python's message when the system refuses a thread."""

_REMEDIES = {
    errno.ENOSPC: ". Free space there, and run the command again.",
    errno.EMFILE: ". Close some, or raise the limit (ulimit -n).",
    errno.EROFS: ". Use another folder, or mount this one for writing.",
    errno.EACCES: ". Give this user permission, or use another path.",
}
"""What to do about an error of the system."""
_STDOUT = "stdout"
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_format_warning = warnings.formatwarning

_received: list[int] = []
"""Signals received so far."""
_said = False


def run_command(body: Callable[[], int | None]) -> NoReturn:
    """Run a command's body and leave the process with its exit code.

    The body can raise `KeyboardInterrupt("what is kept, how to continue")` to print more than
    `interrupted`. SIGTERM also raises KeyboardInterrupt in the body. A second signal ends the
    process at once.
    """
    _set_up()
    try:
        code = _run(body)
        if sys.stdout:  # None if it was closed
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        code = _PIPE_CLOSED
    except KeyboardInterrupt as interruption:
        number = _received[0] if _received else signal.SIGINT
        detail = f": {interruption}" if str(interruption) else ""
        code = _say(f"interrupted{detail}", _BY_SIGNAL + number)
        _leave_threads_behind(code)
    except ConfigError as error:
        code = _say(f"error: {error}", _USAGE)
    except TokenfeedError as error:
        code = _say(f"error: {error}", _FAILED)
    except MemoryError as error:
        code = _say(_out_of_memory(error), _FAILED)
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        code = _say(
            "error: the system refuses to start another thread. Raise the limit on processes "
            "(ulimit -u, or the container's), or use fewer processes.",
            _FAILED,
        )
    except ImportError as error:
        if not any(words in str(error) for words in _NO_ROOM):
            raise
        code = _say(_out_of_memory(error), _FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        if error.filename == _STDOUT:
            _drop_output()
        remedy = _REMEDIES.get(error.errno or 0, "")
        code = _say(f"error: {where}{error.strerror or error}{remedy}", _FAILED)
    _leave_threads_behind(code, "upload")
    for number in (signal.SIGINT, signal.SIGTERM):  # an exception while Python ends has a traceback
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code)


def _run(body: Callable[[], int | None]) -> int:
    """Return the exit code of a command's body. An extension module may turn an interruption into
    any error."""
    try:
        return body() or 0
    except Exception as error:
        if _received and not isinstance(error, TokenfeedError):
            raise KeyboardInterrupt from error
        raise


def _drop_output() -> None:
    """Let Python's last flush of stdout succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Stdout(io.FileIO):
    """The file of stdout, whose errors name it."""

    def write(self, data: Any, /) -> int:
        """Write bytes, and return how many were written."""
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                error.filename = _STDOUT
            raise


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout, for scripts."""
    print(json.dumps(value))


def log_to_stderr() -> None:
    """Print the log of tokenfeed in the format of all its commands."""
    logger = logging.getLogger("tokenfeed")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _set_up() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    _insist_on_utf8()
    log_to_stderr()
    warnings.formatwarning = _in_one_line
    own = sys.stdout
    if isinstance(own, io.TextIOWrapper) and own is sys.__stdout__:
        file = _Stdout(own.fileno(), "wb", closefd=False)
        by_line = own.line_buffering or own.write_through
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(file), encoding=own.encoding, line_buffering=by_line
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # unusual file names in an ASCII locale


def _in_one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning of this package as the log formats one, without the line of our code."""
    if filename.startswith(_PACKAGE):
        return f"warning: {printable(without_secrets(str(message)))}\n"
    return _format_warning(message, category, filename, lineno, line)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt the body. A second signal ends the process at once."""
    _received.append(number)
    if len(_received) == 1:
        raise KeyboardInterrupt
    if not _said:
        os.write(2, b"interrupted\n")
    os._exit(_BY_SIGNAL + _received[0])


def _insist_on_utf8() -> None:
    """Restart in Python's UTF-8 mode if the locale has another encoding for file names.

    The same bytes of a name, on the command line or in a folder, are then the same name everywhere.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _leave_threads_behind(code: int, name: str = "") -> None:
    """End the process at once if a daemon thread runs, such as the one that writes a checkpoint.
    With a name, only threads of this name count.

    Python cannot stop a thread in native code. If such a thread returns while Python ends, the
    process aborts.
    """
    threads = [thread for thread in threading.enumerate() if thread.daemon]
    if any(thread.name == name or not name for thread in threads):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
            sys.stdout.flush()
        os._exit(code)


def _out_of_memory(error: Exception) -> str:
    detail = f" ({error})" if str(error) else ""
    return f"error: there is not enough memory{detail}. Raise its limit, or use fewer processes."


def _say(line: str, code: int) -> int:
    global _said
    _said = True
    print(printable(without_secrets(" ".join(line.split("\n")))), file=sys.stderr)
    return code


class _Formatter(logging.Formatter):
    """Print information as it is, and warnings and errors after their level."""

    def format(self, record: logging.LogRecord) -> str:
        message = printable(without_secrets(super().format(record)))
        if record.levelno <= logging.INFO:
            return message
        return f"{record.levelname.lower()}: {message}"


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
