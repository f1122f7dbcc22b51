"""Executors for the units of a run: processes of this machine, Dask, or Ray.

Each is a `concurrent.futures.Executor`. The address of a cluster comes from Dask's and Ray's own
settings: `DASK_SCHEDULER_ADDRESS` or the configuration of Dask, and `RAY_ADDRESS` or the Ray that
runs on this machine. Without an address, Dask and Ray start a cluster on this machine.
"""

import contextlib
import importlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.processes import Channel, Child, Ended, Failure, undisturbed
from tokenfeed.tools.shell.console import log_to_stderr

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
IN_CHILDREN = {"chat"}
"""Tasks whose records may end the process that encodes them, so that it is always a child."""
SMALL_BYTES = 2_000_000
"""Largest input that this process finishes before workers would start."""

MODULES = ("tokenfeed.tools.encoding.unit",)
"""Modules that the workers of `pretokenize` import."""
ENGINE_MODULES = ("awkward", "gigatoken")
"""Modules of the fast engine, which need a third of the time of all imports."""


class LocalExecutor(Executor):
    """Processes of this machine: copies of a child that has loaded the data of all tasks.

    The child starts at once, so its imports run beside the imports of this process. The copies
    share the memory of what it has loaded.
    """

    def __init__(self, *, has_texts: bool = True) -> None:
        """Start the child. It imports the installed ones of `MODULES` and, if there will be texts
        to encode, of `ENGINE_MODULES`, and waits."""
        self.child = undisturbed(lambda: Child("pretokenize"))
        self.child.prepare(partial(_import, MODULES + ENGINE_MODULES * has_texts))
        self._workers: Sequence[Channel] = ()
        self._threads: ThreadPoolExecutor | None = None
        """A thread for each worker, which waits for the result of a task."""
        self._idle: SimpleQueue[Channel] = SimpleQueue()
        self.on_progress: Callable[[Any], None] = lambda progress: None
        """Called on other threads with what a task reports."""

    def prepare(self, load: Callable[[], object]) -> None:
        """Call a function in the child before there are workers, without waiting. If it raises,
        each task ends with its exception."""
        self.child.prepare(load)

    def start(self, num_workers: int) -> None:
        """Start the workers.

        Raises:
            Ended: The child has ended.
        """
        self._threads = ThreadPoolExecutor(num_workers)
        self._workers = undisturbed(lambda: self.child.copies(num_workers))
        for worker in self._workers:
            self._idle.put(worker)

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **named: Any) -> "Future[ResultT]":
        """See `Executor`. The workers take tasks in the order of their submission."""
        assert self._threads, "the workers are not started"
        return self._threads.submit(self._do, partial(fn, *args, **named))

    def _do(self, task: Callable[[], Any]) -> Any:
        """Let a worker do a task, and return its result.

        Raises:
            Ended: The worker has ended, or a worker of an earlier task.
            BaseException: The error of the task, or the error that kept the workers from starting.
        """
        try:
            worker = self._idle.get_nowait()
        except Empty:
            raise Ended from None
        worker.call(task)
        answer = worker.answer(self.on_progress)
        self._idle.put(worker)
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the child and all workers at once. They have ended when this returns."""
        ending = self._workers or [self.child]
        for each in ending:
            each.kill()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        self.child.wait()
        for each in {self.child, *ending}:
            each.close()


def _import(modules: tuple[str, ...]) -> None:
    log_to_stderr()
    for name in modules:
        with contextlib.suppress(Exception):  # the first task meets it again
            importlib.import_module(name)


_early: list[LocalExecutor] = []
"""The executor that `start_early` started, until `local_executor` returns it."""


def start_early(*, has_texts: bool = True) -> None:
    """Start a `LocalExecutor` for the first call of `local_executor`."""
    _early.append(LocalExecutor(has_texts=has_texts))


def prepare_early(load: Callable[[], None]) -> None:
    """Call `LocalExecutor.prepare` of the executor that was started early, if there is one."""
    for executor in _early:
        executor.prepare(load)


def local_executor() -> LocalExecutor:
    """Return the executor that was started early; in later calls, a new executor."""
    return _early.pop() if _early else LocalExecutor()


def end_early() -> None:
    """End the executor that was started early, if it is unused."""
    while _early:
        _early.pop().shutdown()


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
