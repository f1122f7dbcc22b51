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

from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE
from tokenfeed.tools.console import log_to_stderr
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.audit import Answers
from tokenfeed.tools.encoding.engine import Engine, FastEngine
from tokenfeed.tools.encoding.tokenizer import fetch_tokenizer_json
from tokenfeed.tools.encoding.unit import Job, UnitEncoder
from tokenfeed.tools.job.crew import Done, Failure, OnProgress, Preload, Progress

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

    def answer(self, texts: list[bytes]) -> Answers:
        """What the fast engine gives for some texts; see `UnitEncoder.answer`."""
        return self._encoder.answer(texts)

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
    engine: FastEngine | None = None
    try:
        message = control.recv()
        if isinstance(message, Preload):
            engine, message = _preload(message), control.recv()
        job, num_workers = message
        connections = [Connection(recv_handle(control)) for _ in range(num_workers)]
    except (EOFError, ConnectionError):
        return  # nobody wants any
    control.close()
    try:
        worker = Worker(job, engine if engine and _is_of(engine, job) else None)
    except BaseException as error:
        _say_failed(connections, error)
    else:
        _fork(worker, connections)
    os._exit(os.EX_OK)  # the parent waits, and to take the interpreter down takes 30 ms


def _preload(tokenizer: Preload) -> FastEngine | None:
    """The fast engine for a tokenizer; None where that fails: loading it for a job will tell."""
    with contextlib.suppress(Exception):
        return FastEngine(
            fetch_tokenizer_json(tokenizer.name),
            tokenizer.vocabulary_size,
            splits_special=tokenizer.splits_special,
        )
    return None


def _is_of(engine: FastEngine, job: Job) -> bool:
    """Whether an engine loaded in advance is the one that a job has."""
    json_bytes = (job.folder / TOKENIZER_FILE).read_bytes()
    return job.engine == engine.name and json_bytes == engine.json_bytes


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
    work: SimpleQueue[Unit | list[bytes]] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, work), daemon=True).start()
    worker.on_progress = connection.send
    try:
        while True:
            connection.send(_do(worker, work.get()))
    except ConnectionError:
        os._exit(os.EX_OK)


def _receive(connection: Connection, work: SimpleQueue[Unit | list[bytes]]) -> None:
    """Take what is to be done, and end the process when nothing can come any more."""
    try:
        while True:
            work.put(connection.recv())
    except (EOFError, OSError):
        os._exit(os.EX_OK)


def _do(worker: Worker, work: Unit | list[bytes]) -> Done | Answers | Failure:
    try:
        return worker.encode(work) if isinstance(work, Unit) else worker.answer(work)
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
