"""report.html of a run, from the files in its folder: figures, stall by cause, what to change, and
plots over the steps as SVG. The template adds titles and tables."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import CONFIG_FILE, METRICS_FILE, REPORT_FILE
from tokenfeed.trainer.report.run_files import MetricsLine, Report, decode_lines, duration
from tokenfeed.trainer.stall.stall_page import render_page, save_page, stall_cards
from tokenfeed.trainer.stall.stall_report import StallReport, share_of

_LARGEST = 1e100
"""Larger values are left out of plots: arithmetic with them would overflow."""
_MOST_CAUSES = 6
"""Largest number of areas that a reader can distinguish. Smaller causes are summed."""
_WIDTH, _HEIGHT = 720, 260
_RIGHT, _TOP, _BOTTOM = 36, 12, 46
_LETTER = 13.0
"""Width of a letter of a label on a phone, where labels are largest relative to the plot."""
_MOST_POINTS = 300
_MOST_ROWS = 40
_LEAST_SPAN = 1e-12
"""Relative to the values. Over a smaller span, rounding would place them anywhere."""
_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Series:
    """Values over steps."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


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


def short(value: float) -> str:
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
    format: Callable[[float], str] = short

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
        left = _LETTER * (1 + max(map(len, labels.values())))
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


def _axes(x: Scale, y: Scale, labels: Mapping[float, str]) -> Iterator[Markup]:
    line = Markup('<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>')
    for at, label in labels.items():
        yield line.format(x.start, x.end, y(at))
        yield _text(x.start - 6, y(at) + 4, label, "end")
    for at in x.ticks():
        if at == int(at):
            yield _text(x(at), _HEIGHT - _BOTTOM + 20, short(at), "middle")
    yield _text((x.start + x.end) / 2, _HEIGHT - 6, "step", "middle")


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


class _LoopReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """report.json of a meter, which has no other fields."""

    stall: StallReport


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The files of a run."""

    folder: Path
    stall: StallReport
    report: Report | None = None
    """None for a loop that only has a meter."""
    lines: list[MetricsLine] = field(default_factory=list)
    """metrics.jsonl."""
    config: str = ""
    """config.yaml."""

    @classmethod
    def of_folder(cls, folder: Path) -> "RunData":
        """Read the folder of a run, or of the report of a `StallMeter`.

        Raises:
            ConfigError: The folder holds no report, or a report that cannot be decoded.
        """
        path, config = folder / REPORT_FILE, _read(folder / CONFIG_FILE)
        try:
            data = path.read_bytes()
            if not config:
                with contextlib.suppress(ValueError):
                    loop = msgspec.json.decode(data, type=_LoopReport)
                    return cls(folder=folder, stall=loop.stall)
            report = Report.of_json(data, folder)
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} holds no {REPORT_FILE}. Give the folder of a run of `train`, or the one "
                "that a StallMeter has written its report to."
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}. Give the folder of a run.") from error
        except (ValueError, RecursionError) as error:
            again = f" `train --resume --run-dir {folder}` writes it again." if config else ""
            raise ConfigError(
                f"{path} is damaged, or from another version of tokenfeed ({error}).{again}"
            ) from error
        lines = decode_lines(_read(folder / METRICS_FILE).encode(), MetricsLine)
        return cls(folder=folder, stall=report.stall, report=report, lines=lines, config=config)

    def summary(self) -> str:
        """The report in a few lines, as the run printed it."""
        return str(self.stall) if self.report is None else self.report.summary()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def write_page(folder: Path) -> Path:
    """Write report.html of a run, atomically, from the files in its folder.

    Raises:
        ConfigError: The folder holds no report.
    """
    return save_page(folder, page_of(RunData.of_folder(folder)))


def page_of(run: RunData) -> str:
    """Return the page as text. It loads nothing from anywhere."""
    return render_page(
        run.folder,
        run.stall,
        cards=None if run.report is None else _cards(run.report),
        samples=next((line for line in reversed(run.lines) if line.samples), None),
        plots=[plot for plot in _plots(run) if plot.series],
        lengths=_lengths(run.report.rows_by_length) if run.report else [],
        report=run.report,
        config=run.config,
    )


def _cards(report: Report) -> dict[str, str]:
    return {
        **stall_cards(report.stall),
        "padding": share_of(report.padding),
        "loss": _figure(report.loss_last),
        "validation loss": _figure(report.validation_loss_last),
        "steps": f"{report.steps:,}",
        "steps a second": "" if report.steps_per_s is None else f"{report.steps_per_s:,.3g}",
        "rows a second": "" if report.rows_per_s is None else f"{report.rows_per_s:,.3g}",
        "an epoch": "" if report.epoch_seconds is None else duration(report.epoch_seconds),
        "peak GPU memory": ""
        if report.peak_gpu_bytes is None
        else f"{report.peak_gpu_bytes / 1e9:.2f} GB",
        "real tokens": short(report.tokens),
        **_metrics(report),
    }


def _metrics(report: Report) -> dict[str, str]:
    """Metrics of the last split that was measured. The loss has a card already."""
    split = next(reversed(report.metrics), "")
    return {
        f"{name.replace('_', ' ')}, {split}": f"{value:.4g}"
        for name, value in report.metrics.get(split, {}).items()
        if name != "loss" and value is not None
    }


def _lengths(counts: list[int]) -> list[tuple[str, int, float]]:
    """Return lengths of rows, how many rows have them, and this number relative to the largest.

    Entry k of `counts` counts the rows of 2**k up to 2**(k+1) - 1 tokens.
    """
    known = [power for power, rows in enumerate(counts) if rows]
    powers = range(known[0], known[-1] + 1) if known else range(0)
    names = {power: f"{1 << power:,} to {(2 << power) - 1:,}" if power else "1" for power in powers}
    return [(name, counts[power], counts[power] / max(counts)) for power, name in names.items()]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _plots(run: RunData) -> list[Plot]:
    return [
        Plot(
            "Stall by cause",
            "Share of the time between two progress lines in which the device had nothing to do. "
            "A tall area is worth looking at: the table above says what to do about its cause.",
            _causes(_stall_causes(run)),
            stacked=True,
            format=lambda share: f"{100 * share:.3g}%",
            least=0.01,
        ),
        Plot(
            "Real tokens a second",
            "Without padding, stall included. It should be flat: a dip is an evaluation, a "
            "checkpoint, or another program on the machine.",
            [_series(run, "tokens/s", "real_tokens_per_s")],
        ),
        Plot(
            "Loss",
            "Mean per target since the line before, and on the validation split. If the second "
            "rises while the first falls, the model memorizes its training data.",
            [_series(run, "training", "loss"), _series(run, "validation", "validation_loss")],
            from_zero=False,
        ),
        Plot(
            "Seconds a step",
            "Half of the steps since the line before took less than p50; max is the longest one. "
            "A max far above p50 is a step that waited.",
            [_series(run, "p50", "step_seconds.p50"), _series(run, "max", "step_seconds.max")],
        ),
        Plot(
            "Gradient norm",
            "Before clipping. A jump is an unusual batch, or a learning rate that is too high.",
            [_series(run, "norm", "gradient_norm")],
        ),
        Plot(
            "Learning rate",
            "From the schedule.",
            [_series(run, "rate", "learning_rate")],
            format=lambda rate: f"{rate:.2g}",
        ),
        Plot(
            "Load of the machine",
            "Share of the time in which the GPU and the processors worked, and share of the "
            "machine's memory in use. A GPU below 70 % waits: the table above lists what for.",
            [
                _series(run, "GPU busy", "gpu_busy"),
                _series(run, "processors", "cpu_busy"),
                _series(run, "memory of the machine", "ram_used"),
            ],
            format=lambda share: f"{share:.0%}",
        ),
        Plot(
            "GPU memory, GB",
            "In use by all processes. Near the size of the GPU, running out of memory is near too.",
            [
                _series(run, "in use", "gpu_bytes", factor=1e-9),
                _series(run, "there is", "gpu_total_bytes", factor=1e-9),
            ],
        ),
    ]


def _series(run: RunData, name: str, path: str, factor: float = 1.0) -> Series:
    """Return one value of each line over the steps. Lines without the value are left out.

    Args:
        run: The run.
        name: Name of the series.
        path: Field of `MetricsLine`, or of an object in it, as in "step_seconds.p50".
        factor: Multiplies the values.
    """
    found = [(line.step, _value_at(line, path)) for line in run.lines]
    known = [(step, value) for step, value in found if value is not None and _fits(value)]
    return Series(name, [step for step, _ in known], [factor * value for _, value in known])


def _stall_causes(run: RunData) -> list[tuple[int, dict[str, float]]]:
    """Step and stall by cause of each line that has them."""
    return [
        (line.step, {cause: share for cause, share in causes.items() if _fits(share)})
        for line in run.lines
        if (causes := line.stall_causes)
    ]


def _value_at(line: MetricsLine, path: str) -> float | None:
    found: Any = line
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return found if isinstance(found, (int, float)) else None


def _fits(value: float) -> bool:
    return math.isfinite(value) and abs(value) < _LARGEST


def _causes(lines: list[tuple[int, dict[str, float]]]) -> list[Series]:
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
    steps = [step for step, _ in lines]
    return [
        Series(name, steps, [sum(found.get(cause, 0.0) for cause in causes) for _, found in lines])
        for name, causes in groups.items()
    ]
