"""The crew of a run: the workers of an executor, and the work of each worker.

A worker loads data once for all its units. Processes of this machine load before the fork. Workers
of a cluster load with their first unit. They first check that they have the same packages and the
same output folder.
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
from typing import Any, NamedTuple, Protocol

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, FileInfo, file_info
from tokenfeed.pipeline.format.store import Place
from tokenfeed.pipeline.processes import ENVIRONMENT, Ended, Failure, report, sendable
from tokenfeed.tools.jobs import executors
from tokenfeed.tools.jobs.executors import CLUSTERS, Cluster, Runner
from tokenfeed.tools.jobs.run_records import versions

logger = logging.getLogger(__name__)

PROBES = ".probe-*"
"""Names of files in the output folder. A worker on another machine looks for them, to prove that it
sees the same folder."""
_WAITING = 2
"""Units in the queue of each worker, so that no worker is idle while a result is checked."""
_REPORT_SECONDS = 0.1
"""Seconds between two reports of progress."""


class Weighed(Protocol):
    """A unit of work with its weight."""

    @property
    def weight_bytes(self) -> float:
        """The share of the work, for the progress bar."""
        ...


class Work(Protocol):
    """The work on all units."""

    def begin(self, on_progress: Callable[[float, int, str], None], /) -> Callable[[Any], Any]:
        """Load the data for all units, and return the function that does a unit.

        Each worker calls it once, or the program that is then forked. `on_progress` is called with
        the weight, the tokens and the last record of each finished part of a unit.
        """
        ...


class Done(NamedTuple):
    """A finished part of a unit."""

    weight_bytes: float
    num_tokens: int
    at: str = ""
    """The last record of the part."""


class WorkerDied(TokenfeedError):
    """A worker ended before it finished its unit."""


class _Finished(NamedTuple):
    result: Any
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work, and the facts that a worker checks before its first unit."""

    work: Work
    output: Place | None = None
    """The output, with an absolute path, for workers of a cluster. None for workers of this
    machine."""
    files: tuple[FileInfo, ...] = ()
    """Files in the output. A worker that does not find them has another folder."""
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
"""The job of a thread, its function and its tokens. An encoder works in one thread only."""


def _begin(job: bytes) -> None:
    """Load the data of a pickled job in this thread, unless it is loaded."""
    if getattr(_own, "job", None) != job:
        os.environ.update(ENVIRONMENT)
        asked: Job = pickle.loads(job)
        asked.check()
        _own.do = asked.work.begin(_count)
        _own.job = job


def _count(weight_bytes: float, num_tokens: int, at: str = "") -> None:
    _own.tokens += num_tokens
    report(Done(weight_bytes, num_tokens, at))


def _do_unit(job: bytes, unit: Any) -> _Finished | Failure:
    """Do a unit. Return an error as the result, because a cluster repeats units that raise.

    Raises:
        OSError: Another worker may succeed.
    """
    _own.tokens = 0
    try:
        _begin(job)
        return _Finished(_own.do(unit), _own.tokens)
    except OSError:
        raise
    except BaseException as error:  # a panic of a library in Rust is not an Exception
        return Failure(sendable(error))


class Crew:
    """The workers of an executor, which do units in order, and the results."""

    def __init__(
        self,
        cluster: Cluster,
        job: bytes,
        units: Sequence[Weighed],
        on_progress: Callable[[Done], None],
    ) -> None:
        self._cluster, self._job, self._on_progress = cluster, job, on_progress
        self._waiting = iter(units)
        self._given: dict[Future[_Finished | Failure], Weighed] = {}
        self._is_waited_for = False
        self.reports: SimpleQueue[Done] = SimpleQueue()
        """Reports of progress, from other threads."""

    def start(self, first: Weighed | None = None) -> None:
        """Start the workers of this machine, before the first result is needed.

        Args:
            first: A unit that is done before all others. A cluster gets the other units after its
                result, because submitted units cannot be withdrawn.
        """
        if first is not None:
            self._give(first)
        if self._cluster.is_local:
            self._give_all()

    def __iter__(self) -> Iterator[Any]:
        """Yield the results, in the order of their completion.

        Raises:
            WorkerDied: A worker ended, or the cluster failed to do a unit.
            Exception: The error of a worker.
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

    def _give(self, unit: Weighed) -> None:
        self._given[self._cluster.executor.submit(_do_unit, self._job, unit)] = unit

    def _result(self, future: "Future[_Finished | Failure]", unit: Weighed) -> Any:
        try:
            answer = future.result()
        except Ended as lost:
            at = getattr(lost.progress, "at", "")
            raise _killed(f", at {unit}" + (f", after {at}" if at else "")) from None
        except OSError:
            raise
        except Exception as error:
            if self._cluster.is_local:  # of the beginning, before any unit
                raise
            raise WorkerDied(_given_up(unit, error)) from error
        if isinstance(answer, Failure):
            raise answer.error
        if not self._cluster.is_local:
            self._on_progress(Done(unit.weight_bytes, answer.num_tokens))
        return answer.result


@contextlib.contextmanager
def local_crew(
    work: Work,
    units: Sequence[Weighed],
    num_workers: int,
    on_progress: Callable[[Done], None],
) -> Iterator[Crew]:
    """Start processes of this machine for `units`. They end with the block.

    Raises:
        WorkerDied: The processes could not be started.
    """
    executor = executors.local_executor()
    try:
        job = pickle.dumps(Job(work=work))
        executor.prepare(partial(_begin, job))
        try:
            executor.start(num_workers)
        except Ended:
            raise _killed() from None
        cluster = Cluster(executor, lambda: num_workers, is_local=True)
        crew = Crew(cluster, job, units, on_progress)
        executor.on_progress = crew.reports.put
        yield crew
    finally:
        executor.shutdown()


@contextlib.contextmanager
def cluster_crew(
    runner: Runner,
    work: Work,
    output: Place,
    units: Sequence[Weighed],
    on_progress: Callable[[Done], None],
) -> Iterator[Crew]:
    """Let the workers of a cluster do `units`.

    Args:
        runner: The kind of cluster.
        work: The work on each unit.
        output: Absolute path. All workers must share the folder, which has the tokenizer.
        units: The units.
        on_progress: Called while this process waits for results.
    """
    probe = PROBES.replace("*", os.urandom(8).hex())
    with CLUSTERS[runner]() as cluster:
        output.write(probe, os.urandom(16))
        try:
            files = tuple(file_info(name, output.read(name)) for name in (probe, TOKENIZER_FILE))
            job = Job(work=work, output=output, files=files, versions=tuple(versions()))
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
