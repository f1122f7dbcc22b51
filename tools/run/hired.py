"""A crew of a cluster's workers: see `crew` for that of this machine.

They are sent units by an executor, a few more than it can do at once, so that a cluster that grows
has work waiting. What takes long for one of them delays nobody, and what one was at when its
machine was lost is done by another.
"""

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any, Generic, Self

import xxhash

from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.tools.outputs.output import Output
from tokenfeed.tools.run.clusters import Cluster
from tokenfeed.tools.run.crew import (
    Failure,
    OnProgress,
    Progress,
    ResultT,
    UnitT,
    Work,
    WorkerDied,
)
from tokenfeed.tools.run.guest import Finished, Job, do_unit
from tokenfeed.tools.run.versions import versions

__all__ = ["PROBES", "Hired"]

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
        output: Output,
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
