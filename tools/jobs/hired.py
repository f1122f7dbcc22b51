"""A crew of a cluster's workers: see `crew` for that of this machine.

They are sent units by an executor, a few more than it can do at once, so that a cluster that grows
has work waiting. What takes long for one of them delays nobody, and what one was at when its
machine was lost is done by another.

The workers' side of a cluster: any process that it starts, on any machine, does units of a job.

A worker begins a job once, with its first unit, and keeps what it has loaded for the next ones.
What it refuses, and what a unit fails of, comes back as an answer: a cluster would only repeat it.
"""

import logging
import os
import pickle
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self

import xxhash

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.pipeline.format.store import Place
from tokenfeed.tools.jobs.crew import (
    ENVIRONMENT,
    Failure,
    OnProgress,
    Progress,
    ResultT,
    UnitT,
    Work,
    Worker,
    WorkerDied,
    failure_of,
)
from tokenfeed.tools.jobs.executors import Cluster
from tokenfeed.tools.jobs.records import versions

__all__ = ["PROBES", "Finished", "Hired", "Job", "do_unit"]

_own = threading.local()
"""What a thread of this process has begun: an encoder is for one thread."""


class Finished(NamedTuple):
    """A unit is done."""

    result: Any
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker of a cluster must know, whichever unit it gets."""

    work: Work[Any, Any]
    output: Place
    """As workers name it, from the root."""
    files: tuple[FileInfo, ...]
    """Lie there: a worker that does not find them sees another folder."""
    versions: tuple[str, ...]
    """Of this process's packages."""

    def check(self) -> None:
        """Refuse what would give other bytes, or put them where nobody looks.

        Raises:
            ConfigError: Names this machine and what is wrong with it.
        """
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


def do_unit(job: bytes, unit: Any) -> Finished | Failure:
    """Do a unit of a pickled job.

    Raises:
        OSError: What another worker may not meet.
    """
    try:
        worker = _begun(job)
        tokens: list[int] = []
        worker.on_progress = lambda progress: tokens.append(progress.num_tokens)
        return Finished(worker.do(unit), sum(tokens))
    except OSError:
        raise
    except BaseException as error:  # a panic of a library in Rust is no mere Exception
        return failure_of(error)


def _begun(job: bytes) -> Worker[Any, Any]:
    """The worker of this thread for a job, which begins with the first unit."""
    if getattr(_own, "job", None) != job:
        os.environ.update(ENVIRONMENT)
        asked: Job = pickle.loads(job)
        asked.check()
        _own.worker = Worker(asked.work.begin)
        _own.job = job
    worker: Worker[Any, Any] = _own.worker
    return worker


logger = logging.getLogger(__name__)

PROBES = ".probe-*"
"""Files by which workers find out whether they see the output folder of the command."""
_WAITING = 2
"""Units that wait for each worker, so that none is idle while a result is looked at."""


class Hired(Generic[UnitT, ResultT]):
    """Workers of a cluster that do units, for as long as the block lasts. The first come first."""

    def __init__(
        self,
        cluster: Cluster,
        work: Work[UnitT, ResultT],
        output: Place,
        files: Sequence[str],
        units: Sequence[UnitT],
        on_progress: OnProgress,
    ) -> None:
        """Send nobody anything yet.

        Args:
            cluster: Who does the units.
            work: What is done to each.
            output: From the root; all workers must share it.
            files: What lies there already, and every worker must see.
            units: What is to be done.
            on_progress: Called while the results are waited for.
        """
        self._cluster, self._output = cluster, output
        self._waiting = iter(units)
        self._on_progress = on_progress
        self._is_waited_for = False
        self._given: dict[Future[Finished | Failure], UnitT] = {}
        self._probe = PROBES.replace("*", os.urandom(8).hex())
        output.write(self._probe, os.urandom(16))
        job = Job(
            work=work,
            output=output,
            files=tuple(map(self._info, (self._probe, *files))),
            versions=tuple(versions()),
        )
        self._job = pickle.dumps(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cluster.executor.shutdown(wait=False)
        self._output.delete(self._probe)

    def hurry(self, unit: UnitT) -> None:
        """Have one more unit done before all others: none of them begins until it is."""
        self._give(unit)

    def __iter__(self) -> Iterator[ResultT]:
        """The results, in the order of their completion.

        Raises:
            WorkerDied: The cluster has given up a unit.
            Exception: Whatever a worker raised.
        """
        if not self._given:
            self._give_all()
        while self._given:
            done, _ = wait(self._given, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: future.exception() is not None):
                yield self._result(future, self._given.pop(future))
                self._give_all()

    def _give_all(self) -> None:
        num_workers = self._cluster.num_workers()
        if not num_workers and not self._is_waited_for:
            self._is_waited_for = True
            logger.info("the cluster has no workers: waiting for some")
        room = (1 + _WAITING) * max(num_workers, 1) - len(self._given)
        for _, unit in zip(range(room), self._waiting, strict=False):
            self._give(unit)

    def _give(self, unit: UnitT) -> None:
        self._given[self._cluster.executor.submit(do_unit, self._job, unit)] = unit

    def _result(self, future: "Future[Finished | Failure]", unit: UnitT) -> ResultT:
        try:
            answer = future.result()
        except OSError:
            raise
        except Exception as error:
            raise WorkerDied(_given_up(unit, error)) from error
        if isinstance(answer, Failure):
            answer.error.add_note(answer.traceback)
            raise answer.error
        self._on_progress(Progress(unit.weight_bytes, answer.num_tokens))
        result: ResultT = answer.result
        return result

    def _info(self, name: str) -> FileInfo:
        content = self._output.read(name)
        return FileInfo(file=name, bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))


def _given_up(unit: Any, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    number = getattr(unit, "number", None)
    what = "its first question" if number is None else str(unit)
    return f"the cluster has given up {what} ({type(error).__name__}: {reason})"
