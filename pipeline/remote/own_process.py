"""Which process talks to stores: one that is ours, or one that asks for more than small files.

The client (`obstore`) runs threads of its own, and a fork of a process in which they run hangs on
any request, without an error. A training process is forked by others: by the user's own DataLoader,
for one. So it shall not start the client, and need not: opening a data set reads whole small files,
which a short-lived program fetches (`read_in_child`), and shards are read by workers. The rule:

- A program of ours (a command, a loader worker, the child) calls `own_process` and talks itself.
- Elsewhere, `read` goes through a child, until something else has started the client there: ranges,
  sizes, lists and writes do. A loader asks for none of them outside its workers.
- In a fork of a process that had started it, every use is a ConfigError.
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

from tokenfeed.pipeline.errors import ConfigError, RemoteError, TokenfeedError
from tokenfeed.pipeline.remote.retrying import Traffic

__all__ = ["check_process", "main", "own_process", "read_in_child", "talks_here"]

_ours = False
_started = False
_orphaned = False


def own_process() -> None:
    """Say that this process is a program of ours: it talks to stores itself."""
    global _ours
    _ours = True


def talks_here() -> bool:
    """Whether a small file is fetched by this process itself: one that has no Python to start
    another with does, too."""
    alone = getattr(sys, "frozen", False) or not sys.executable
    return _ours or _started or _orphaned or alone


def check_process() -> None:
    """Note that the client is used in this process.

    Raises:
        ConfigError: It would hang, since this is a fork of a process that has used it.
    """
    global _started
    if _orphaned:
        raise ConfigError(
            "this process was forked from one that had already talked to a remote store, and would "
            "hang on any request. Start it by `spawn` or `forkserver`, or let the parent leave "
            "remote stores alone (a loader with workers does)."
        )
    _started = True


def _forked() -> None:
    global _started, _orphaned
    _orphaned, _started = _orphaned or _started, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


_log = logging.getLogger(__name__)
_CODE = (
    "import sys, marshal; sys.path[:] = marshal.load(sys.stdin.buffer); "
    "from tokenfeed.pipeline.remote.own_process import main; main()"
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
