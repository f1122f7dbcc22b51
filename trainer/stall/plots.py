"""Plots over the steps of a loop, as SVG: lines or stacked areas, axes, and a table of values."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tokenfeed.pipeline.arithmetic import ceil_div

_LARGEST = 1e100
"""Larger values are left out of plots: arithmetic with them would overflow."""
_MOST_CAUSES = 6
"""Most areas of a plot. A reader cannot tell more apart. Smaller causes are summed."""
_WIDTH, _HEIGHT = 720, 280
_RIGHT, _TOP, _BOTTOM = 36, 24, 66
_LETTER, _WIDE_LETTER = 13.0, 22.0
"""Widths of letters of a label on a phone, where labels are largest relative to the plot: a digit,
and a percent sign or an M."""
_MOST_POINTS = 300
"""Most points of a line."""
_MOST_ROWS = 40
"""Most rows of the table below a plot."""
_LEAST_SPAN = 1e-12
"""Least length of an axis, as a share of its values. On a shorter one, rounding would decide."""
_STEPS = (1, 2, 2.5, 5, 10)
"""Distances of ticks, times a power of ten."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps."""

    name: str
    xs: list[float]
    ys: list[float]

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        self.xs.append(x)
        self.ys.append(y)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to [start, end]. For a vertical axis, `end` is the smaller y coordinate."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(
        cls, values: list[float], start: float, end: float, *, from_zero: bool = False
    ) -> "Scale":
        """The scale of some values, with room around them if they are equal or empty."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        low = min(0.0, low) if from_zero else low
        if high - low <= _LEAST_SPAN * max(abs(low), abs(high), _LEAST_SPAN):
            low, high = (2 * low, 0.0) if low < -_LEAST_SPAN else (0.0, max(high, 0.0) or 1.0)
        return cls(low, high, start, end)

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round numbers from `low` to `high`.

        Scale(0, 0.93, 0, 100).ticks() is [0, 0.2, 0.4, 0.6, 0.8]
        """
        rough = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(times * unit for times in _STEPS if times * unit >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


def compact(value: float) -> str:
    """Format a number in few letters: 1.2M, 350k, 0.05."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def thinned(series: Series, most: int = _MOST_POINTS) -> Series:
    """Return at most `most` points: means of neighbours, at the last of their steps."""
    size = ceil_div(len(series.xs), most)
    if size <= 1:
        return series
    starts = range(0, len(series.xs), size)
    return Series(
        series.name,
        [series.xs[min(a + size, len(series.xs)) - 1] for a in starts],
        [sum(series.ys[a : a + size]) / len(series.ys[a : a + size]) for a in starts],
    )


@dataclass(frozen=True, slots=True)
class Plot:
    """Series over the steps of a run, as lines or as stacked areas."""

    title: str
    reading: str
    """The sentence below the plot: how to read it."""
    all_series: Sequence[Series]
    stacked: bool = False
    """Draw areas on top of each other, from zero; else lines."""
    from_zero: bool = True
    """Begin the axis of lines at zero; else at their lowest value."""
    least: float = 0.0
    """The axis reaches at least this value, so that small values look small."""
    format: Callable[[float], str] = compact

    @property
    def series(self) -> list[Series]:
        """The series that have values, thinned."""
        return [thinned(one) for one in self.all_series if len(one.xs)]

    @property
    def legend(self) -> list[tuple[int, str]]:
        """Number and name of each series, stacked areas from the top. Empty for a single one."""
        numbered = [(number, one.name) for number, one in enumerate(self.series)]
        return [] if len(numbered) == 1 else numbered[::-1] if self.stacked else numbered

    def drawing(self) -> Markup:
        """The elements inside of `svg`."""
        series = self.series
        shown = _stacked(series) if self.stacked else series
        ys = [y for one in shown for y in one.ys]
        steps = [at for one in series for at in one.xs]
        ys += [self.least] if self.least else []
        y = Scale.over(ys, _HEIGHT - _BOTTOM, _TOP, from_zero=self.stacked or self.from_zero)
        labels = {at: self.format(at) for at in y.ticks()}
        left = _GAP + 4 + max(map(_width, labels.values()))
        x = Scale.over(steps, left, _WIDTH - _RIGHT, from_zero=self.stacked)
        draw = _areas if self.stacked else _lines
        return Markup("").join([*_axes(x, y, labels), *draw(shown, x, y)])

    def table(self) -> list[tuple[str, list[str]]]:
        """Step and values of each row of the table."""
        series = self.series
        xs = sorted({at for one in series for at in one.xs})
        known = [dict(zip(one.xs, one.ys, strict=True)) for one in series]
        return [
            (f"{at:,.0f}", [self.format(ys[at]) if at in ys else "" for ys in known])
            for at in xs[:: ceil_div(len(xs), _MOST_ROWS)]
        ]


def _stacked(series: list[Series]) -> list[Series]:
    """Add to each series the ones before. All have the same steps."""
    tops, below = [], [0.0] * len(series[0].xs)
    for one in series:
        below = [low + value for low, value in zip(below, one.ys, strict=True)]
        tops.append(Series(one.name, one.xs, below))
    return tops


_GAP = 10
"""Distance of a label from the plot."""


def _width(label: str) -> float:
    return sum(_WIDE_LETTER if letter in "%MGT" else _LETTER for letter in label)


def _axes(x: Scale, y: Scale, labels: Mapping[float, str]) -> Iterator[Markup]:
    line = Markup('<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>')
    for at, label in labels.items():
        yield line.format(x.start, x.end, y(at))
        yield _text(x.start - _GAP, y(at) + 4, label, "end")
    for at in x.ticks():
        if at == int(at):
            yield _text(x(at), _HEIGHT - _BOTTOM + 30, compact(at), "middle")
    yield _text((x.start + x.end) / 2, _HEIGHT - 8, "step", "middle")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    markup = Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    return markup.format(x, y, anchor, text)


def _lines(series: Sequence[Series], x: Scale, y: Scale) -> Iterator[Markup]:
    """Yield a line for each series; a dot for a single point, which no line would show."""
    for number, one in enumerate(series):
        points = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(one.xs, one.ys, strict=True)]
        if len(points) == 1:
            dot = Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="4"/>')
            yield dot.format(number, x(one.xs[0]), y(one.ys[0]))
        else:
            yield Markup('<path class="line c{}" d="M{}"/>').format(number, "L".join(points))


def _areas(tops: Sequence[Series], x: Scale, y: Scale) -> Iterator[Markup]:
    """Yield stacked areas, the tallest first, so that later areas are drawn on top.

    The plot is a step function: each value holds from the previous step to its own step.
    """
    path = Markup('<path class="area c{}" d="M{:.1f},{:.1f}{}V{:.1f}H{:.1f}Z"/>')
    for number, top in reversed(list(enumerate(tops))):
        levels = "".join(f"V{y(b):.1f}H{x(a):.1f}" for a, b in zip(top.xs, top.ys, strict=True))
        yield path.format(number, x(x.low), y(0), levels, y(0), x(x.low))


def stall_plot(lines: Sequence[tuple[int, Mapping[str, float]]]) -> Plot:
    """Return the plot of stall by cause, from shares of the time since the step before."""
    return Plot(
        "Stall by cause",
        "Share of the time since the point before in which the device did not train. A tall area "
        "is worth looking at: the table above says what to do about its cause.",
        _causes(lines),
        stacked=True,
        format=lambda share: f"{100 * share:.3g}%",
        least=0.01,
    )


def fits(value: float) -> bool:
    """Return whether a value can be drawn."""
    return math.isfinite(value) and abs(value) < _LARGEST


def _causes(lines: Sequence[tuple[int, Mapping[str, float]]]) -> list[Series]:
    """The largest causes, and the sum of the others."""
    totals: dict[str, float] = {}
    for _, causes in lines:
        for cause, share in causes.items():
            totals[cause] = totals.get(cause, 0.0) + share
    named = sorted((cause for cause in totals if totals[cause]), key=lambda cause: -totals[cause])
    shown = named if len(named) <= _MOST_CAUSES + 1 else named[:_MOST_CAUSES]
    groups = {cause: [cause] for cause in shown}
    if len(shown) < len(named):
        groups["the rest"] = named[_MOST_CAUSES:]
    steps: list[float] = [step for step, _ in lines]
    return [
        Series(name, steps, [sum(found.get(cause, 0.0) for cause in causes) for _, found in lines])
        for name, causes in groups.items()
    ]
