"""The stall by cause, as a table with bars."""

from collections.abc import Sequence
from html import escape
from typing import Any

from tokenfeed.trainer.stall.causes import ABOUT
from tokenfeed.trainer.stall.table import shown_parts

__all__ = ["cause_table"]

_MEANINGS: dict[str, str] = {cause: about.meaning for cause, about in ABOUT.items()}


def cause_table(report: dict[str, Any]) -> str:
    """A row for each cause that cost anything, the largest first, and one for the work."""
    stall = report["stall"]
    if stall["fraction"] is None:
        return "<p>Not measured: the first steps are warm-up, and the run had no others.</p>"
    work = {"fraction": 1 - stall["fraction"], "seconds": stall["window_seconds"]}
    work["seconds"] *= work["fraction"]
    rows = "".join(_row(name, part) for name, part in [*shown_parts(stall).items(), ("work", work)])
    return (
        f"<p>{stall['fraction']:.2%}{_bounds(stall.get('interval'))} of "
        f"{stall['window_seconds']:,.1f} s in {stall['window_steps']:,} steps after the "
        f"warm-up{_at_most(stall)}. "
        f"<span class=soft>{escape(stall['method'])}.</span></p>"
        '<div class=scroll tabindex="0"><table class=causes><thead><tr><th>cause</th>'
        "<th class=bar></th><th>share</th><th class=wide>95 of 100 runs</th><th>seconds</th>"
        "<th class=wide>p50 of a step</th><th class=wide>p99</th><th class=wide>longest</th>"
        f"<th>without it</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(name: str, part: dict[str, Any]) -> str:
    width = max(0.5, 100 * part["fraction"])
    spread, gain = part.get("interval"), part.get("speed_up")
    tails = "".join(
        f"<td class=wide>{_seconds(part.get(key))}</td>" for key in ("p50_s", "p99_s", "max_s")
    )
    return (
        f"<tr><th>{escape(name)}{_meaning(name)}</th>"
        f'<td class=bar><span style="width:{width:.1f}%"></span></td>'
        f"<td>{part['fraction']:.2%}</td><td class=wide>{_spread(spread)}</td>"
        f"<td>{part['seconds']:,.2f}</td>{tails}"
        f"<td>{'' if gain is None else f'&times; {gain:.3f}'}</td></tr>"
    )


def _meaning(name: str) -> str:
    """Nothing of the work, and of what an older or a newer tokenfeed has measured."""
    return f"<span class=soft>{escape(_MEANINGS[name])}</span>" if name in _MEANINGS else ""


def _spread(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.2%} to {bounds[1]:.2%}"


def _bounds(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f" ({_spread(bounds)} in 95 of 100 such runs)"


def _at_most(stall: dict[str, Any]) -> str:
    most = stall.get("at_most")
    if most is None or most <= stall["fraction"] + 0.001:
        return ""
    return f", at most {most:.2%} with what cannot be seen inside the work"


def _seconds(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
