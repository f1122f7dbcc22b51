"""`pretokenize --part I/N`: encode every Nth unit, and leave the rest to the other parts."""

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from tokenfeed.pipeline.facts import count_of
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE
from tokenfeed.tools.encoding.record_blocks import UnitResult
from tokenfeed.tools.jobs.claim import recognise, state_of
from tokenfeed.tools.jobs.run_records import JobPart, RunRecords, planning_alone
from tokenfeed.tools.pretokenizing.options import Options
from tokenfeed.tools.pretokenizing.prepare import Listed, Prepared
from tokenfeed.tools.pretokenizing.runner import run_units

__all__ = ["PartSummary", "begin_writing", "make_part"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSummary:
    """The figures of a part of a run."""

    out: str
    part: str
    """As `--part` has it."""
    units: int
    """Units of this part."""
    resumed_units: int
    """Units of this part that were finished before."""
    already_finished: bool
    """Whether the data set is finished, and nothing was left to do."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """A JSON object of all fields."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if self.already_finished:
            return f"part {self.part} of {self.out}: the data set is already finished"
        resumed = f", {self.resumed_units:,} of them before" if self.resumed_units else ""
        return (
            f"part {self.part} of {self.out}: {count_of(self.units, 'unit')} finished{resumed}, in "
            f"{self.seconds:,.1f} s; `--finish` makes the data set when the parts have ended"
        )


def make_part(options: Options) -> PartSummary:
    """Make one part of the data set that `options` describe, or finish it.

    Args:
        options: What is wanted; all parts have the same, but for `part`.

    Raises:
        TokenfeedError: Whatever is wrong, in one line. The same part continues.
    """
    started = time.perf_counter()
    options.check()
    output, part = options.output, JobPart.from_text(str(options.part))
    state = state_of(output)
    listed = Listed.from_options(options, output, state)
    if state == "finished":
        _, num_units = recognise(output, listed.recipe)
        num_units = resumed_units = sum(map(part.has, range(num_units)))
    else:
        with contextlib.ExitStack() as stack:
            with planning_alone(output) if listed.plan is None else contextlib.nullcontext():
                prepared = Prepared.from_listed(listed)
                begun = RunRecords.begin(output, listed.recipe, UnitResult, part)
                records = stack.enter_context(begun)
                begin_writing(prepared, records)
            num_units, resumed_units = len(prepared.run.units), len(records.results)
            run_units(prepared.run, records)
    return PartSummary(
        out=str(output),
        part=str(options.part),
        units=num_units,
        resumed_units=resumed_units,
        already_finished=state == "finished",
        seconds=round(time.perf_counter() - started, 2),
    )


def begin_writing(prepared: Prepared, records: RunRecords[UnitResult]) -> None:
    """Keep the plan, and put the tokenizer where workers read it, unless another process has."""
    if not prepared.is_kept:
        records.keep_plan(prepared.plan)
    output, json_bytes = prepared.run.settings.output, prepared.run.tokenizer.json_bytes
    there = output.exists(TOKENIZER_FILE)
    if not there or output.read(TOKENIZER_FILE) != json_bytes:
        output.write(TOKENIZER_FILE, json_bytes)
