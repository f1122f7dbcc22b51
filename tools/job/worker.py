"""The workers' side of a crew: a program that loads the engine once, forks, and serves units.

It forks when the engine is loaded and not yet used, for a tokenizer's threads do not survive a
fork; what was loaded is then memory that all workers share. A worker whose socket closes ends at
once, whatever it is doing: nobody wants its unit any more.
"""

import contextlib
import gc
import importlib
import os
import pickle
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue
from typing import NoReturn

from tokenfeed.tools.console import log_to_stderr
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.engine import Engine
from tokenfeed.tools.encoding.unit import Job, UnitEncoder
from tokenfeed.tools.job.crew import Done, Failure, OnProgress, Progress

__all__ = ["Worker", "main"]

_PRELOADED = ["awkward", "gigatoken"]
"""What the fast engine will import: before a job is known there is time for it."""


class Worker:
    """Encodes units, and says how far it is."""

    def __init__(self, job: Job, engine: Engine | None = None) -> None:
        """Load the job's engine, unless it is given."""
        self.on_progress: OnProgress = lambda progress: None
        self._left_bytes = 0.0
        self._encoder = UnitEncoder(job, self._count, engine)

    def encode(self, unit: Unit) -> Done:
        """Encode a unit; see `UnitEncoder.encode`."""
        self._left_bytes = unit.weight_bytes
        done = Done(*self._encoder.encode(unit))
        self._count(self._left_bytes, 0)
        return done

    def _count(self, weight_bytes: float, num_tokens: int) -> None:
        """A unit counts for its weight, which is an estimate: no more, and in the end no less."""
        weight_bytes = min(weight_bytes, self._left_bytes)
        self._left_bytes -= weight_bytes
        self.on_progress(Progress(weight_bytes, num_tokens))


def main(socket_fd: int) -> None:
    """The program: wait for a job, load its engine, fork its workers, outlive them."""
    log_to_stderr()
    for name in _PRELOADED:
        with contextlib.suppress(Exception):  # loading the engine will tell
            importlib.import_module(name)
    control = Connection(socket_fd)
    try:
        job, num_workers = control.recv()
        connections = [Connection(recv_handle(control)) for _ in range(num_workers)]
    except (EOFError, ConnectionError):
        return  # nobody wants any
    control.close()
    try:
        worker = Worker(job)
    except BaseException as error:
        _say_failed(connections, error)
    else:
        _fork(worker, connections)


def _fork(worker: Worker, connections: list[Connection]) -> None:
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


def _serve(worker: Worker, connection: Connection) -> NoReturn:
    units: SimpleQueue[Unit] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, units), daemon=True).start()
    worker.on_progress = connection.send
    try:
        while True:
            connection.send(_answer(worker, units.get()))
    except ConnectionError:
        os._exit(os.EX_OK)


def _receive(connection: Connection, units: SimpleQueue[Unit]) -> None:
    """Take units, and end the process when none can come any more."""
    try:
        while True:
            units.put(connection.recv())
    except (EOFError, OSError):
        os._exit(os.EX_OK)


def _answer(worker: Worker, unit: Unit) -> Done | Failure:
    try:
        return worker.encode(unit)
    except ConnectionError:  # from telling the progress
        raise
    except BaseException as error:  # a panic of a library in Rust is no mere Exception
        return _failure(error)


def _say_failed(connections: list[Connection], error: BaseException) -> None:
    """Answer for workers that cannot be; who asked may have ended, or have the first answer."""
    failure = _failure(error)
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            connection.send(failure)


def _failure(error: BaseException) -> Failure:
    """The error for the parent to raise, as itself if it can be sent."""
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(error, trace)
