"""The report of a meter: report.json for programs, lines of text and a page for people; and advice
on what to change and what it gains."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenfeed.pipeline.feeding.placement import usable_cores
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.text import count_of, facts
from tokenfeed.trainer.config.run_config import PAGE_FILE, REPORT_FILE
from tokenfeed.trainer.stall.accounts import Accounts
from tokenfeed.trainer.stall.causes import ABOUT, Cause
from tokenfeed.trainer.stall.reading import RankStall, SlowestRank, StallReading
from tokenfeed.trainer.stall.watchers import LoaderUse

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


TAILS = {"p50_s": "p50", "p95_s": "p95", "p99_s": "p99", "max_s": "max"}
"""Seconds per step of a cause: field of `CauseReport`, and its heading."""
_NAME, _COLUMN = 18, 10
_SHOWN_FROM = 5e-5
"""Smallest share that gets a line. A smaller share would print as 0.00 %."""
_MOST_RANKS = 8
_LEAST_UNSEEN = 0.001
"""If less of the time may be idle unseen, the stall does not count as a lower bound."""
_LEAST_COST = 0.005
"""If the slowest rank costs a smaller share of the time, the ranks count as equally fast."""


def stall_facts(report: "StallReport") -> dict[str, str]:
    """Return the stall with a table of its causes, and the slowest rank with a table of ranks."""
    stall = [headline(report), *cause_table(report)]
    return {"stall": "\n".join(stall), "ranks": "\n".join(rank_table(report))}


def speed_parts(report: "StallReport", padding: float | None) -> list[str]:
    """Return tokens per second, padding and MFU, as far as they are known."""
    parts = []
    if report.real_tokens_per_s is not None:
        parts.append(f"{report.real_tokens_per_s:,.0f} real tok/s")
    if padding is not None:
        parts.append(f"padding {padding:.2%}")
    if report.mfu is not None:
        parts.append(f"MFU {report.mfu:.1%} ({report.mfu_formula})")
    return parts


def advice(report: "StallReport") -> str:
    """Return one line for each piece of advice."""
    return "\n".join(f"{piece.text} ({gain_words(piece.gain)})" for piece in report.advice)


def gain_words(gain: float | None) -> str:
    """Describe a gain in tokens per second: 0.07 is 7 % faster, 9.8 is 10.8 times as fast."""
    if gain is None:
        return "gain not known"
    if gain >= 1:
        return f"at least {1 + gain:.1f} times as fast"
    return f"at least {gain:.1%} faster"


def not_measured(report: "StallReport") -> str:
    """Return why the stall is unknown."""
    if not report.queued_steps:
        return (
            "not measured: no step has ended. In a loop of your own, call `meter.step()` after "
            "each optimizer step"
        )
    return f"not measured: {report.queued_steps:,} steps so far, all of them warm-up"


def shown_causes(report: "StallReport") -> "dict[Cause, CauseReport]":
    """Return the causes that are large enough to show in a table, largest first."""
    shown: list[Any] = [
        (name, part) for name, part in report.causes.items() if part.fraction >= _SHOWN_FROM
    ]
    return dict(sorted(shown, key=lambda item: -item[1].fraction))


def slowest_line(report: "StallReport") -> str:
    """Describe the rank that the others wait for, and why."""
    if report.slowest_rank is None:
        return "the slowest rank is not known: some rank has not measured a step yet"
    slowest = late_rank(report)
    if slowest is None:
        return "no rank keeps the others waiting"
    return (
        f"rank {slowest.rank} keeps the others waiting: {slowest.cause}, "
        f"{_short(slowest.step_seconds)} a step more than the quickest ({slowest.cost:.2%})"
    )


def late_rank(report: "StallReport") -> SlowestRank | None:
    """Return the slowest rank; None if the other ranks hardly wait for it."""
    slowest = report.slowest_rank
    return None if slowest is None or slowest.cost < _LEAST_COST else slowest


def main_of(rank: RankStall) -> str:
    """Return the largest cause of a rank's own stall, with its seconds per step."""
    own = {cause: idle for cause, idle in rank.causes.items() if cause != "communication"}
    if not own:
        return ""
    name = max(own, key=own.__getitem__)
    return f"{name} {_short(own[name] / rank.steps)} a step"


def main_cause(fractions: Mapping[str, float]) -> str:
    """Return the largest cause in a few words; empty if it is negligible."""
    name = max(fractions, key=fractions.__getitem__, default="")
    if not name or fractions[name] < 10 * _SHOWN_FROM:
        return ""
    return f" ({name} {fractions[name] * 100:.2f})"


def headline(report: "StallReport") -> str:
    """Return the stall in a line."""
    if report.stall is None:
        return not_measured(report)
    bar = ""
    if report.interval is not None:
        bar = f" [{report.interval[0]:.2%}, {report.interval[1]:.2%}]"
    line = f"{_share(report)}{bar} of {report.seconds:,.1f} s"
    line += f" {'of GPU time' if report.on_gpu else 'on the CPU'}, {count_of(report.steps, 'step')}"
    if report.world_size > 1:
        line += f", rank {report.rank} of {report.world_size}"
    if _is_lower_bound(report):
        line += f"; at most {report.at_most:.2%} with idle time that cannot be seen"
    return line


def _is_lower_bound(report: "StallReport") -> bool:
    """Return whether there may be more idle time than was measured."""
    least, most = report.stall, report.at_most
    return least is not None and most is not None and most > least + _LEAST_UNSEEN


def _share(report: "StallReport") -> str:
    """Return the stall in percent; empty if it was not measured."""
    return f"{'at least ' * _is_lower_bound(report)}{share_of(report.stall)}"


def cause_table(report: "StallReport") -> list[str]:
    """Return the causes and the work as lines of text; empty if no cause shows."""
    causes = shown_causes(report)
    if report.stall is None or not causes:
        return []
    lines: list[tuple[str, ...]] = [("", "share", "seconds", *TAILS.values(), "a step")]
    for name, part in causes.items():
        tails = (_short(getattr(part, key)) for key in TAILS)
        lines.append((name, f"{part.fraction:.2%}", f"{part.seconds:,.2f}", *tails))
    work = 1 - report.stall
    lines.append(("work", f"{work:.2%}", f"{work * report.seconds:,.2f}"))
    width = len(TAILS) + 2
    return [
        f"{name:<{_NAME}}{''.join(f'{cell:>{_COLUMN}}' for cell in cells[:width])}"
        + "".join(f"  {cell}" for cell in cells[width:])
        for name, *cells in lines
    ]


def rank_table(report: "StallReport") -> list[str]:
    """Return the slowest rank and why, then a line for each rank, slowest first."""
    ranks = [each for each in report.ranks if each.steps]
    if not ranks:
        return []
    shown = sorted(ranks, key=lambda each: each.waited_seconds)[:_MOST_RANKS]
    left = len(ranks) - len(shown)
    return [
        slowest_line(report),
        f"{'':<{_NAME}}{'stall':>{_COLUMN}}{'waited':>{_COLUMN}}  most of its own",
        *map(_rank, shown),
        *([f"and {left} more, which waited longer"] if left else []),
    ]


def _rank(rank: RankStall) -> str:
    name, waited = f"rank {rank.rank}", _short(rank.waited_seconds)
    return f"{name:<{_NAME}}{rank.fraction:>{_COLUMN}.2%}{waited:>{_COLUMN}}  {main_of(rank)}"


def _short(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 5e-5 else "0"


Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseReport:
    """Idle time of one cause."""

    fraction: float
    """Share of the wall time, 0 to 1."""
    seconds: float
    interval: Interval | None
    """95 % interval of the fraction, as tested on simulated runs; None after too few steps."""
    p50_s: float
    """Median seconds per step. The next two fields are other percentiles."""
    p95_s: float
    p99_s: float
    max_s: float
    speed_up: float
    """Lower bound of the speed-up without this cause: 1.05 is 5 % more tokens per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A piece of advice: one thing to change."""

    cause: str
    text: str
    gain: float | None
    """Lower bound of the gain, as a share of the measured tokens per second; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReport:
    """Where the time of the measured steps went."""

    stall: float | None
    """Share of the wall time in which the device had nothing of the training to run, 0 to 1; None
    before the first measured step."""
    interval: Interval | None
    """95 % interval of the stall, as tested on simulated runs; None after too few steps."""
    at_most: float | None
    """The stall plus all possible idle time inside work that could not be calibrated."""
    causes: dict[Cause, CauseReport]
    """Every cause. Their fractions sum to the stall."""
    steps: int
    """Measured steps: those after the warm-up."""
    queued_steps: int
    """Calls of `StallMeter.step`, warm-up included."""
    seconds: float
    """Wall time of the measured steps."""
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
    events: dict[str, Any]
    """Counts of events. `waits` has the waits per step by source line, if they were looked for."""
    rank: int = 0
    """The rank that measured all of this, except `ranks`."""
    world_size: int = 1
    ranks: list[RankStall]
    """The stall of each rank at the latest `gather`; empty for a single process."""
    slowest_rank: SlowestRank | None
    """The rank that the others wait for."""
    advice: list[Advice]

    def __str__(self) -> str:
        speed = ", ".join(speed_parts(self, self.padding)) or "no tokens were passed to `step`"
        end = {"speed": speed, "device": f"{self.device}; {self.method}", "advice": advice(self)}
        return facts(stall_facts(self) | end)

    def write(self, folder: Path | str) -> Path:
        """Write report.json and report.html into a folder, each atomically.

        Returns:
            The page, report.html.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        content = json.dumps({"stall": asdict(self)}, indent=1)
        atomic_write(Path(folder) / REPORT_FILE, content.encode() + b"\n")
        return save_page(Path(folder), render_page(Path(folder), self))


def render_page(
    folder: Path,
    stall: "StallReport",
    *,
    cards: Mapping[str, str] | None = None,
    plots: Sequence[Any] = (),
    report: Any = None,
    samples: Any = None,
    lengths: Sequence[tuple[str, int, float]] = (),
    config: Any = None,
) -> str:
    """Return the page of a run or of a loop as text.

    Args:
        folder: The folder of the run, as the page shows it.
        stall: A StallReport.
        cards: The figures at the top, by name. Default: the figures of the stall report.
        plots: Objects with a title, an explanation and an SVG.
        report: The Report of a run by `train`; None for a loop that only has a meter.
        samples: The line of metrics.jsonl with the latest samples; None without one.
        lengths: Lengths of rows, how many rows have them, and the width of the bar, 0 to 1.
        config: The settings of the run, as YAML.
    """
    return (
        page_templates()
        .get_template("page.html")
        .render(
            folder=str(folder),
            report=report,
            stall=stall,
            cards=stall_cards(stall) if cards is None else cards,
            ranks=[rank for rank in stall.ranks if rank.steps],
            late=late_rank(stall),
            plots=plots,
            samples=samples,
            lengths=lengths,
            config=config,
        )
    )


def save_page(folder: Path, page: str) -> Path:
    """Write report.html into a folder, atomically, and return its path."""
    path = folder / PAGE_FILE
    atomic_write(path, page.encode(errors="backslashreplace"))  # a path may not be UTF-8
    return path


def stall_cards(stall: "StallReport") -> dict[str, str]:
    """Return the figures of a stall report, by name, as the page shows them."""
    speed = stall.real_tokens_per_s
    return {
        "stall": _share(stall),
        "real tokens a second": "not measured" if speed is None else f"{speed:,.0f}",
        "padding": share_of(stall.padding),
        "MFU": share_of(stall.mfu),
        "steps": f"{stall.steps:,}",
    }


def share_of(value: float | None) -> str:
    """Return a share in percent; empty if it was not measured."""
    return "" if value is None else f"{value:.2%}"


@cache
def page_templates() -> "Environment":
    """Return the templates of this folder and the functions that they call. Escapes values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only for pages: slow to import

    made = Environment(
        loader=PackageLoader("tokenfeed.trainer.stall", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"format_as": format, "sentence": _sentence, "code": _code, "short": _short}
    made.globals |= {
        "about": ABOUT,
        "tails": TAILS,
        **{
            function.__name__: function
            for function in (
                shown_causes,
                gain_words,
                headline,
                main_of,
                not_measured,
                slowest_line,
            )
        },
    }
    return made


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _code(text: str) -> "Markup":
    """Mark up text between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


REMEDIES: dict[str, str] = {
    **{cause: about.remedy for cause, about in ABOUT.items()},
    "work": "its work takes longer: check the clock, the temperature and the neighbours of its "
    "device",
    "exchange": "most of it is the exchange of gradients, not a late rank: exchange them less "
    "often, by steps of more micro-batches, or use a faster network",
    "padding": "pack rows, or sort more of them by length",
}
"""Advice by cause, and about other things that cost tokens."""
_MUCH_PADDING = 0.10
_LOW_MFU = 0.30
_LITTLE_STALL = 0.02
_MUCH_UNSEEN = 0.05
_MUCH_CORE_WAIT = 0.10
_SPARE = 1.1
"""Workers to advise, divided by the workers that would just keep up."""


def advise(
    report: StallReport, remedies: Mapping[str, str] | None = None, loader: LoaderUse | None = None
) -> list[Advice]:
    """Return advice on a report, largest gain first.

    A cause whose interval reaches 0 gets no advice.

    Args:
        report: The report.
        remedies: Advice of this loop by cause, instead of the general advice. Further keys: `work`,
            `exchange` and `padding`.
        loader: The loader that the loop waits for.
    """
    if report.stall is None:
        return []
    known = REMEDIES | dict(remedies or {})
    if loader is not None and loader.num_workers is not None:
        waiting = report.causes["data"].fraction
        known["data"] = _loader_remedy(loader, loader.num_workers, waiting)
    found = [*_on_causes(report, known), *_beside_stall(report, report.stall, known["padding"])]
    return sorted(found, key=lambda piece: -(piece.gain or 0.0))


def _on_causes(report: StallReport, remedies: Mapping[str, str]) -> Iterator[Advice]:
    for cause, about in ABOUT.items():
        fraction, felt = report.causes[cause].fraction, _felt(cause, report)
        weighed = fraction if cause == "communication" else felt
        interval = report.causes[cause].interval
        if weighed < about.named or (interval is not None and interval[0] <= 0.0):
            continue  # too small, or not distinguishable from no stall
        remedy = _remedy(cause, report, remedies)
        text = f"{cause} {fraction:.1%}: {remedy}{_lines(cause, report)}"
        gain = felt / max(1e-9, 1 - felt)
        yield Advice(cause=cause, text=text, gain=gain)


def _loader_remedy(loader: LoaderUse, num_workers: int, waiting: float) -> str:
    """Return advice on the number of workers that would keep up.

    Example: without workers, a loader takes 91 % of a loop's time. Each batch then trains for the
    other 9 %, so 91 / 9 = 10.1 workers would just keep up, and 12 are advised.
    """
    busy = num_workers or loader.share
    needed = max(num_workers + 1, math.ceil(_SPARE * busy / max(1e-9, 1 - waiting) - 1e-9))
    cost = ""
    if not num_workers:
        items = loader.batch_size or 1
        of = "an item" if loader.batch_size else "a batch"
        cost = f" {of} costs {loader.batch_seconds / items * 1e3:.1f} ms;"
    text = f"your {loader.name} has num_workers={num_workers}:{cost}"
    text += f" {needed:,} {'worker' if needed == 1 else 'workers'} would hide it"
    if needed > (cores := usable_cores()):
        text += f", but this process has {cores} cores: also make items cheaper"
    return text


def _felt(cause: Cause, report: StallReport) -> float:
    """Return the share of the time that a run saves without a cause.

    If a rank is late, this is at most the rank's own share of the cause: whatever the other ranks
    save, they wait longer for the late one. For communication, the exchange of gradients stays.
    """
    fraction, late = report.causes[cause].fraction, _late(report)
    if late is None:
        return fraction
    waited_for = report.ranks[late.rank]
    own = waited_for.causes.get(cause, 0.0) / waited_for.seconds
    return min(fraction, late.cost if cause == "communication" else own)


def _remedy(cause: Cause, report: StallReport, remedies: Mapping[str, str]) -> str:
    """Return what to change about a cause. For communication, what makes the slowest rank
    faster."""
    if cause != "communication" or report.slowest_rank is None:
        return remedies[cause]
    late = _late(report)
    if late is None:
        return remedies["exchange"]
    return f"rank {late.rank} is late by {late.cause}: {remedies[late.cause]}"


def _late(report: StallReport) -> SlowestRank | None:
    """Return the rank that causes most of the communication by being late; None without one."""
    slowest = report.slowest_rank
    if slowest is None or slowest.cost < 0.5 * report.causes["communication"].fraction:
        return None
    return slowest


def _lines(cause: Cause, report: StallReport) -> str:
    """Return the source lines at which the host waits, if they were looked for."""
    if cause != "wait":
        return ""
    waits: dict[str, float] = report.events.get("waits", {})
    if not waits:
        return "; `meter.find_waits()` names the lines"
    return "; " + ", ".join(f"{line} ({count:g} a step)" for line, count in list(waits.items())[:3])


def _beside_stall(report: StallReport, stall: float, padding_remedy: str) -> Iterator[Advice]:
    """Yield advice on costs in tokens per second other than stall."""
    if report.core_wait is not None and report.core_wait >= _MUCH_CORE_WAIT:
        yield Advice(
            cause="cores",
            text=f"the training thread was ready to run but got no core for {report.core_wait:.0%} "
            f"of the time ({usable_cores()} cores): other processes or too many workers use them",
            gain=None if report.on_gpu else report.core_wait / max(1e-9, 1 - report.core_wait),
        )
    if report.padding is not None and report.padding >= _MUCH_PADDING:
        yield Advice(
            cause="padding",
            text=f"padding {report.padding:.0%}: {padding_remedy}",
            gain=report.padding / (1 - report.padding),
        )
    if report.at_most is not None and report.at_most - stall >= _MUCH_UNSEEN:
        text = f"{report.at_most - stall:.0%} may be idle inside the work: "
        if report.events.get("waits"):
            text += "the host waits for the device in the middle of it, at "
            text += _lines("wait", report).removeprefix("; ")
            text += ": remove the wait, or put it into `with meter.cause('wait')` to measure it"
        else:
            text += "run more steps, or set `meter.mark()` between forward and backward"
        yield Advice(cause="unseen", text=text, gain=None)
    if report.mfu is not None and report.mfu < _LOW_MFU and stall < _LITTLE_STALL:
        yield Advice(
            cause="kernels",
            text=f"MFU {report.mfu:.0%} with hardly any stall: feeding is not the problem; look at "
            "kernels, precision and the size of micro-batches",
            gain=None,
        )


_LEAST_ERROR = 0.001
"""Error from latencies and rounding, as a share of the time; measured on the simulated device."""


def cause_report(cause: Cause, reading: StallReading, accounts: Accounts) -> CauseReport:
    """Return the figures of one cause."""
    fraction, tail = reading.cause_fractions[cause], accounts.histograms.get(cause)
    quantiles = [tail.quantile(q, reading.steps) if tail else 0.0 for q in (0.5, 0.95, 0.99)]
    return CauseReport(
        fraction=fraction,
        seconds=reading.cause_seconds[cause],
        interval=interval_of(cause, reading, accounts),
        p50_s=quantiles[0],
        p95_s=quantiles[1],
        p99_s=quantiles[2],
        max_s=tail.largest if tail else 0.0,
        speed_up=1 / max(1e-9, 1 - fraction),
    )


def interval_of(
    cause: Cause | None, reading: StallReading, accounts: Accounts, unseen: float = 0.0
) -> Interval | None:
    """Return the interval of the share of a cause, or of all causes if None.

    Its width comes from the spread of the steps and of the reference spans (see `reading`). Its
    lower end is lowered by the time of the meter's marks, which may delay the device. Its upper end
    is raised by unseen idle time.
    """
    half_width = accounts.batches.half_width(cause)
    if not reading.seconds or half_width is None:
        return None
    fraction = reading.fraction if cause is None else reading.cause_fractions[cause]
    step_error = half_width * (1 - reading.counted_fraction)
    reference_error = reading.reference_error(cause) / reading.seconds
    either_side = math.hypot(step_error, reference_error, _LEAST_ERROR if fraction else 0.0)
    low = fraction - either_side - min(fraction, reading.marking_seconds / reading.seconds)
    return max(0.0, low), min(1.0, fraction + either_side + unseen)
