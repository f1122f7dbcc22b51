"""Encode the units of a run, by this process or by a crew, and end cleanly after any error.

This process encodes a small input itself, by the reference, because workers and a second engine
would take longer to start. For other inputs, a crew takes the units from one queue, large units
first, so that no slow unit is left at the end. Workers start with the fast engine, and this process
compares their ids with the reference. If the engine is rejected, at the start or by a later sample,
the reference encodes all units again. The workers of a cluster begin after the first comparison,
because submitted units cannot be withdrawn.
"""

import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tokenfeed.pipeline.errors import TokenfeedError
from tokenfeed.tools.corpus.units import Unit
from tokenfeed.tools.encoding.audit import Audit, Questions
from tokenfeed.tools.encoding.engines import ReferenceEngine, check_fast, fast_engine
from tokenfeed.tools.encoding.fast.engine import (
    EngineRejected,
    EngineUnavailable,
    EngineUntested,
    supported_shape,
)
from tokenfeed.tools.encoding.record_blocks import UnitResult, too_many_rejects
from tokenfeed.tools.encoding.unit import Encoded
from tokenfeed.tools.jobs import executors
from tokenfeed.tools.jobs.crew import (
    Crew,
    Done,
    WorkerDied,
    cluster_crew,
    local_crew,
)
from tokenfeed.tools.jobs.progress_bar import Bar
from tokenfeed.tools.jobs.run_records import WHOLE, RunRecords
from tokenfeed.tools.pretokenizing.prepare import Prepared, is_small

logger = logging.getLogger(__name__)

_Work = Unit | Questions


def run_units(run: Prepared, records: RunRecords) -> Prepared:
    """Encode every unit without a record, and record each finished unit.

    Returns:
        The run with the engine that made the ids.

    Raises:
        CorpusError: There are more rejects than allowed.
        KeyboardInterrupt: The message says how many units are finished.
    """
    num_units = records.part.num_units(len(run.units))
    with _saying_what_is_kept(num_units, records, run.task.risk):
        if run.is_fast and not records.engine_rejected:
            try:
                _encode_all(run, records)
                return run
            except EngineRejected as why:
                _reject_engine(why, records)
        audits = records.engine_rejected  # so that the run's figures depend on the input alone
        encoding = replace(run.encoding, engine=ReferenceEngine.name, audits=audits)
        run = replace(run, encoding=encoding)
        _encode_all(run, records)
        while run.options.runner != "local" and audits and records.drop_damaged():
            _encode_all(run, records)  # some worker was late with the other
        return run


@contextlib.contextmanager
def _saying_what_is_kept(num_units: int, records: RunRecords, risk: str) -> Iterator[None]:
    """Add the number of recorded units to an interruption and to the death of a worker.

    Raises:
        ConfigError: A file is gone because another run has finished the data set.
    """

    def kept() -> str:
        return (
            f"{len(records.results):,} of {num_units:,} units are finished and kept; the same "
            "command continues with the others."
        )

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept()) from None
    except WorkerDied as died:
        raise TokenfeedError(f"{died}{risk}; {kept()}") from None
    except FileNotFoundError:
        records.check()
        raise


def _reject_engine(why: EngineRejected, records: RunRecords) -> None:
    """Use the reference from now on. If the ids were wrong, record this for other processes."""
    if not isinstance(why, EngineUnavailable):
        logger.warning("%s: `tokenizers` encodes everything, which takes longer", why)
        records.reject_engine(str(why))
    elif isinstance(why, EngineUntested):
        logger.warning("%s", why)
    else:
        logger.info("the slow engine will do the work: %s", why)


def _encode_all(run: Prepared, records: RunRecords) -> None:
    """Encode the missing units.

    Raises:
        EngineRejected: The engine is missing or has wrong ids. Not all units are encoded then.
    """
    engine, audits = run.encoding.engine, run.encoding.audits
    if run.is_fast:
        supported_shape(run.tokenizer.json_bytes)  # before workers load it
    done = {n: result for n, result in records.results.items() if result.engine == engine}
    if run.is_fast and len(done) < len(records.results):
        check_fast(run.tokenizer)  # before it may write over what the reference has made
    _check(run, records, *done.values())
    own = (unit for unit in run.units if records.part.has(unit.number))
    missing = [unit for unit in own if unit.number not in done]
    if not missing and (not audits or records.part != WHOLE):
        return
    missing.sort(key=lambda unit: (-unit.weight_bytes, unit.number))
    sizes = [unit.weight_bytes for unit in missing]
    with Bar(sizes) as bar, _crew(run, [*missing], bar) as crew:
        questions = run.audit.questions() if audits else None
        crew.start(questions)
        if run.is_fast:
            check_fast(run.tokenizer)
        if questions:
            run.audit.expect(questions)
        for message in crew:
            if not isinstance(message, Encoded):
                run.audit.begin(message)
                _check(run, records)
                continue
            result = _audited(run.audit, message)
            records.append(result)
            _check(run, records, result)
            bar.count_unit()


class _Alone:
    """A crew of this process only."""

    def __init__(self, do: Callable[[_Work], Any], units: list[_Work]) -> None:
        self._do, self._units = do, deque(units)

    def start(self, first: _Work | None = None) -> None:
        """See `Crew.start`."""
        if first is not None:
            self._units.appendleft(first)

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._do, self._units)


@contextlib.contextmanager
def _crew(run: Prepared, units: list[_Work], bar: Bar) -> Iterator[Crew | _Alone]:
    """Start the workers that encode `units`. All processes end with the block."""
    settings = run.encoding
    if not units or (is_small(run.units) and run.options.task not in executors.IN_CHILDREN):
        engine = (fast_engine if run.is_fast else ReferenceEngine)(run.tokenizer)
        do = settings.begin(lambda *progress: bar.advance(Done(*progress)), engine)
        yield _Alone(do, units)
        return
    if run.options.runner != "local":
        work = replace(settings, output=settings.output.absolute())
        with cluster_crew(run.options.runner, work, work.output, units, bar.advance) as crew:
            yield crew
        return
    num_workers = min(run.options.num_workers, len(units))
    with local_crew(settings, units, num_workers, bar.advance) as crew:
        yield crew


def _audited(audit: Audit, done: Encoded) -> UnitResult:
    """Return the result of a unit with the comparison of its sample."""
    result, sample = done
    differing = [*result.differing, *(text.decode() for text in audit.compare(sample))]
    return replace(result, audited=result.audited + len(sample), differing=differing)


def _check(run: Prepared, records: RunRecords, *results: UnitResult) -> None:
    """Check the ids of finished units, and the number of rejects so far."""
    if run.is_fast:
        if records.engine_rejected:
            raise EngineRejected("another part has found the fast engine wrong")
        _check_ids([text.decode() for text in run.audit.differing])
        for result in results:
            _check_ids(result.differing)
    allowed = run.options.max_rejects
    if allowed is None:
        return
    left = allowed
    for _, result in sorted(records.results.items()):
        if result.rejected > left:
            assert result.reject_file
            lines = run.output.read(result.reject_file.file).splitlines()
            reject = json.loads(lines[left])
            raise too_many_rejects(reject["file"], reject["record"], reject["reason"], allowed)
        left -= result.rejected


def _check_ids(differing: Sequence[str]) -> None:
    if differing:
        raise EngineRejected(
            f"the fast engine gives other ids than the reference, {len(differing)} times, first "
            f"for {differing[0][:60]!r}"
        )
