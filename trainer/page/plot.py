"""Plots as text: SVG with a sentence that says how to read it, and the values as a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.trainer.page.scale import Scale, short

__all__ = ["Plot", "Series", "draw", "thinned"]

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 46
_MOST_POINTS = 300
_MOST_ROWS = 40


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Plot:
    """What a plot shows; nothing where no series has a value."""

    title: str
    reading: str
    """The sentence below it: how to read it."""
    series: Sequence[Series]
    stacked: bool = False
    """Areas on top of each other, from zero; else lines."""
    from_zero: bool = True
    """Lines too; else their lowest value is the bottom."""
    format: Callable[[float], str] = short


def thinned(series: Series, most: int = _MOST_POINTS) -> Series:
    """At most so many points: means of neighbours, at the last of their steps."""
    size = ceil_div(len(series.xs), most)
    if size <= 1:
        return series
    starts = range(0, len(series.xs), size)
    return Series(
        series.name,
        [series.xs[min(a + size, len(series.xs)) - 1] for a in starts],
        [sum(series.ys[a : a + size]) / len(series.ys[a : a + size]) for a in starts],
    )


def draw(plot: Plot) -> str:
    """A `figure`; empty where there is nothing to see."""
    series = [thinned(one) for one in plot.series if len(one.xs)]
    if not series:
        return ""
    shown = _stacked(series) if plot.stacked else series
    ys = [y for one in shown for y in one.ys]
    steps = [at for one in series for at in one.xs]
    x = Scale.over(steps, _LEFT, _WIDTH - _RIGHT, from_zero=plot.stacked)
    y = Scale.over(ys, _HEIGHT - _BOTTOM, _TOP, from_zero=plot.stacked or plot.from_zero)
    parts = [_axes(x, y, plot.format)]
    parts += _areas(shown, x, y) if plot.stacked else _lines(shown, x, y)
    title = escape(plot.title)
    return (
        f'<figure tabindex="0"><figcaption><h3>{title}</h3></figcaption>'
        f"{_legend(series, stacked=plot.stacked)}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg><p>{escape(plot.reading)}</p>{_values(series, plot)}</figure>"
    )


def _stacked(series: list[Series]) -> list[Series]:
    """Each on top of those before; all have the same steps."""
    tops, below = [], [0.0] * len(series[0].xs)
    for one in series:
        below = [low + value for low, value in zip(below, one.ys, strict=True)]
        tops.append(Series(one.name, one.xs, below))
    return tops


def _axes(x: Scale, y: Scale, form: Callable[[float], str]) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    rows = [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">'
        f"{form(at)}</text>"
        for at in y.ticks()
    ]
    columns = [
        f'<text class="tick" x="{x(at):.1f}" y="{bottom + 20}" text-anchor="middle">'
        f"{short(at)}</text>"
        for at in x.ticks()
        if at == int(at)
    ]
    middle = (_LEFT + right) / 2
    name = f'<text class="tick" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>'
    return "".join([*rows, *columns, name])


def _path(series: Series, x: Scale, y: Scale) -> str:
    return "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(series.xs, series.ys, strict=True))


def _lines(series: Sequence[Series], x: Scale, y: Scale) -> list[str]:
    """A single point is a dot: a line of it would not be seen."""
    return [
        f'<circle class="dot c{number}" cx="{x(one.xs[0]):.1f}" cy="{y(one.ys[0]):.1f}" r="4"/>'
        if len(one.xs) == 1
        else f'<path class="line c{number}" d="M{_path(one, x, y)}"/>'
        for number, one in enumerate(series)
    ]


def _areas(tops: Sequence[Series], x: Scale, y: Scale) -> list[str]:
    """From the highest down, each over the ones behind it."""
    return [
        f'<path class="area c{number}" d="M{_steps(top, x, y)}V{y(0):.1f}H{x(x.low):.1f}Z"/>'
        for number, top in reversed(list(enumerate(tops)))
    ]


def _steps(top: Series, x: Scale, y: Scale) -> str:
    """Each value is of the steps since the one before: level up to its step."""
    levels = "".join(f"V{y(b):.1f}H{x(a):.1f}" for a, b in zip(top.xs, top.ys, strict=True))
    return f"{x(x.low):.1f},{y(0):.1f}{levels}"


def _legend(series: Sequence[Series], *, stacked: bool) -> str:
    """What is what, in the order of the areas from the top; a single line has the title's name."""
    if len(series) == 1:
        return ""
    numbered = list(enumerate(series))
    shape = '<rect class="area c{}" width="24" height="12"/>'
    if not stacked:
        shape = '<path class="line c{}" d="M0,6H24"/>'
    items = "".join(
        f'<li><svg viewBox="0 0 24 12">{shape.format(number)}</svg>{escape(one.name)}</li>'
        for number, one in (reversed(numbered) if stacked else numbered)
    )
    return f"<ul class=legend>{items}</ul>"


def _values(series: Sequence[Series], plot: Plot) -> str:
    """The same as a table, for who cannot see it or wants the numbers."""
    xs = sorted({at for one in series for at in one.xs})
    xs = xs[:: ceil_div(len(xs), _MOST_ROWS)]
    known = [dict(zip(one.xs, one.ys, strict=True)) for one in series]
    head = "".join(f"<th>{escape(one.name)}</th>" for one in series)
    rows = "".join(
        f"<tr><th>{at:,.0f}</th>"
        + "".join(f"<td>{plot.format(ys[at]) if at in ys else ''}</td>" for ys in known)
        + "</tr>"
        for at in xs
    )
    return (
        "<details><summary>values</summary><table><thead><tr><th>step</th>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></details>"
    )
