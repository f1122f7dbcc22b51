"""The crew of a run: an executor's workers, which do units, and what each worker does.

A worker begins a job once and keeps what it has loaded for the next units. Processes of this
machine begin it before they are forked; the workers of a cluster begin with their first unit. The
workers of a cluster check first that they have the same packages and see the same output.
"""

import contextlib
import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import xxhash

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.pipeline.format.store import Place
from tokenfeed.tools.jobs import executors
from tokenfeed.tools.jobs.executors import (
    CLUSTERS,
    ENVIRONMENT,
    Cluster,
    Runner,
    WorkerLost,
    sendable,
)
from tokenfeed.tools.jobs.run_records import versions

__all__ = [
    "PROBES",
    "Begin",
    "Crew",
    "OnProgress",
    "Progress",
    "ResultT",
    "UnitT",
    "Weighed",
    "Work",
    "Worker",
    "WorkerDied",
    "cluster_crew",
    "local_crew",
]

logger = logging.getLogger(__name__)

PROBES = ".probe-*"
"""Files by which the workers of a cluster check that they see the output folder."""
_WAITING = 2
"""Units that wait for each worker, so that no worker is idle while a result is looked at."""
_REPORT_SECONDS = 0.1
"""Seconds between two looks at the progress within units."""


class Weighed(Protocol):
    """A unit of work with its weight."""

    @property
    def weight_bytes(self) -> float:
        """Its share of all the work, for the progress bar."""
        ...


UnitT = TypeVar("UnitT", bound=Weighed)
ResultT = TypeVar("ResultT")
_TakenT = TypeVar("_TakenT", bound=Weighed, contravariant=True)
_GivenT = TypeVar("_GivenT", covariant=True)

Begin = Callable[[Callable[[float, int, str], None]], Callable[[UnitT], ResultT]]
"""Loads what work on units needs, and returns the function that does a unit. Its argument is called
with the weight and tokens of each part of a unit that is done, and the last record of the part."""


class Work(Protocol[_TakenT, _GivenT]):
    """The work on all units."""

    @property
    def begin(self) -> Begin[_TakenT, _GivenT]:
        """Called once by each worker, or once before the workers are forked."""
        ...


class Progress(NamedTuple):
    """A finished part of a unit."""

    weight_bytes: float
    num_tokens: int
    at: str = ""
    """The last record of the part."""


OnProgress = Callable[[Progress], None]


class WorkerDied(TokenfeedError):
    """A worker ended before it finished its unit."""


class Worker(Generic[UnitT, ResultT]):
    """Does units, and reports its progress."""

    def __init__(self, begin: Begin[UnitT, ResultT]) -> None:
        """Load what the units need: call `begin` once."""
        self.on_progress: OnProgress = lambda progress: None
        self._left_bytes = 0.0
        self._do = begin(self._count)

    def do(self, unit: UnitT) -> ResultT:
        """Return the result of a unit."""
        self._left_bytes = unit.weight_bytes
        result = self._do(unit)
        self._count(self._left_bytes, 0)
        return result

    def _count(self, weight_bytes: float, num_tokens: int, at: str = "") -> None:
        """Report progress. The weight of a unit is an estimate, so its parts count for no more
        together, and the rest is added at the end."""
        weight_bytes = min(weight_bytes, self._left_bytes)
        self._left_bytes -= weight_bytes
        self.on_progress(Progress(weight_bytes, num_tokens, at))


class _Finished(NamedTuple):
    result: Any
    num_tokens: int


class _Failure(NamedTuple):
    error: BaseException


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work, and what a worker checks before its first unit."""

    work: Work[Any, Any]
    output: Place | None = None
    """The output, with an absolute path, for workers of a cluster. None for workers of this
    machine."""
    files: tuple[FileInfo, ...] = ()
    """Files in the output, which a worker must find. Otherwise it sees another folder."""
    versions: tuple[str, ...] = ()
    """Names and versions of packages in this process."""

    def check(self) -> None:
        """Reject a worker that would write other bytes, or write to another folder.

        Raises:
            ConfigError: The worker has other packages or another output.
        """
        if self.output is None:
            return
        host = socket.gethostname()
        here = versions()
        if other := [there for there in self.versions if there not in here]:
            own = [each for each in here if each not in self.versions]
            raise ConfigError(
                f"a worker on {host} has {', '.join(own)}, where this command has "
                f"{', '.join(other)}. Install the same there."
            )
        for info in self.files:
            if not self.output.has(info):
                raise ConfigError(
                    f"{self.output}: a worker on {host} does not find {info.file} there as this "
                    "command wrote it. Give an output folder that all machines share."
                )


_own = threading.local()
"""The job that a thread of this process has begun. An encoder is for one thread."""


def _begin(job: bytes) -> Worker[Any, Any]:
    """Return this thread's worker for a pickled job; the first call begins it."""
    if getattr(_own, "job", None) != job:
        os.environ.update(ENVIRONMENT)
        asked: Job = pickle.loads(job)
        asked.check()
        _own.worker = Worker(asked.work.begin)
        _own.job = job
    worker: Worker[Any, Any] = _own.worker
    return worker


def _begin_in_program(job: bytes) -> None:
    _begin(job)


def _do_unit(job: bytes, unit: Any) -> _Finished | _Failure:
    """Do a unit. An error comes back as an answer: a cluster would only repeat the unit.

    Raises:
        OSError: Another worker may not meet the same.
    """
    tokens: list[int] = []

    def count(progress: Progress) -> None:
        tokens.append(progress.num_tokens)
        executors.report(progress)

    try:
        worker = _begin(job)
        worker.on_progress = count
        return _Finished(worker.do(unit), sum(tokens))
    except OSError:
        raise
    except BaseException as error:  # a panic of a library in Rust is not an Exception
        return _Failure(sendable(error))


class Crew(Generic[UnitT, ResultT]):
    """Has an executor's workers do units, and yields the results. The first units come first."""

    def __init__(
        self, cluster: Cluster, job: bytes, units: Sequence[UnitT], on_progress: OnProgress
    ) -> None:
        self._cluster, self._job, self._on_progress = cluster, job, on_progress
        self._waiting = iter(units)
        self._given: dict[Future[_Finished | _Failure], UnitT] = {}
        self._is_waited_for = False
        self.reports: SimpleQueue[Progress] = SimpleQueue()
        """Progress within units, from other threads."""

    def start(self, first: UnitT | None = None) -> None:
        """Start the workers of this machine, before the results are asked for.

        Args:
            first: One more unit, which is done before all others. The workers of a cluster begin
                the others only after its result: what they have begun cannot be called back.
        """
        if first is not None:
            self._give(first)
        if self._cluster.is_local:
            self._give_all()

    def __iter__(self) -> Iterator[ResultT]:
        """Yield the results, in the order of their completion.

        Raises:
            WorkerDied: A worker is gone, or the cluster has given up a unit.
            Exception: What a worker raised.
        """
        if not self._given:
            self._give_all()
        while self._given:
            timeout = _REPORT_SECONDS if self._cluster.is_local else None
            done, _ = wait(self._given, timeout, FIRST_COMPLETED)
            while not self.reports.empty():
                self._on_progress(self.reports.get())
            in_order = [future for future in self._given if future in done]
            for future in sorted(in_order, key=lambda future: future.exception() is not None):
                unit = self._given.pop(future)
                self._give_all()  # workers are to be busy while the caller looks at the result
                yield self._result(future, unit)

    def _give_all(self) -> None:
        num_workers = self._cluster.num_workers()
        if not num_workers and not self._is_waited_for:
            self._is_waited_for = True
            logger.info("the cluster has no workers: waiting for some")
        room = (1 + _WAITING) * max(num_workers, 1) - len(self._given)
        for _, unit in zip(range(room), self._waiting, strict=False):
            self._give(unit)

    def _give(self, unit: UnitT) -> None:
        self._given[self._cluster.executor.submit(_do_unit, self._job, unit)] = unit

    def _result(self, future: "Future[_Finished | _Failure]", unit: UnitT) -> ResultT:
        try:
            answer = future.result()
        except WorkerLost as lost:
            at = getattr(lost.progress, "at", "")
            raise _killed(f", at {unit}" + (f", after {at}" if at else "")) from None
        except OSError:
            raise
        except Exception as error:
            if self._cluster.is_local:  # of the beginning, before any unit
                raise
            raise WorkerDied(_given_up(unit, error)) from error
        if isinstance(answer, _Failure):
            raise answer.error
        if not self._cluster.is_local:
            self._on_progress(Progress(unit.weight_bytes, answer.num_tokens))
        result: ResultT = answer.result
        return result


@contextlib.contextmanager
def local_crew(
    work: Work[UnitT, ResultT], units: Sequence[UnitT], num_workers: int, on_progress: OnProgress
) -> Iterator[Crew[UnitT, ResultT]]:
    """Start processes of this machine for `units`; when the block ends, none is left.

    Raises:
        WorkerDied: The processes could not be started.
    """
    executor = executors.local_executor()
    try:
        job = pickle.dumps(Job(work=work))
        try:
            executor.fork(partial(_begin_in_program, job), num_workers)
        except WorkerLost:
            raise _killed() from None
        cluster = Cluster(executor, lambda: num_workers, is_local=True)
        crew: Crew[UnitT, ResultT] = Crew(cluster, job, units, on_progress)
        executor.on_progress = crew.reports.put
        yield crew
    finally:
        executor.shutdown()


@contextlib.contextmanager
def cluster_crew(
    runner: Runner,
    work: Work[UnitT, ResultT],
    output: Place,
    files: Sequence[str],
    units: Sequence[UnitT],
    on_progress: OnProgress,
) -> Iterator[Crew[UnitT, ResultT]]:
    """Have the workers of a cluster do `units`.

    Args:
        runner: The kind of cluster.
        work: What is done to each unit.
        output: From the root; all workers must share it.
        files: Files that lie there already, and that every worker must see.
        units: What is to be done.
        on_progress: Called while the results are waited for.
    """
    probe = PROBES.replace("*", os.urandom(8).hex())

    def info(name: str) -> FileInfo:
        content = output.read(name)
        return FileInfo(file=name, bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))

    with CLUSTERS[runner]() as cluster:
        output.write(probe, os.urandom(16))
        try:
            files_there = tuple(map(info, (probe, *files)))
            job = Job(work=work, output=output, files=files_there, versions=tuple(versions()))
            yield Crew(cluster, pickle.dumps(job), units, on_progress)
        finally:
            cluster.executor.shutdown(wait=False)
            output.delete(probe)


def _killed(where: str = "") -> WorkerDied:
    return WorkerDied(
        "a worker process was killed, perhaps because memory ran out (then use fewer `--workers`)"
        f"{where}"
    )


def _given_up(unit: Any, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    number = getattr(unit, "number", None)
    what = "its first question" if number is None else str(unit)
    return f"the cluster has given up {what} ({type(error).__name__}: {reason})"
