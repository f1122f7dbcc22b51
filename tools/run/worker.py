"""The workers' side of a crew: a program that begins a work once, forks, and serves units.

It forks when the work is begun and nothing done yet: threads, like a tokenizer's, do not survive
a fork; what was loaded is then memory that all workers share. A worker whose socket closes ends at
once, whatever it is doing: nobody wants its unit any more.
"""

import contextlib
import gc
import importlib
import os
import pickle
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue
from typing import Any, Generic, NoReturn

from tokenfeed.tools.console import log_to_stderr
from tokenfeed.tools.run.crew import (
    Begin,
    Done,
    Failure,
    OnProgress,
    Progress,
    ResultT,
    UnitT,
    Weighed,
)

__all__ = ["Worker", "failure_of", "main"]


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
