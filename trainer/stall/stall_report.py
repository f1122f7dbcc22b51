"""The report of a meter: report.json for programs, lines of text for people."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.text import count_of, facts
from tokenfeed.trainer.config.run_config import REPORT_FILE
from tokenfeed.trainer.stall.causes import Cause
from tokenfeed.trainer.stall.ranks import RankStall, SlowestRank

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseReport:
    """Idle time of one cause."""

    fraction: float
    """Share of the wall time, 0 to 1."""
    seconds: float
    interval: Interval | None
    """95 % interval of the fraction, as tested on simulated runs; None if it is not known."""
    speed_up: float
    """Speed without this cause, relative to the measured speed: 1.05 is 5 % more tokens per
    second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A piece of advice: one thing to change."""

    cause: str
    text: str
    """What to change, behind the figure that leads to it."""
    change: str
    """What to change, alone."""
    gain: float | None
    """Largest gain, as a share of the measured tokens per second; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTimes:
    """The whole run, or the whole command, in seconds. `StallReport.seconds` are the measured
    steps."""

    total: float
    before: float
    """From the start to the end of the first step."""
    warmup: float
    """The other steps that were left out at the start."""
    after: float
    """From the end of the last step to the end of the run, or until now."""
    after_by_cause: dict[Cause, float] = field(default_factory=dict)
    """Parts of `after`, such as a last evaluation."""
    finished: bool = True
    """False in a report of a run that still goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Sums over the measured steps up to one of them, for plots."""

    step: int
    """Steps of the loop so far, warm-up included."""
    steps: int
    """Measured steps so far."""
    seconds: float
    tokens: int
    causes: dict[Cause, float]
    """Idle seconds by cause, without causes that have none."""


_MOST_SAMPLES = 64
"""Most points of a plot."""


class Samples:
    """A bounded number of samples, evenly spread over the steps of a loop.

    When there are too many, every second one is dropped, and later ones are twice as far apart.
    """

    def __init__(self) -> None:
        self._every, self._kept = 1, list[Sample]()

    def is_due(self, step: int) -> bool:
        """Return whether `add` would keep a sample of this step. Costs next to nothing."""
        return not self._kept or step >= self._kept[-1].step + self._every

    def add(self, sample: Sample) -> None:
        """Keep a sample, if it is far enough from the one before."""
        if not self.is_due(sample.step):
            return
        self._kept.append(sample)
        if len(self._kept) >= _MOST_SAMPLES:
            self._kept = self._kept[1::2]
            self._every = max(2 * self._every, self._kept[-1].step - self._kept[-2].step)

    def read(self, latest: Sample) -> list[Sample]:
        """Return the samples so far, and the latest sums."""
        return [*(one for one in self._kept if one.step < latest.step), latest]


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReport:
    """Where the time of the measured steps went."""

    verdict: str = ""
    """The main cause in a few words, such as "WAITS FOR DATA"."""
    reason: str = ""
    """The figures behind the verdict."""
    next_step: str = ""
    """What to change next, with the gain."""
    stall: float | None
    """Share of the wall time in which the device did not train: it had nothing to run, or it
    evaluated. 0 to 1; None before the first measured step."""
    interval: Interval | None
    """95 % interval of the stall, as tested on simulated runs; None if it is not known."""
    unmeasured: str | None = None
    """Why the idle time inside the work was not measured. `stall` is then the idle time outside of
    the work alone, without an interval. If no step was measured, the reason for it. None if
    everything was measured."""
    at_most: float | None
    """The stall plus all possible idle time that was not measured."""
    causes: dict[Cause, CauseReport]
    """Every cause. Their fractions sum to the stall."""
    steps: int
    """Measured steps: those after the warm-up."""
    queued_steps: int
    """Calls of `StallMeter.step`, warm-up included."""
    seconds: float
    """Wall time of the measured steps."""
    run: RunTimes | None = None
    """The time before, between and after the measured steps; None if it is not known."""
    tokens: int
    real_tokens_per_s: float | None
    padding: float | None
    """Share of token slots that held no token; None if `step` got no tokens."""
    mfu: float | None
    """Model FLOP/s utilization: operations of the training, divided by what the device could do in
    that time. None if either is unknown."""
    mfu_formula: str | None
    core_wait: float | None
    """Share of the time in which the training thread was ready to run but got no core; None if the
    system does not count it."""
    device: str
    on_gpu: bool
    method: str
    """How the stall was measured."""
    events: dict[str, Any]
    """Counts of events. `waits` has the waits per step by source line, if they were looked for."""
    rank: int = 0
    """The rank that measured all of this, except `ranks`."""
    world_size: int = 1
    counts_all_ranks: bool = False
    """Whether the tokens that `step` got were those of all ranks."""
    ranks: list[RankStall]
    """The stall of each rank at the latest `gather`; empty for a single process."""
    slowest_rank: SlowestRank | None
    """The rank that the others wait for."""
    advice: list[Advice]
    samples: list[Sample] = field(default_factory=list)
    """Sums at some of the steps, for plots."""

    def __str__(self) -> str:
        speed = ", ".join(speed_parts(self, self.padding)) or "no tokens were passed to `step`"
        return self.text(after={"speed": speed, "device": f"{self.device}; {self.method}"})

    def text(
        self,
        *,
        before: Mapping[str, str] = MappingProxyType({}),
        after: Mapping[str, str] = MappingProxyType({}),
        more_advice: Sequence[str] = (),
    ) -> str:
        """Return the report as lines: verdict, reason and next step, then the figures and advice.

        Args:
            before: Further lines behind the next step, by name. Empty ones are left out.
            after: Further lines at the end.
            more_advice: Further lines of advice.
        """
        # The next step is a piece of advice too.
        others = [each for each in self.advice if not self.next_step.startswith(each.change)]
        advice = [f"{each.text} ({gain_words(each.gain)})" for each in others]
        return facts(
            {
                "verdict": self.verdict,
                "reason": self.reason,
                "next": self.next_step,
                **before,
                "run": self.run_line,
                "stall": "\n".join([self.headline, *self._cause_table()]),
                "inside": self.inside_line,
                "ranks": "\n".join(self.rank_table()),
                "advice": "\n".join([*advice, *more_advice]),
                **after,
            }
        )

    @property
    def step_seconds(self) -> float | None:
        """Seconds per measured step; None without one."""
        return self.seconds / self.steps if self.steps else None

    @property
    def of_rank(self) -> str:
        """Return " on rank 0" if the figures of tokens are those of one rank of several."""
        return f" on rank {self.rank}" * (self.world_size > 1 and not self.counts_all_ranks)

    @property
    def all_tokens_per_s(self) -> float | None:
        """Real tokens per second of all ranks. None if unknown: before the ranks have gathered
        their readings, or without tokens."""
        if not self.of_rank:
            return self.real_tokens_per_s
        speeds = [each.tokens / each.seconds for each in self.ranks if each.tokens]
        return sum(speeds) if len(speeds) == self.world_size else None

    @property
    def run_line(self) -> str:
        """Describe the whole run: before the first step, measured, warm-up, after the last step."""
        if (run := self.run) is None:
            return ""
        parts = [f"{run.before:,.1f} s to the end of the first step"] if self.queued_steps else []
        if self.queued_steps and run.warmup >= 0.05:
            parts.append(f"{run.warmup:,.1f} s of warm-up")
        if self.steps:
            parts.append(f"{self.seconds:,.1f} s of {count_of(self.steps, 'measured step')}")
        if self.queued_steps:
            ends = [f"{c} {part:,.1f}" for c, part in run.after_by_cause.items() if part > 0.05]
            last = f" ({', '.join(ends)})" * bool(ends)
            parts.append(f"{run.after:,.1f} s after the last{last}")
        line = f"{run.total:,.1f} s" + " so far" * (not run.finished)
        return ": ".join(filter(None, [line, ", ".join(parts)]))

    @property
    def headline(self) -> str:
        """Return the stall in a line."""
        if self.stall is None:
            return self.not_measured
        ends = [share_of(end) for end in self.interval or ()]
        bar = f" [{', '.join(ends)}]" if len({*ends}) > 1 else ""  # times of a CPU are exact
        line = f"{self.stall_share}{bar} of {self.seconds:,.1f} s"
        line += f" {'of GPU time' if self.on_gpu else 'on the CPU'}, {count_of(self.steps, 'step')}"
        if self.world_size > 1:
            line += f", rank {self.rank} of {self.world_size}"
        evaluation = self.causes.get("evaluation")
        if evaluation and evaluation.fraction >= _SHOWN_FROM:  # the device computes meanwhile
            line += f"; without evaluation {max(0.0, self.stall - evaluation.fraction):.2%}"
        return line

    @property
    def inside_line(self) -> str:
        """Return why the idle time inside the work is unknown; empty if it is known."""
        if not self.unmeasured or not self.steps:
            return ""
        most = "" if self.at_most is None else f". With it, the stall is at most {self.at_most:.1%}"
        return f"not measured: {self.unmeasured}{most}"

    @property
    def not_measured(self) -> str:
        """Return why the stall is unknown."""
        if self.unmeasured:
            return f"not measured: {self.unmeasured}"
        if not self.queued_steps:
            return "not measured: no step has ended"
        return f"not measured: {count_of(self.queued_steps, 'step')} so far, all of them warm-up"

    @property
    def shown_causes(self) -> dict[Cause, CauseReport]:
        """Return the causes that are large enough to show in a table, largest first."""
        shown: list[Cause] = [c for c, part in self.causes.items() if part.fraction >= _SHOWN_FROM]
        shown.sort(key=lambda cause: -self.causes[cause].fraction)
        return {cause: self.causes[cause] for cause in shown}

    @property
    def late_rank(self) -> SlowestRank | None:
        """Return the slowest rank; None if the other ranks hardly wait for it."""
        slowest = self.slowest_rank
        return slowest if slowest is not None and slowest.is_late else None

    @property
    def waited_for(self) -> SlowestRank | None:
        """The late rank, unless it is the rank of this report."""
        return self.late_rank if self.late_rank and self.late_rank.rank != self.rank else None

    @property
    def slowest_line(self) -> str:
        """Describe the rank that the others wait for, and why."""
        if self.slowest_rank is None:
            return "the slowest rank is not known: some rank has not measured a step yet"
        late = self.late_rank
        if late is None:
            return "no rank keeps the others waiting for more than 3% of a step"
        line = (
            f"rank {late.rank} keeps the others waiting: {late.cause}, {short(late.step_seconds)} "
            f"a step more than the median rank ({late.cost:.1%} of a step)"
        )
        if late.hidden_seconds >= 0.1 * late.step_seconds:
            others = [each.rank for each in self.ranks if each.rank != late.rank]
            whose = f"rank {others[0]}'s work" if len(others) == 1 else "the work of the others"
            line += f"; {whose} contains about {short(late.hidden_seconds)} of waiting a step"
        return line

    def waited_by(self, rank: RankStall) -> str:
        """Return how long a rank waited for others; "in work" if most of it is hidden there."""
        late = self.late_rank
        if late and late.rank != rank.rank and late.hidden_seconds > 0.5 * late.step_seconds:
            return "in work"
        return short(rank.waited_seconds)

    @property
    def stall_share(self) -> str:
        """Return the stall in percent; empty if it was not measured."""
        return f"{'at least ' * bool(self.unmeasured)}{share_of(self.stall)}"

    def _cause_table(self) -> list[str]:
        """Return the causes and the work as lines of text; empty if no cause shows."""
        causes = self.shown_causes
        if self.stall is None or not causes:
            return []
        work = 1 - self.stall
        rows = [(name, part.fraction, part.seconds) for name, part in causes.items()]
        return [
            _row("", "share", "seconds", "a step"),
            *(
                _row(name, f"{share:.2%}", f"{seconds:,.2f}", short(seconds / max(1, self.steps)))
                for name, share, seconds in [*rows, ("work", work, work * self.seconds)]
            ),
        ]

    def rank_table(self) -> list[str]:
        """Return the late rank and why, then a line for each rank, slowest first."""
        ranks = [each for each in self.ranks if each.steps]
        if not ranks:
            return []
        first = self.late_rank.rank if self.late_rank else -1
        ranks.sort(key=lambda each: (each.rank != first, each.waited_seconds))
        shown, left = ranks[:_MOST_RANKS], len(ranks[_MOST_RANKS:])
        return [
            self.slowest_line,
            _row("", "stall", "waited") + "  most of its own",
            *(
                _row(f"rank {each.rank}", f"{each.fraction:.2%}", self.waited_by(each))
                + f"  {main_of(each)}"
                for each in shown
            ),
            *([f"and {left} more, which waited longer"] if left else []),
        ]

    def write(self, folder: Path | str) -> Path:
        """Write report.json and report.html into a folder, each atomically.

        Returns:
            The page, report.html.
        """
        from tokenfeed.trainer.stall.stall_page import render_page, save_page  # imports this file

        self.write_data(folder)
        return save_page(Path(folder), render_page(Path(folder), self))

    def write_data(self, folder: Path | str) -> None:
        """Write report.json alone, which takes milliseconds."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        figures = asdict(self) | {"all_tokens_per_s": self.all_tokens_per_s}
        content = json.dumps({"stall": figures}, indent=1)
        atomic_write(Path(folder) / REPORT_FILE, content.encode() + b"\n")


_NAME, _COLUMN = 18, 10
"""Widths of the columns of a table, in letters."""
_SHOWN_FROM = 5e-5
"""Smallest share that gets a line. A smaller share would print as 0.00 %."""
_MOST_RANKS = 8
"""Most ranks in the table of the text. The page has all."""


def speed_parts(report: StallReport, padding: float | None) -> list[str]:
    """Return tokens per second, padding and MFU, as far as they are known."""
    parts, of_rank = [], report.of_rank
    if report.real_tokens_per_s is not None:
        parts.append(f"{report.real_tokens_per_s:,.0f} real tok/s{of_rank}")
    if of_rank and report.all_tokens_per_s is not None:
        parts.insert(
            0, f"{report.all_tokens_per_s:,.0f} real tok/s on all {report.world_size} ranks"
        )
    if padding is not None:
        parts.append(f"padding {padding:.2%}{of_rank}")
    if report.mfu is not None:
        parts.append(f"MFU {report.mfu:.1%} ({report.mfu_formula})")
    return parts


def gain_words(gain: float | None) -> str:
    """Describe a gain in tokens per second: 0.07 is 7 % faster, 9.8 is 10.8 times as fast."""
    if gain is None:
        return "gain not known"
    if gain >= 1:
        return f"up to {1 + gain:.1f} times as fast"
    return f"up to {gain:.1%} faster"


def share_of(value: float | None) -> str:
    """Return a share in percent; empty if it was not measured."""
    return "" if value is None else f"{value:.2%}"


def _row(name: str, *cells: str) -> str:
    return f"{name:<{_NAME}}{''.join(f'{cell:>{_COLUMN}}' for cell in cells)}"


def main_of(rank: RankStall) -> str:
    """Return the largest cause of a rank's own stall, with its seconds per step."""
    own = {cause: idle for cause, idle in rank.causes.items() if cause != "communication"}
    if not own:
        return ""
    name = max(own, key=own.__getitem__)
    return f"{name} {short(own[name] / rank.steps)} a step"


def main_cause(fractions: Mapping[str, float]) -> str:
    """Return the largest cause in a few words; empty if it is negligible."""
    name = max(fractions, key=fractions.__getitem__, default="")
    if not name or fractions[name] < 10 * _SHOWN_FROM:
        return ""
    return f" ({name} {fractions[name] * 100:.2f})"


def short(seconds: float) -> str:
    """Return seconds in a few letters: 1.20 s, 36.2 ms."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 5e-5 else "0"
