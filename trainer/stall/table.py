"""A stall as people read it, from the part `stall` of a report.json, also of an older one."""

from collections.abc import Mapping
from typing import Any

__all__ = [
    "advice_lines",
    "cause_table",
    "headline",
    "late_rank",
    "main_cause",
    "main_of",
    "rank_table",
    "shown_parts",
    "slowest_line",
]

_TAILS = {"p50_s": "p50", "p95_s": "p95", "p99_s": "p99", "max_s": "max"}
_NAME, _COLUMN = 18, 10
_SHOWN_FROM = 5e-5
"""Less of the time than shows as 0.00 % is no line of the table."""
_MOST_RANKS = 8
_LEAST_COST = 0.005
"""Ranks that differ by less are alike."""


def headline(stall: Mapping[str, Any]) -> str:
    """The stall in a line."""
    fraction, interval = stall["fraction"], stall.get("interval")
    if fraction is None:
        return "not measured: the first steps are warm-up"
    bar = "" if interval is None else f" [{interval[0]:.2%}, {interval[1]:.2%}]"
    line = f"{fraction:.2%}{bar} of {stall['window_seconds']:,.1f} s"
    line += f" {'of GPU time' if stall.get('on_gpu') else 'on the CPU'}"
    line += f", {stall['window_steps']:,} steps"
    at_most = stall.get("at_most")
    if at_most is not None and at_most > fraction + 0.001:
        line += f"; at most {at_most:.2%} with what is not seen"
    return line


def shown_parts(stall: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of causes that show in a table, the largest first."""
    parts = [
        (name, part) for name, part in stall["parts"].items() if part["fraction"] >= _SHOWN_FROM
    ]
    return dict(sorted(parts, key=lambda item: -item[1]["fraction"]))


def cause_table(stall: Mapping[str, Any]) -> list[str]:
    """A line for each cause that cost anything, the largest first, and for the work."""
    parts = shown_parts(stall)
    if stall["fraction"] is None or not parts:
        return []
    work = 1 - stall["fraction"]
    names = "".join(f"{name:>{_COLUMN}}" for name in ("share", "seconds", *_TAILS.values()))
    return [
        f"{'':<{_NAME}}{names}  a step",
        *(_row(name, part) for name, part in parts.items()),
        f"{'work':<{_NAME}}{work:>{_COLUMN}.2%}{work * stall['window_seconds']:>{_COLUMN},.2f}",
    ]


def rank_table(stall: Mapping[str, Any]) -> list[str]:
    """Who the others wait for, and a line for each rank, the slowest first; nothing of one."""
    ranks = [each for each in stall.get("ranks") or () if each["steps"]]
    if not ranks:
        return []
    shown = sorted(ranks, key=lambda each: each["waited_seconds"])[:_MOST_RANKS]
    left = len(ranks) - len(shown)
    return [
        f"ranks    {slowest_line(stall)}",
        f"         {'':<{_NAME}}{'stall':>{_COLUMN}}{'waited':>{_COLUMN}}  most of its own",
        *(f"         {_rank(each)}" for each in shown),
        *([f"         and {left} more, which waited longer"] if left else []),
    ]


def slowest_line(stall: Mapping[str, Any]) -> str:
    """Who the others wait for, and why."""
    if stall.get("slowest_rank") is None:
        return "who keeps the others waiting is not known: not every rank has measured a step"
    slowest = late_rank(stall)
    if slowest is None:
        return "none keeps the others waiting"
    return (
        f"rank {slowest['rank']} keeps the others waiting: {slowest['cause']}, "
        f"{_short(slowest['step_seconds'])} a step more than the quickest ({slowest['cost']:.2%})"
    )


def late_rank(stall: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The slowest rank, if the others lose anything to it."""
    slowest: Mapping[str, Any] | None = stall.get("slowest_rank")
    return None if slowest is None or slowest["cost"] < _LEAST_COST else slowest


def main_of(rank: Mapping[str, Any]) -> str:
    """The largest cause of a rank's own stall, with its seconds a step."""
    own = {cause: idle for cause, idle in rank["causes"].items() if cause != "communication"}
    if not own:
        return ""
    name = max(own, key=own.__getitem__)
    return f"{name} {_short(own[name] / rank['steps'])} a step"


def advice_lines(stall: Mapping[str, Any]) -> list[str]:
    """A line for each piece of advice."""
    return [f"{piece['text']} ({_gain(piece['gain'])})" for piece in stall.get("advice", ())]


def main_cause(fractions: Mapping[str, float]) -> str:
    """The largest cause in a few words; nothing where it is hardly any."""
    name = max(fractions, key=fractions.__getitem__, default="")
    if not name or fractions[name] < 10 * _SHOWN_FROM:
        return ""
    return f" ({name} {fractions[name] * 100:.2f})"


def _row(name: str, part: Mapping[str, Any]) -> str:
    tails = "".join(f"{_short(part.get(key)):>{_COLUMN}}" for key in _TAILS)
    return f"{name:<{_NAME}}{part['fraction']:>{_COLUMN}.2%}{part['seconds']:>{_COLUMN},.2f}{tails}"


def _rank(rank: Mapping[str, Any]) -> str:
    waited = _short(rank["waited_seconds"])
    name = f"rank {rank['rank']}"
    return f"{name:<{_NAME}}{rank['fraction']:>{_COLUMN}.2%}{waited:>{_COLUMN}}  {main_of(rank)}"


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 5e-5 else "0"


def _gain(gain: float | None) -> str:
    return "gain not known" if gain is None else f"gains {gain:.1%} at least"
