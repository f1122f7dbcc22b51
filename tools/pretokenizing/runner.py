"""Run units, by this process or by a crew, and end cleanly whatever happens.

What is small this process encodes itself, by the reference: its texts would be too few to earn back
the start of workers and of a second engine. Else a crew takes them from one queue, the big ones
first, so that no slow one is left for the end. The crew begins under the fast engine at once, and
this process audits it by what the crew answers; where it is found wrong, at the start or in a
sample later, all units are encoded again by the reference.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tokenfeed.pipeline.errors import TokenizerError
from tokenfeed.tools.corpus.parts import InputFile
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.audit import Answers, Audit, Questions
from tokenfeed.tools.encoding.counts import UnitResult, too_many_rejects
from tokenfeed.tools.encoding.engine import (
    EngineFailure,
    EngineUnavailable,
    FastEngine,
    ReferenceEngine,
)
from tokenfeed.tools.encoding.preloaded import ENVIRONMENT, MODULES
from tokenfeed.tools.encoding.tokenizer import TextTokenizer
from tokenfeed.tools.encoding.unit import Encoded, EncodeSettings
from tokenfeed.tools.run.crew import SMALL_BYTES, Crew, Server
from tokenfeed.tools.run.interruption import saying_what_is_kept
from tokenfeed.tools.run.journal import Journal
from tokenfeed.tools.run.progress import Bar
from tokenfeed.tools.run.worker import Worker

__all__ = ["EngineRefused", "Run", "is_small", "run_units"]

logger = logging.getLogger(__name__)

_Work = Unit | Questions
_Result = Encoded | Answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is to be done, by how many, and who is to be believed."""

    job: EncodeSettings
    tokenizer: TextTokenizer
    units: tuple[Unit, ...]
    sources: tuple[InputFile, ...]
    workers: int
    audit: Audit
    """Compares the engines, for a job that audits."""
    falls_back: bool
    """Whether the reference takes over from an engine that was found wrong."""
    server: Server | None = None
    """What the crew is forked from, if that was begun already."""


class EngineRefused(TokenizerError):
    """The engine asked for by name is wrong or cannot be had: nothing it made is of use."""


class _Distrusted(Exception):
    """The fast engine is wrong."""


def is_small(units: Iterable[Unit]) -> bool:
    """Whether units are so few that this process had better encode them itself."""
    return sum(unit.weight_bytes for unit in units) <= SMALL_BYTES


def run_units(run: Run, journal: Journal[UnitResult]) -> EncodeSettings:
    """Encode the units that the journal does not have yet, and enter each as it is done.

    Returns:
        The job as it was in the end: by which engine.

    Raises:
        EngineRefused: The fast engine was asked for by name, and cannot do it.
        TokenfeedError: A worker process was killed.
        CorpusError: There are more rejects than allowed.
        KeyboardInterrupt: With a line that says what is kept.
    """
    with saying_what_is_kept(len(run.units), journal):
        job = _trusting(run, journal)
        if job is None:
            audits = journal.distrusted  # so that the run's figures depend on the input alone
            job = replace(run.job, engine=ReferenceEngine.name, audits=audits)
            _run(run, job, journal)
        return job


def _trusting(run: Run, journal: Journal[UnitResult]) -> EncodeSettings | None:
    """Run by the engine that was chosen; None where that must not be, or comes to nothing."""
    if run.job.engine == ReferenceEngine.name or journal.distrusted:
        return None
    try:
        _run(run, run.job, journal)
        return run.job
    except EngineUnavailable as reason:
        if not run.falls_back:
            raise EngineRefused(f"`--engine {run.job.engine}`: {reason}. Leave it out.") from None
        logger.info("the slow engine will do the work: %s", reason)
    except (_Distrusted, EngineFailure) as reason:
        if not run.falls_back:
            raise EngineRefused(f"{reason}. Leave out `--engine`.") from None
        logger.warning("%s: `tokenizers` encodes everything, which takes longer", reason)
        journal.reject(str(reason))
    return None


def _run(run: Run, job: EncodeSettings, journal: Journal[UnitResult]) -> None:
    """Encode what is missing; ends early where the fast engine, if that is it, proves wrong."""
    done = {n: result for n, result in journal.results.items() if result.engine == job.engine}
    if len(done) < len(journal.results) and job.engine != ReferenceEngine.name:
        FastEngine.check(run.tokenizer)  # before it may write over what the reference has made
    _check(run, job, journal, list(done.values()))
    missing = [unit for unit in run.units if unit.number not in done]
    missing.sort(key=lambda unit: (-unit.weight_bytes, unit.number))
    with Bar(missing) as bar, _crew(run, job, [*missing], bar) as crew:
        if job.engine != ReferenceEngine.name:
            FastEngine.check(run.tokenizer)
        if job.audits:
            questions = run.audit.questions()
            crew.hurry(questions)
            run.audit.expect(questions)
        for message in crew:
            if isinstance(message, Answers):
                run.audit.begin(message)
                _check(run, job, journal, [])
                continue
            result = _audited(run, message)
            journal.append(result)
            _check(run, job, journal, [result])
            bar.count_unit()


class _Alone:
    """A crew of this process only."""

    def __init__(self, worker: Worker[_Work, _Result], units: list[_Work]) -> None:
        self._worker, self._units = worker, deque(units)

    def hurry(self, unit: _Work) -> None:
        """See `Crew.hurry`."""
        self._units.appendleft(unit)

    def __iter__(self) -> Iterator[_Result]:
        yield from map(self._worker.do, self._units)


@contextlib.contextmanager
def _crew(
    run: Run, job: EncodeSettings, units: list[_Work], bar: Bar
) -> Iterator[Crew[_Work, _Result] | _Alone]:
    """Whoever encodes `units`; of processes none is left when the block ends."""
    if is_small(run.units) or not units:
        is_reference = job.engine == ReferenceEngine.name
        engine = (ReferenceEngine if is_reference else FastEngine.from_tokenizer)(run.tokenizer)
        worker = Worker(partial(job.begin, engine=engine))
        worker.on_progress = bar.advance
        yield _Alone(worker, units)
        return
    server = run.server if run.server and not run.server.is_used else Server(MODULES, ENVIRONMENT)
    with Crew(server, job, units, min(run.workers, len(units)), bar.advance) as crew:
        yield crew


def _audited(run: Run, done: Encoded) -> UnitResult:
    """The result of a unit with what a comparison of its sample has shown."""
    result, sample = done
    differing = [text.decode() for text in run.audit.compare(sample)]
    return replace(
        result,
        audited=result.audited + len(sample),
        differing=[*result.differing, *differing],
    )


def _check(
    run: Run, job: EncodeSettings, journal: Journal[UnitResult], results: list[UnitResult]
) -> None:
    """Look at what has just been finished: are ids to be believed, and rejects few enough?"""
    if job.engine != ReferenceEngine.name:
        _believe(run.audit.differing)
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
