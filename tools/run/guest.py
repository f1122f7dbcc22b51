"""The workers' side of a cluster: any process that it starts, on any machine, does units of a job.

A worker begins a job once, with its first unit, and keeps what it has loaded for the next ones.
What it refuses, and what a unit fails of, comes back as an answer: a cluster would only repeat it.
"""

import os
import pickle
import socket
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import FileInfo
from tokenfeed.tools.outputs.output import Output
from tokenfeed.tools.run.crew import ENVIRONMENT, Failure, Work
from tokenfeed.tools.run.versions import versions
from tokenfeed.tools.run.worker import Worker, failure_of

__all__ = ["Finished", "Job", "do_unit"]

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
    output: Output
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
