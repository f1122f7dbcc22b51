"""Worker processes: a program that has imported everything, and the forks it makes of itself.

The `Work` object says what workers do: it is sent to the program, and begun there. The program can
start before there is anything to do, so that its imports run beside this process's own. Each worker
has a socket, by which units, results and progress travel, and ends when that closes: a killed run
leaves nobody writing. Nothing has a name, in the file system or elsewhere, so there is nothing to
clear up either. Ctrl-C and SIGTERM are this process's to handle: its workers begin with both
blocked. `worker` is their side.

The workers' side of a crew: a program that begins a work once, forks, and serves units.

It forks when the work is begun and nothing done yet: threads, like a tokenizer's, do not survive
a fork; what was loaded is then memory that all workers share. A worker whose socket closes ends at
once, whatever it is doing: nobody wants its unit any more.
"""

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, Self, TypeVar

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.tools.shell.console import log_to_stderr
from tokenfeed.tools.shell.signals import signals_held

__all__ = [
    "ENVIRONMENT",
    "SMALL_BYTES",
    "Begin",
    "Crew",
    "Done",
    "Failure",
    "OnProgress",
    "Progress",
    "ResultT",
    "Server",
    "UnitT",
    "Weighed",
    "Work",
    "Worker",
    "WorkerDied",
    "failure_of",
    "main",
]

SMALL_BYTES = 2_000_000
"""Input that is done by one process, with the reference alone, before a crew would have begun."""

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}
"""A worker is one of many: it has no threads of its own, and a fork of threads is none. A library
in Rust that runs out of memory prints one line."""


class Weighed(Protocol):
    """A unit of work, as far as a crew cares."""

    @property
    def weight_bytes(self) -> float:
        """Its part of all the work, by which progress is shown."""
        ...


UnitT = TypeVar("UnitT", bound=Weighed)
ResultT = TypeVar("ResultT")
_TakenT = TypeVar("_TakenT", bound=Weighed, contravariant=True)
_GivenT = TypeVar("_GivenT", covariant=True)

Begin = Callable[[Callable[[float, int, str], None]], Callable[[UnitT], ResultT]]
"""Loads what work on units needs, and returns the function that does a unit. Its argument is called
with the weight and tokens of each part of a unit that is done, and the last record of it."""


class Work(Protocol[_TakenT, _GivenT]):
    """What all workers are to do, whichever unit they get."""

    @property
    def begin(self) -> Begin[_TakenT, _GivenT]:
        """Called once, before the workers are forked."""
        ...


class Progress(NamedTuple):
    """Part of a unit is done."""

    weight_bytes: float
    num_tokens: int
    at: str = ""
    """The last record of the part."""


class Done(NamedTuple):
    """A unit is done."""

    result: Any
    """Whatever the work makes of a unit."""


class Failure(NamedTuple):
    """A unit cannot be done."""

    error: BaseException
    traceback: str
    """Where in the worker it was raised."""


OnProgress = Callable[[Progress], None]


_DIED = "a worker process was killed, perhaps for want of memory (then use fewer `--workers`)"


class WorkerDied(TokenfeedError):
    """A worker process is gone, and with it the unit that it was working on."""


class Server:
    """The program that workers are forked from. It ends with its workers, or with this process."""

    def __init__(
        self, modules: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start it; it imports `modules`, as far as there are such, and waits for a work.

        Args:
            modules: What its workers will need.
            environment: Variables that it has beside this process's own.
        """
        ours, theirs = socket.socketpair()
        with theirs, signals_held(), _signals_blocked():
            self._process = subprocess.Popen(
                _command(theirs.fileno(), modules),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT | dict(environment),
            )
        self._control = Connection(ours.detach())
        self._workers: list[Connection] = []
        self.is_used = False

    def prepare(self, load: Callable[[], None]) -> None:
        """Have it call something that a work will need, before there is one."""
        with contextlib.suppress(ConnectionError):  # it is gone: forking will tell
            self._control.send(load)

    def fork(self, work: Work[Any, Any], num_workers: int) -> list[Connection]:
        """Have it make workers for `work`, once, and give the connection to each."""
        self.is_used = True
        try:
            self._control.send((work, num_workers))
            for _ in range(num_workers):
                ours, theirs = Pipe()
                self._workers.append(ours)
                with theirs:
                    send_handle(self._control, theirs.fileno(), None)
        except ConnectionError:
            raise WorkerDied(_DIED) from None
        return self._workers

    def close(self) -> None:
        """End it and all its workers; when this returns they are gone."""
        if not self.is_used:
            self._process.kill()
        for connection in (*self._workers, self._control):
            connection.close()
        self._process.wait()


class Crew(Generic[UnitT, ResultT]):
    """Workers that do units, for as long as the block lasts. The first come first."""

    def __init__(
        self,
        server: Server,
        work: Work[UnitT, ResultT],
        units: Sequence[UnitT],
        num_workers: int,
        on_progress: OnProgress,
    ) -> None:
        """Start at once; `on_progress` is called while the results are waited for."""
        self._server = server
        self._waiting = iter(units)
        self._on_progress = on_progress
        self._given: dict[Connection, deque[UnitT]] = {}
        self._at: dict[Connection, str] = {}
        """The last record that each worker has reported of its unit."""
        self._urgent: UnitT | None = None
        with self._closing_after_an_error():
            for connection in server.fork(work, num_workers):
                self._given[connection] = deque()
            self._give_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def hurry(self, unit: UnitT) -> None:
        """Have one more unit done soon.

        Until it is, workers have one unit in advance: the caller will be busy with its result.
        """
        self._send(next(iter(self._given)), unit)
        self._urgent = unit
        self._give_all()

    def __iter__(self) -> Iterator[ResultT]:
        """The results, in the order of their completion.

        Raises:
            WorkerDied: A worker process is gone.
            Exception: Whatever a worker raised.
        """
        while busy := [connection for connection, given in self._given.items() if given]:
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                yield from self._receive(ready)

    def _receive(self, connection: Connection) -> Iterator[ResultT]:
        try:
            message: Progress | Done | Failure = connection.recv()
        except (EOFError, ConnectionError):
            unit, at = self._given[connection][0], self._at.get(connection)
            behind = f", after {at}" if at else ""
            raise WorkerDied(f"{_DIED}, at {unit}{behind}") from None
        if isinstance(message, Progress):
            self._at[connection] = message.at
            self._on_progress(message)
        elif isinstance(message, Failure):
            message.error.add_note(message.traceback)
            raise message.error
        else:
            if self._given[connection].popleft() is self._urgent:
                self._urgent = None
            if len(self._given[connection]) <= (self._urgent is not None):
                self._give(connection)  # it is to be busy while the caller looks at the result
            yield message.result

    def _give_all(self) -> None:
        for connection in self._given:
            self._give(connection)

    def _give(self, connection: Connection) -> None:
        """Hand a worker the next unit, if there is one."""
        unit = next(self._waiting, None)
        if unit is not None:
            self._send(connection, unit)

    def _send(self, connection: Connection, unit: UnitT) -> None:
        with contextlib.suppress(ConnectionError):  # it is gone: reading will tell
            connection.send(unit)
        self._given[connection].append(unit)

    @contextlib.contextmanager
    def _closing_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._server.close()
            raise


def _command(socket_fd: int, modules: Sequence[str]) -> list[str]:
    """The command line of a program that finds the same modules as this process."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = f"""
import sys
sys.path[:] = {path!r}
try:
    from tokenfeed.tools.jobs.crew import main
except (ImportError, MemoryError):  # there is no room for it, which the parent will say
    sys.exit(1)
main({socket_fd}, {list(modules)!r})
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


class Worker(Generic[UnitT, ResultT]):
    """Does units, and says how far it is."""

    def __init__(self, begin: Begin[UnitT, ResultT]) -> None:
        """Begin a work."""
        self.on_progress: OnProgress = lambda progress: None
        self._left_bytes = 0.0
        self._do = begin(self._count)

    def do(self, unit: UnitT) -> ResultT:
        """What the work makes of a unit."""
        self._left_bytes = unit.weight_bytes
        result = self._do(unit)
        self._count(self._left_bytes, 0)
        return result

    def _count(self, weight_bytes: float, num_tokens: int, at: str = "") -> None:
        """A unit counts for its weight, which is an estimate: no more, and in the end no less."""
        weight_bytes = min(weight_bytes, self._left_bytes)
        self._left_bytes -= weight_bytes
        self.on_progress(Progress(weight_bytes, num_tokens, at))


def main(socket_fd: int, modules: list[str]) -> None:
    """The program: wait for a work, begin it, fork its workers, outlive them."""
    log_to_stderr()
    for name in modules:  # before a work is known there is time for it
        with contextlib.suppress(Exception):  # beginning the work will tell
            importlib.import_module(name)
    control = Connection(socket_fd)
    try:
        while callable(message := control.recv()):
            message()
        work, num_workers = message
        connections = [Connection(recv_handle(control)) for _ in range(num_workers)]
    except (EOFError, ConnectionError):
        return  # nobody wants any
    except (ImportError, MemoryError):  # there is no room for the work, which the parent will say
        sys.exit(1)
    control.close()
    try:
        worker: Worker[Any, Any] = Worker(work.begin)
    except BaseException as error:
        _say_failed(connections, error)
    else:
        _fork(worker, connections)
    os._exit(os.EX_OK)  # the parent waits, and to take the interpreter down takes 30 ms


def _fork(worker: Worker[Any, Any], connections: list[Connection]) -> None:
    """A process for each connection; returns when all have ended."""
    gc.freeze()  # a collection would copy the memory that they share
    while connections:
        connection = connections.pop()
        try:
            is_worker = os.fork() == 0
        except OSError as error:
            _say_failed([connection], error)
            continue
        if is_worker:
            for others in connections:
                others.close()
            _serve(worker, connection)
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(worker: Worker[Any, Any], connection: Connection) -> NoReturn:
    units: SimpleQueue[Weighed] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, units), daemon=True).start()
    worker.on_progress = connection.send
    try:
        while True:
            connection.send(_answer(worker, units.get()))
    except ConnectionError:
        os._exit(os.EX_OK)


def _receive(connection: Connection, units: SimpleQueue[Weighed]) -> None:
    """Take units, and end the process when none can come any more."""
    try:
        while True:
            units.put(connection.recv())
    except (EOFError, OSError):
        os._exit(os.EX_OK)


def _answer(worker: Worker[Any, Any], unit: Weighed) -> Done | Failure:
    try:
        return Done(worker.do(unit))
    except ConnectionError:  # from telling the progress
        raise
    except BaseException as error:  # a panic of a library in Rust is no mere Exception
        return failure_of(error)


def _say_failed(connections: list[Connection], error: BaseException) -> None:
    """Answer for workers that cannot be; who asked may have ended, or have the first answer."""
    failure = failure_of(error)
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            connection.send(failure)


def failure_of(error: BaseException) -> Failure:
    """The error for the parent to raise, as itself if it can be sent."""
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(error, trace)
