"""Worker processes: a program that has imported everything, and the forks it makes of itself.

The program can start before there is anything to do, so that its imports run beside this process's
own. Each worker has a socket, by which units, results and progress travel, and ends when that
closes: a killed run leaves nobody writing. Nothing has a name, in the file system or elsewhere, so
there is nothing to clear up either. Ctrl-C and SIGTERM are this process's to handle: its workers
begin with both blocked. `worker` is their side.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, NamedTuple, Self

from tokenfeed.tools.signals import signals_held

if TYPE_CHECKING:  # seconds of imports that the program's start need not wait for
    from tokenfeed.tools.corpus.units import Unit
    from tokenfeed.tools.encoding.ledger import UnitResult
    from tokenfeed.tools.encoding.unit import Job

__all__ = [
    "SMALL_BYTES",
    "Crew",
    "Done",
    "Failure",
    "OnProgress",
    "Progress",
    "Server",
    "WorkerDied",
]

SMALL_BYTES = 2_000_000
"""Input that is done by one process, with the reference alone, before a crew would have begun."""

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""A worker is one of many: it has no threads of its own, and a fork of threads is none."""


class Progress(NamedTuple):
    """Part of a unit is done."""

    weight_bytes: float
    num_tokens: int


class Done(NamedTuple):
    """A unit is done."""

    result: "UnitResult"
    sample: list[bytes]
    """Some of its texts, to compare the engines by."""


class Failure(NamedTuple):
    """A unit cannot be done."""

    error: BaseException
    traceback: str
    """Where in the worker it was raised."""


OnProgress = Callable[[Progress], None]


class WorkerDied(Exception):
    """A worker process is gone, and what it was at with it."""


class Server:
    """The program that workers are forked from. It ends with its workers, or with this process."""

    def __init__(self) -> None:
        """Start it; it imports what workers need and waits."""
        ours, theirs = socket.socketpair()
        with theirs, signals_held(), _signals_blocked():
            self._process = subprocess.Popen(
                _command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
            )
        self._control = Connection(ours.detach())
        self._workers: list[Connection] = []
        self.is_used = False

    def fork(self, job: "Job", num_workers: int) -> list[Connection]:
        """Have it make workers for `job`, once, and give the connection to each."""
        self.is_used = True
        try:
            self._control.send((job, num_workers))
            for _ in range(num_workers):
                ours, theirs = Pipe()
                self._workers.append(ours)
                with theirs:
                    send_handle(self._control, theirs.fileno(), None)
        except ConnectionError:
            raise WorkerDied from None
        return self._workers

    def close(self) -> None:
        """End it and all its workers; when this returns they are gone."""
        if not self.is_used:
            self._process.kill()
        for connection in (*self._workers, self._control):
            connection.close()
        self._process.wait()


class Crew:
    """Workers that encode units, for as long as the block lasts. The first come first."""

    def __init__(
        self,
        server: Server,
        job: "Job",
        units: Sequence["Unit"],
        num_workers: int,
        on_progress: OnProgress,
    ) -> None:
        """Start at once; `on_progress` is called while the results are waited for."""
        self._server = server
        self._waiting = iter(units)
        self._on_progress = on_progress
        self._busy: list[Connection] = []
        with self._closing_after_an_error():
            for connection in server.fork(job, num_workers):
                self._give(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def __iter__(self) -> Iterator[Done]:
        """The results, in the order of their completion.

        Raises:
            WorkerDied: A worker process is gone.
            Exception: Whatever a worker raised.
        """
        while self._busy:
            for ready in wait(self._busy):
                assert isinstance(ready, Connection)
                yield from self._receive(ready)

    def _receive(self, connection: Connection) -> Iterator[Done]:
        try:
            message: Progress | Done | Failure = connection.recv()
        except (EOFError, ConnectionError):
            raise WorkerDied from None
        if isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, Done):
            self._busy.remove(connection)
            self._give(connection)  # it is to be busy while the caller looks at the result
            yield message
        else:
            message.error.add_note(message.traceback)
            raise message.error

    def _give(self, connection: Connection) -> None:
        """Hand a worker the next unit, if there is one."""
        unit = next(self._waiting, None)
        if unit is not None:
            with contextlib.suppress(ConnectionError):  # it is gone: reading will tell
                connection.send(unit)
            self._busy.append(connection)

    @contextlib.contextmanager
    def _closing_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._server.close()
            raise


def _command(socket_fd: int) -> list[str]:
    """The command line of a program that finds the same modules as this process."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = f"""
import sys
sys.path[:] = {path!r}
try:
    from tokenfeed.tools.job.worker import main
except (ImportError, MemoryError):  # there is no room for it, which the parent will say
    sys.exit(1)
main({socket_fd})
"""
    return [sys.executable, "-c", code]


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Have a program start with the signals blocked that it must not end from."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
