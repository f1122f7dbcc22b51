"""A small file of a store, fetched by a program that lives as long as that takes.

So a process that others fork never starts the client. The price is a start of Python, about 0.2 s.
"""

import contextlib
import logging
import marshal
import os
import pickle
import subprocess
import sys
import threading
from errno import EIO
from typing import IO, BinaryIO, NoReturn, Protocol

from tokenfeed.pipeline.errors import RemoteError, TokenfeedError
from tokenfeed.pipeline.remote.process import own_process
from tokenfeed.pipeline.remote.retrying import Traffic

__all__ = ["main", "read_in_child"]

_log = logging.getLogger(__name__)
_CODE = (
    "import sys, marshal; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from tokenfeed.pipeline.remote.child import main; main()"
)


class _Reads(Protocol):
    """A store that can be pickled, and counts what it asks for."""

    @property
    def traffic(self) -> Traffic:
        """What this process has asked of it."""
        ...

    def path(self, name: str) -> str:
        """A file as a message names it."""
        ...

    def read(self, name: str) -> bytes:
        """The whole of a file."""
        ...


def read_in_child(store: _Reads, name: str) -> tuple[bytes, Traffic]:
    """The whole of an object, and what it took; its warnings are logged here.

    Raises:
        TokenfeedError: Whatever `read` raises there.
    """
    paths = [entry for entry in sys.path if isinstance(entry, str)]
    orders = marshal.dumps(paths) + pickle.dumps((store, name))
    with subprocess.Popen(
        [sys.executable, "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the process that waits, which ends this one
    ) as child:
        assert child.stdin
        assert child.stdout
        try:
            with contextlib.suppress(BrokenPipeError):  # it died: the missing answer will say so
                os.write(child.stdin.fileno(), orders)
            return _answer(child.stdout, store.path(name))
        finally:
            child.kill()


def _answer(pipe: IO[bytes], place: str) -> tuple[bytes, Traffic]:
    while True:
        try:
            said = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):
            raise RemoteError(EIO, "the program that fetches it died; see above", place) from None
        if isinstance(said, TokenfeedError):
            raise said
        if isinstance(said, tuple):
            content, traffic = said
            return content, traffic
        _log.warning("%s", said)


def main() -> NoReturn:
    """Fetch what the parent asks for, tell it, and end; when the parent ends, too."""
    own_process()
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints does not get between
    logging.getLogger("tokenfeed").addHandler(_ToParent(pipe))
    asked: tuple[_Reads, str] = pickle.load(sys.stdin.buffer)
    store, name = asked
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        content = store.read(name)
        _tell(pipe, (content, store.traffic))
    except TokenfeedError as error:
        _tell(pipe, error)
    os._exit(os.EX_OK)


class _ToParent(logging.Handler):
    """Sends warnings as text."""

    def __init__(self, pipe: BinaryIO) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        _tell(self._pipe, record.getMessage())


def _tell(pipe: BinaryIO, said: object) -> None:
    pickle.dump(said, pipe)
    pipe.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(os.EX_OK)
