"""Executors for the units of a run: processes of this machine, Dask, or Ray.

Each is a `concurrent.futures.Executor`. The address of a cluster comes from Dask's and Ray's own
settings: `DASK_SCHEDULER_ADDRESS` or the configuration of Dask, and `RAY_ADDRESS` or the Ray that
runs on this machine. Without an address, Dask and Ray start a cluster on this machine.
"""

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.shell.console import log_to_stderr, signals_held

Runner = Literal["local", "ray", "dask"]

_RETRIES = 3
"""How often a cluster repeats a unit after a failure."""
_OWN_DASK = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.ERROR}
"""Options of a Dask cluster that is started on this machine."""


class Cluster(NamedTuple):
    """An executor, with its number of workers."""

    executor: Executor
    num_workers: Callable[[], int]
    """Returns the number of units that can run at once, at this moment."""
    is_local: bool = False
    """Whether the workers are processes of this machine. They have the same files and packages, and
    report progress within units."""


ResultT = TypeVar("ResultT")
SMALL_BYTES = 2_000_000
"""Largest input that this process finishes before workers would start."""

MODULES = ("tokenfeed.tools.encoding.unit",)
"""Modules that the workers of `pretokenize` import."""
ENGINE_MODULES = ("awkward", "gigatoken")
"""Modules of the fast engine, which need a third of the time of all imports."""

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",  # a library in Rust that runs out of memory prints one line
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",  # a worker reuses the memory of its last batch:
    "MALLOC_TRIM_THRESHOLD_": "1073741824",  # to get it zeroed again took a tenth of the time
}
"""Variables of worker processes, which keep libraries from starting threads."""


class WorkerLost(Exception):
    """A worker process ended before it finished its task."""

    def __init__(self, progress: Any = None) -> None:
        super().__init__("a worker process ended")
        self.progress = progress
        """The last report of the task; None without a report."""


class ForkExecutor(Executor):
    """Processes of this machine, forked from a program that has loaded the data of all tasks.

    The program starts at once, so its imports run beside the imports of this process. It loads the
    data that all tasks need and forks then: the workers share that memory. Each worker has a socket
    for tasks, results and progress, and ends when the socket closes, so a killed run leaves no
    process behind. This process handles Ctrl-C and SIGTERM; its workers start with both blocked.
    """

    def __init__(self, *, has_texts: bool = True) -> None:
        """Start the program. It imports the installed ones of `MODULES` and, if there will be texts
        to encode, of `ENGINE_MODULES`, and waits."""
        ours, theirs = socket.socketpair()
        with theirs, signals_held(), _signals_blocked():
            self._program = subprocess.Popen(
                _command(theirs.fileno(), MODULES + ENGINE_MODULES * has_texts),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
            )
        self._control = Connection(ours.detach())
        self._threads: ThreadPoolExecutor | None = None
        """A thread for each worker, which waits for the result of a task."""
        self._connections: list[Connection] = []
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self.on_progress: Callable[[Any], None] = lambda progress: None
        """Called on other threads with the arguments of `report`."""

    @property
    def program_id(self) -> int:
        """The process id of the program, the parent of the workers."""
        return self._program.pid

    def prepare(self, load: Callable[[], None]) -> None:
        """Call a function in the program before the workers are forked, without waiting."""
        with contextlib.suppress(ConnectionError):  # it is gone: forking raises
            self._control.send(load)

    def fork(self, initializer: Callable[[], object], num_workers: int) -> None:
        """Call `initializer` in the program, then fork the workers.

        If the initializer raises, each task ends with its exception.

        Raises:
            WorkerLost: The program ended.
        """
        self._threads = ThreadPoolExecutor(num_workers)
        try:
            self._control.send((initializer, num_workers))
            for _ in range(num_workers):
                ours, theirs = Pipe()
                self._connections.append(ours)
                self._idle.put(ours)
                with theirs:
                    send_handle(self._control, theirs.fileno(), None)
        except ConnectionError:
            raise WorkerLost from None

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **named: Any) -> "Future[ResultT]":
        """See `Executor`. The workers take tasks in the order of their submission."""
        assert self._threads, "the workers are not forked"
        return self._threads.submit(self._do, pickle.dumps(partial(fn, *args, **named)))

    def _do(self, task: bytes) -> Any:
        """Let a worker do a task, and return its result.

        Raises:
            WorkerLost: The worker has ended, or a worker of an earlier task.
            BaseException: The error of the task, or the error that kept the workers from starting.
        """
        progress = None
        try:
            connection = self._idle.get_nowait()
            with contextlib.suppress(ConnectionError):  # it may have sent why it could not start
                connection.send_bytes(task)
            kind, value = connection.recv()
            while kind == "progress":
                progress = value
                self.on_progress(progress)
                kind, value = connection.recv()
        except (Empty, EOFError, OSError):
            raise WorkerLost(progress) from None
        self._idle.put(connection)
        if kind == "error":
            raise value
        return value

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the program and all workers at once. They have ended when this returns."""
        if self._threads is None:
            self._program.kill()
        else:
            for connection in self._connections:
                _disconnect(connection)
            self._threads.shutdown(cancel_futures=True)
        for connection in (self._control, *self._connections):
            connection.close()
        self._program.wait()


class SpawnExecutor(Executor):
    """Processes of a system without `fork`, such as Windows. Each loads the data of all tasks.

    The interface is that of `ForkExecutor`.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._reports: Any = self._context.SimpleQueue()
        self._pool: ProcessPoolExecutor | None = None
        self.on_progress: Callable[[Any], None] = lambda progress: None
        """Called on another thread with the arguments of `report`."""

    def prepare(self, load: Callable[[], None]) -> None:
        """Do nothing: processes start with the first tasks, and load their own data."""

    def fork(self, initializer: Callable[[], object], num_workers: int) -> None:
        """Let each process call `initializer` before its first task."""
        given = self._reports, pickle.dumps(initializer)
        self._pool = ProcessPoolExecutor(num_workers, self._context, _begin_spawned, given)
        threading.Thread(target=self._pass_on, name="progress of workers", daemon=True).start()

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **named: Any) -> "Future[ResultT]":
        """See `Executor`."""
        assert self._pool, "the workers are not started"
        task = pickle.dumps(partial(fn, *args, **named))
        done: Future[ResultT] = Future()
        with _main_hidden():
            try:
                given = self._pool.submit(_answer, task)
            except BrokenProcessPool:
                done.set_exception(WorkerLost())
                return done
        given.add_done_callback(partial(_hand_on, done))
        return done

    def _pass_on(self) -> None:
        while (progress := self._reports.get()) is not None:
            self.on_progress(progress)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes at once. They have ended when this returns."""
        if self._pool is None:
            return
        processes = [*(getattr(self._pool, "_processes", None) or {}).values()]
        for process in processes:
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        self._reports.put(None)


def _hand_on(done: "Future[Any]", given: "Future[tuple[str, Any]]") -> None:
    """Give the answer of a process to the future of a task."""
    error: BaseException | None = None
    try:
        kind, value = given.result()
        error = value if kind == "error" else None
    except CancelledError:
        done.cancel()
        return
    except BaseException as failure:
        is_lost = isinstance(failure, BrokenProcessPool)
        kind, value, error = "error", None, WorkerLost() if is_lost else failure
    if error is None:
        done.set_result(value)
    else:
        done.set_exception(error)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep processes that are spawned in the block from running the script of the user again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_spawned: list[BaseException] = []
"""The error that keeps this spawned process from doing tasks; empty without one."""


def _begin_spawned(reports: Any, initializer: bytes) -> None:
    """Begin a spawned process. It ends with the process that started it."""
    global report
    os.environ.update(ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log_to_stderr()
    report = reports.put
    try:
        pickle.loads(initializer)()
    except BaseException as error:
        _spawned.append(sendable(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


LocalExecutor = ForkExecutor | SpawnExecutor


def _new_executor(*, has_texts: bool = True) -> LocalExecutor:
    return ForkExecutor(has_texts=has_texts) if hasattr(os, "fork") else SpawnExecutor()


_early: list[LocalExecutor] = []
"""The executor that `start_early` started, until `local_executor` returns it."""
_early_loads: list[Callable[[], None]] = []
"""Functions for `ForkExecutor.prepare` of the executor that is started early."""


def start_early(*, has_texts: bool = True) -> None:
    """Start an executor for the first call of `local_executor`. `has_texts`: see `ForkExecutor`."""
    executor = _new_executor(has_texts=has_texts)
    for load in _early_loads:
        executor.prepare(load)
    _early.append(executor)


def prepare_early(load: Callable[[], None]) -> None:
    """Call `ForkExecutor.prepare` of the executor that was or will be started early."""
    _early_loads.append(load)
    for executor in _early:
        executor.prepare(load)


def local_executor() -> LocalExecutor:
    """Return the executor that was started early; in later calls, a new executor."""
    return _early.pop() if _early else _new_executor()


def end_early() -> None:
    """End the executor that was started early, if it is unused."""
    _early_loads.clear()
    while _early:
        _early.pop().shutdown()


report: Callable[[Any], None] = lambda progress: None  # noqa: E731
"""A function for workers of this machine: it passes progress to `on_progress`."""


def _disconnect(connection: Connection) -> None:
    """End a connection for both sides, also for threads that wait for a message."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _command(socket_fd: int, modules: tuple[str, ...]) -> list[str]:
    """Return the command line of a program that finds the same modules as this process."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = f"""
import gc, sys
gc.disable()  # until all is imported
sys.path[:] = {path!r}
try:
    from tokenfeed.tools.jobs.executors import serve
except (ImportError, MemoryError):  # not enough memory: the parent reports that
    sys.exit(1)
serve({socket_fd}, {modules!r})
"""
    return [sys.executable, "-c", code]


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that must not end a program while the program starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(socket_fd: int, modules: tuple[str, ...]) -> None:
    """Run the program: import, load, fork the workers, and wait until all have ended.

    It forks after loading and before the first task: threads, such as a tokenizer's, do not survive
    a fork.
    """
    log_to_stderr()
    for name in modules:
        with contextlib.suppress(Exception):  # the initializer meets it again
            importlib.import_module(name)
    control = Connection(socket_fd)
    try:
        while callable(message := control.recv()):
            message()
        initializer, num_workers = message
        connections = [Connection(recv_handle(control)) for _ in range(num_workers)]
    except (EOFError, ConnectionError):
        return  # the command has ended
    except (ImportError, MemoryError):  # not enough memory: the parent reports that
        sys.exit(1)
    control.close()
    try:
        initializer()
    except BaseException as error:
        _fail(connections, error)
    else:
        _fork(connections)
    os._exit(os.EX_OK)  # the parent waits, and to take the interpreter down takes 30 ms


def _fork(connections: list[Connection]) -> None:
    """Fork a process for each connection; return when all have ended."""
    gc.freeze()  # a collection would copy the memory that they share
    gc.enable()
    while connections:
        connection = connections.pop()
        try:
            is_worker = os.fork() == 0
        except OSError as error:
            _fail([connection], error)
            continue
        if is_worker:
            for others in connections:
                others.close()
            _work(connection)
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _work(connection: Connection) -> NoReturn:
    global report
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    report = lambda progress: connection.send(("progress", progress))  # noqa: E731
    try:
        while True:
            connection.send(_answer(tasks.get()))
    except ConnectionError:
        os._exit(os.EX_OK)


def _receive(connection: Connection, tasks: "SimpleQueue[bytes]") -> None:
    """Do tasks until the socket closes, then end the process."""
    try:
        while True:
            tasks.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(os.EX_OK)


def _answer(task: bytes) -> tuple[str, Any]:
    if _spawned:
        return "error", _spawned[0]
    try:
        return "result", pickle.loads(task)()
    except ConnectionError:  # from reporting progress
        raise
    except BaseException as error:  # a panic of a library in Rust is not an Exception
        return "error", sendable(error)


def _fail(connections: list[Connection], error: BaseException) -> None:
    """Send the reason why workers could not start."""
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            connection.send(("error", sendable(error)))


def sendable(error: BaseException) -> BaseException:
    """Return an error that can be pickled, with the traceback as a note."""
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(trace)
    return error


@contextlib.contextmanager
def _dask() -> Iterator[Cluster]:
    from dask.config import get
    from distributed import Client

    is_named = get("scheduler-address", None) is not None
    with _reaching("dask"):
        client: Any = Client(set_as_default=False, **({} if is_named else _OWN_DASK))
    with client:
        executor = client.get_executor(pure=False, retries=_RETRIES)
        yield Cluster(executor, lambda: sum(client.nthreads().values()))


@contextlib.contextmanager
def _ray() -> Iterator[Cluster]:
    import ray  # pyright: ignore[reportMissingImports]

    is_ours = not ray.is_initialized()
    if is_ours:
        with _reaching("ray"), _handlers_kept():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield Cluster(RayExecutor(), lambda: int(ray.cluster_resources().get("CPU", 0)))
    finally:
        if is_ours:
            ray.shutdown()


class RayExecutor(Executor):
    """Tasks of Ray as futures, with one core each, on all machines of the cluster."""

    def __init__(self) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self._ray = ray
        self._call = ray.remote(
            num_cpus=1,
            max_retries=_RETRIES,
            retry_exceptions=[OSError],
            scheduling_strategy="SPREAD",
        )(_call)
        self._given: set[Any] = set()

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **named: Any) -> "Future[ResultT]":
        """See `Executor`."""
        reference = self._call.remote(fn, args, named)
        future: Future[ResultT] = reference.future()
        self._given.add(reference)
        future.add_done_callback(lambda _: self._given.discard(reference))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel all tasks, as Dask's executor does without `wait`."""
        for reference in list(self._given):
            self._ray.cancel(reference)


CLUSTERS: dict[Runner, Callable[[], AbstractContextManager[Cluster]]] = {
    "dask": _dask,
    "ray": _ray,
}
"""Context managers that open a cluster, by the value of `--runner`."""

_MODULES: dict[Runner, str] = {"dask": "distributed", "ray": "ray"}


def check_installed(runner: Runner) -> None:
    """Check that the package of a runner is installed.

    Raises:
        ConfigError: The package is missing.
    """
    if runner in _MODULES and not find_spec(_MODULES[runner]):
        raise ConfigError(
            f"`--runner {runner}`: {runner} is not installed (pip install 'tokenfeed[{runner}]')."
        )


def _call(function: Callable[..., ResultT], args: Any, named: Any) -> ResultT:
    return function(*args, **named)


@contextlib.contextmanager
def _reaching(runner: Runner) -> Iterator[None]:
    """Convert errors of an unreachable cluster to one line."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"`--runner {runner}`: no cluster could be reached ({reason or type(error).__name__}). "
            "Start it, or say where it is: see docs/how/machines.md."
        ) from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that a library replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
