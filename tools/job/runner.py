"""Run units in processes of their own, show how far they are, and end cleanly whatever happens.

Processes come from a fork server that has imported everything and used nothing, since a
tokenizer's threads do not survive a fork. They take units from one queue, the big ones first, so
that no slow one is left for the end. Ctrl-C is the parent's to handle; a worker whose parent is
gone ends by itself: a killed run leaves nobody writing. Workers begin under the fast engine at
once, while this process audits it; where it is found wrong, at the start or in a sample later, all
units are encoded again by the reference.
"""

import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker

from tokenfeed.pipeline.errors import TokenfeedError, TokenizerError
from tokenfeed.tools.corpus.sources import Source
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.audit import Audit
from tokenfeed.tools.encoding.engine import EngineFailure, ReferenceEngine
from tokenfeed.tools.encoding.ledger import UnitResult, too_many_rejects
from tokenfeed.tools.encoding.unit import Job, UnitEncoder
from tokenfeed.tools.job.journal import Journal
from tokenfeed.tools.job.progress import Bar, Counters
from tokenfeed.tools.signals import signals_held

__all__ = ["Run", "run_units", "start_server"]

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_PRELOADED = [
    *("tokenfeed.tools.options", "tokenfeed.tools.job.runner"),
    *("gigatoken", "awkward"),
]
"""What the fork server imports, while this process still looks for the input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is to be done, by how many, and who is to be believed."""

    job: Job
    units: tuple[Unit, ...]
    sources: tuple[Source, ...]
    workers: int
    audit: Audit | None
    """Compares the engines; None where only the reference was asked for."""
    falls_back: bool
    """Whether the reference takes over from an engine that was found wrong."""


_Pending = Future[tuple[UnitResult, list[bytes]]]


class _Unavailable(Exception):
    """There is no fast engine for this tokenizer."""


class _Distrusted(Exception):
    """The fast engine is wrong."""


def start_server() -> None:
    """Start the fork server; it and the workers inherit that SIGINT is blocked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # it would unblock SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_units(run: Run, journal: Journal) -> Job:
    """Encode the units that the journal does not have yet, and enter each as it is done.

    Returns:
        The job as it was in the end: by which engine.

    Raises:
        TokenizerError: The fast engine was asked for by name, and cannot do it.
        TokenfeedError: A worker process was killed.
        CorpusError: There are more rejects than allowed.
        KeyboardInterrupt: With a line that says what is kept.
    """
    try:
        job = _trusting(run, journal)
        if job is None:
            job = replace(run.job, engine=ReferenceEngine.name)
            _run(run, job, journal)
        return job
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(run.units, journal)) from None
    except BrokenProcessPool:
        raise TokenfeedError(
            "a worker process was killed, perhaps for want of memory (then use fewer `--workers`); "
            + _kept(run.units, journal)
        ) from None


def _trusting(run: Run, journal: Journal) -> Job | None:
    """Run by the engine that was chosen; None where that must not be, or comes to nothing."""
    if run.job.engine == ReferenceEngine.name or journal.distrusted:
        return None
    try:
        _run(run, run.job, journal)
        return run.job
    except _Unavailable as reason:
        if not run.falls_back:
            raise TokenizerError(f"`--engine {run.job.engine}`: {reason}. Leave it out.") from None
        logger.info("the slow engine will do the work: %s", reason)
    except (_Distrusted, EngineFailure) as reason:
        if not run.falls_back:
            raise TokenizerError(f"{reason}. Leave out `--engine`.") from None
        logger.warning("%s: `tokenizers` encodes everything, which takes longer", reason)
        journal.distrust(str(reason))
    return None


def _run(run: Run, job: Job, journal: Journal) -> None:
    """Encode what is missing; ends early where the fast engine, if that is it, proves wrong."""
    _check(run, job, journal, list(journal.results.values()))
    missing = [unit for unit in run.units if unit.number not in journal.results]
    missing.sort(key=lambda unit: (-unit.weight_bytes, unit.number))
    if not missing:
        _begin_audit(run, job)
        return
    counters = Counters()
    bar = Bar(missing, counters)
    with _pool(job, min(run.workers, len(missing)), counters) as pool, bar:
        waiting = _submit(pool, missing)
        is_audited = _begin_audit(run, job)
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, _POLL_S, concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                result, sample = future.result()
                result = _audited(run, result, sample) if is_audited else result
                journal.append(result)
                _check(run, job, journal, [result])
            bar.show(units_done=len(missing) - len(waiting))


def _submit(pool: ProcessPoolExecutor, units: list[Unit]) -> set[_Pending]:
    """Queue the units. A process whose start is interrupted would be known to nobody: wait."""
    with signals_held():
        return {pool.submit(_encode_unit, unit) for unit in units}


def _begin_audit(run: Run, job: Job) -> bool:
    """Compare the engines while the workers start; False where there is only the reference.

    A run that has lost its trust goes on comparing, so that its figures depend on the input alone.
    """
    if run.audit is None:
        return False
    try:
        run.audit.begin()
    except EngineFailure as failure:
        if job.engine == ReferenceEngine.name:
            return False
        raise _Unavailable(failure) from None
    if job.engine != ReferenceEngine.name:
        _believe(run.audit.differing)
    return True


def _audited(run: Run, result: UnitResult, sample: list[bytes]) -> UnitResult:
    """The result of a unit with what a comparison of its sample has shown."""
    assert run.audit is not None
    differing = [text.decode() for text in run.audit.compare(sample)]
    return replace(
        result,
        audited=result.audited + len(sample),
        differing=[*result.differing, *differing],
    )


def _check(run: Run, job: Job, journal: Journal, results: list[UnitResult]) -> None:
    """Look at what has just been finished: are ids to be believed, and rejects few enough?"""
    if job.engine != ReferenceEngine.name:
        for result in results:
            _believe([text.encode() for text in result.differing])
    if job.max_rejects is None:
        return
    rejects = [reject for result in journal.results.values() for reject in result.rejects]
    if len(rejects) > job.max_rejects:
        source, record, reason = sorted(rejects)[job.max_rejects]
        raise too_many_rejects(run.sources[source].name, record, reason, job.max_rejects)


def _believe(differing: list[bytes]) -> None:
    if differing:
        shown = differing[0].decode()[:60]
        raise _Distrusted(
            f"the fast engine gives other ids than the reference, {len(differing)} times, first "
            f"for {shown!r}"
        )


def _kept(units: tuple[Unit, ...], journal: Journal) -> str:
    return (
        f"{len(journal.results):,} of {len(units):,} units are finished and kept; the same command "
        "continues with the others."
    )


@contextlib.contextmanager
def _pool(job: Job, workers: int, counters: Counters) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes are gone when the block ends, at once if it ends in an error."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (job, counters))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        raise
    pool.shutdown()


class _Worker:
    """What a worker process keeps from unit to unit."""

    def __init__(self, job: Job, counters: Counters) -> None:
        self._counters = counters
        self._left_bytes = 0.0
        self._encoder = UnitEncoder(job, self._count)

    def encode(self, unit: Unit) -> tuple[UnitResult, list[bytes]]:
        self._left_bytes = unit.weight_bytes
        done = self._encoder.encode(unit)
        self._count(self._left_bytes, 0)
        return done

    def _count(self, weight_bytes: float, num_tokens: int) -> None:
        """A unit counts for its weight, which is an estimate: no more, and in the end no less."""
        weight_bytes = min(weight_bytes, self._left_bytes)
        self._left_bytes -= weight_bytes
        self._counters.add(weight_bytes, num_tokens)


_start: tuple[Job, Counters]
_worker: _Worker | None = None
"""This process's worker: a pool can hand its processes nothing but arguments and globals."""


def _start_worker(job: Job, counters: Counters) -> None:
    global _start
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is the parent's to handle
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _start = job, counters


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _encode_unit(unit: Unit) -> tuple[UnitResult, list[bytes]]:
    """Runs in a worker. It sets itself up here, where an error reaches the parent as itself."""
    global _worker
    _worker = _worker or _Worker(*_start)
    return _worker.encode(unit)
