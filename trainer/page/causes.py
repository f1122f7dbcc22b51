"""The stall by cause, as a table with bars."""

from html import escape

from tokenfeed.trainer.stall.causes import ABOUT, Cause
from tokenfeed.trainer.stall.report import CauseReport, Interval, StallReport
from tokenfeed.trainer.stall.table import gain_words, not_measured, shown_causes

__all__ = ["cause_table"]


def cause_table(report: StallReport) -> str:
    """A row for each cause that cost time, the largest first, and one for the work."""
    if (stall := report.stall) is None:
        return f"<p>{escape(not_measured(report).capitalize())}.</p>"
    rows = "".join(_row(name, part) for name, part in shown_causes(report).items())
    return (
        f"<p>{stall:.2%}{_bounds(report.interval)} of "
        f"{report.seconds:,.1f} s in {report.steps:,} steps after the "
        f"warm-up{_at_most(stall, report.at_most)}. "
        f"<span class=soft>{escape(report.method)}.</span></p>"
        '<div class=scroll tabindex="0"><table class=causes><thead><tr><th>cause</th>'
        "<th class=bar></th><th>share</th><th class=wide>likely range</th><th>seconds</th>"
        "<th class=wide>p50 of a step</th><th class=wide>p99</th><th class=wide>longest</th>"
        f"<th>without it</th></tr></thead><tbody>{rows}{_work(1 - stall, report.seconds)}</tbody>"
        "</table></div>"
    )


def _row(name: Cause, part: CauseReport) -> str:
    tails = "".join(
        f"<td class=wide>{_seconds(value)}</td>" for value in (part.p50_s, part.p99_s, part.max_s)
    )
    return (
        f"<tr><th>{name}<span class=soft>{escape(ABOUT[name].meaning)}</span></th>"
        f"{_bar(part.fraction)}<td class=wide>{_spread(part.interval)}</td>"
        f"<td>{part.seconds:,.2f}</td>{tails}<td>{gain_words(part.speed_up - 1)}</td></tr>"
    )


def _work(fraction: float, seconds: float) -> str:
    return (
        f"<tr><th>work</th>{_bar(fraction)}<td class=wide></td><td>{fraction * seconds:,.2f}</td>"
        + "<td class=wide></td>" * 3
        + "<td></td></tr>"
    )


def _bar(fraction: float) -> str:
    width = max(0.5, 100 * fraction)
    return f'<td class=bar><span style="width:{width:.1f}%"></span></td><td>{fraction:.2%}</td>'


def _spread(bounds: Interval | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.2%} to {bounds[1]:.2%}"


def _bounds(bounds: Interval | None) -> str:
    return "" if bounds is None else f" ({_spread(bounds)} likely)"


def _at_most(stall: float, most: float | None) -> str:
    if most is None or most <= stall + 0.001:
        return ""
    return f", at most {most:.2%} with idle time that cannot be seen inside the work"


def _seconds(value: float) -> str:
    if not value:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
