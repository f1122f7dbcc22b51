"""The idle accounts turn steps and short traces into idle seconds with an interval, without I/O.

Two marks enclose each bracket of the loop, so the idle seconds in brackets (gaps) are exact. The
idle seconds inside the work cannot be read from marks. They are the work of a step minus its busy
seconds, and short traces at regular times show the busy seconds:

    busy(step)  = shape(size) * ratio(number)
    shape(size) = a line through all traced steps
    ratio(t)    = traced busy seconds / shape of one trace, and a line between two traces
    idle        = sum of work - busy, over the steps in which the host may have been late

Traces are a sample of a speed that changes. Between two traces the speed may have changed at any
moment, so half of the interval is

    1.15 * sqrt(sum over pieces of (change of the ratio * shape of the steps in between)^2)

A piece is the time between two traces. More errors are added as squares: the spread of the steps
within a trace, 0.3 % of busy for traced durations with 0.1 us per kernel for the measured pause
between kernels, unusual steps, steps that are left out, and 5 % of busy for the time long after the
last trace.

A step is proven ahead if the device had not reached its start when its end was queued: then the
host was late nowhere in the step. An unusual step takes 15 % longer than its neighbours: a step
with more kernels and a step in which the host stopped look alike, so only traced steps of this kind
show which share of the extra time is work.

Steps after a trace are left out, since the trace has taken the lead of the host. Per piece, they
count like the steps that are not left out.

Memory is bounded. Steps are folded into sums for each piece between two traces. After 64 traces,
every second one is dropped.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

PROVEN = 0.999
"""A step is proven ahead if this share of its work was queued before it began."""
_HEAVIER = 1.1
"""A traced step with this many times the usual kernels does not count for the ratios."""
UNUSUAL = 1.15
"""A step is unusual if its work takes this many times as long as that of its neighbours."""
_ALIKE = 0.12
"""Two unusual steps are alike if their factors differ by less than this share."""
_REACH = 12
"""Number of neighbours on each side of a step that show what is usual there."""
_LONE = 0.05
"""Share by which busy seconds may be wrong long after the last trace."""
_SYSTEMATIC = 0.003
"""Share by which a traced kernel may take longer or shorter than an untraced one."""
_PAUSE_ERROR = 0.1e-6
"""Seconds by which the measured pause of the device between two kernels may be wrong."""
_EXPOSED = 0.003
"""If traced steps wait for another stream for more than this share, no step is proven ahead."""
_UNLIKE = 0.35
"""Left-out steps may differ from others by this share of the difference of two pieces."""
_MOST_TRACES = 64
"""Most traces that are kept."""
_FOLD_AT = 1024
"""Number of steps after which they are folded into sums."""
_BINS = 1.05 ** np.arange(3, 100)
"""Borders between factors of unusual steps, 5 % apart."""
_SIZE, _WORK = 1, 2
"""Columns of a step: see `Accounts.add`."""
_SUMS = 7
"""Sums of a piece: steps, work, ahead, size, number, size * number, marks. Extra work by factor
follows."""


@dataclass(slots=True)
class Step:
    """The marks of one step. Steps of the warm-up are not added to the accounts."""

    number: int
    """From 0, without gaps, also over steps that are not usable."""
    size: float
    """Token slots, or any number that the work of a step grows with; 1.0 if unknown."""
    work: float
    """Device seconds outside of brackets."""
    ahead: float
    """The part of `work` that was queued before it began."""
    gaps: dict[str, float]
    """Device seconds in brackets, by cause."""
    marks: int
    is_usable: bool = True
    """False while a trace is on, and for the steps that the meter leaves out after a trace."""


@dataclass(slots=True)
class TracedStep:
    """A valid step of a trace, in seconds. The last three are idle seconds inside the work.

    Only the shares of the idle seconds are used: a tracer slows down launches.
    """

    number: int
    size: float
    busy: float
    """Union of the kernels, plus the device's own pause between two kernels."""
    kernels: int
    span: float
    """Work between the borders: `busy` plus idle."""
    trace: int
    waiting: float = 0.0
    exchanging: float = 0.0
    copying: float = 0.0


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle seconds of all steps so far, left-out steps included."""

    steps: int
    seconds: float
    gaps: dict[str, float]
    """Exact idle seconds in brackets, by cause."""
    inside: tuple[float, float, float]
    """Idle seconds inside the work: likely, least, most. The least may be below 0: marks take lead
    that is missing in a later gap."""
    inside_causes: dict[str, float]
    """`inside[0]`, split into launch, wait, communication and copy."""
    is_inside_measured: bool
    """False without a valid trace: then `inside` is (0, 0, the work that is not proven ahead)."""


class Accounts:
    """Add steps and traced steps; read the idle seconds of the run so far at any time.

    Args:
        mark_seconds: Host seconds that a mark takes.
        factor: Scales the part of the interval that comes from changes between traces.

    Example:
        A run of 100 steps of 10 ms has two traces, in which a step is busy for 7 ms and then for
        8 ms. No step is proven ahead. Then 250 ms are idle. Half of the interval is about
        1.15 * 100 steps * 1 ms = 115 ms.
    """

    def __init__(self, mark_seconds: float = 13e-6, factor: float = 1.15) -> None:
        self._mark_seconds, self._factor = mark_seconds, factor
        self.slower = 0.0
        """Share by which steps were slower after the first trace; it widens the interval."""
        self._gaps: dict[str, list[list[float]]] = {}
        """By cause and piece: seconds in usable steps, the number of such steps, seconds in others.
        A piece lies between two traces."""
        self._left_out = np.zeros(1)
        """By piece: steps that are not usable."""
        self._recent: list[tuple[float, ...]] = []
        """Usable steps not folded yet, and before them `_context` folded neighbours."""
        self._context = 0
        self._traced: list[TracedStep] = []
        self._times: list[float] = []
        """The mean step number of each trace."""
        self._sums = np.zeros((1, 2, _SUMS + len(_BINS)))
        """By piece between traces, for steps behind and steps proven ahead: `_SUMS` and `_BINS`."""

    def add(self, step: Step) -> None:
        """Add a step. Numbers must grow."""
        for cause, seconds in step.gaps.items():
            if cause not in self._gaps:
                self._gaps[cause] = [[0.0, 0.0, 0.0] for _ in self._left_out]
            sums = self._gaps[cause][-1]
            if step.is_usable:
                sums[0] += seconds
                sums[1] += 1
            else:
                sums[2] += seconds
        if not step.is_usable:
            self._left_out[-1] += 1
            return
        row = (step.number, step.size, step.work, step.ahead, step.marks, sum(step.gaps.values()))
        self._recent.append(row)
        if len(self._recent) >= _FOLD_AT:
            end = len(self._recent) - _REACH
            self._sums += self._tally(end)
            del self._recent[: end - _REACH]
            self._context = _REACH

    def add_trace(self, steps: list[TracedStep]) -> None:
        """Add the valid steps of one trace. Traces come in order."""
        if not steps:
            return
        self._traced += steps
        self._times.append(sum(step.number for step in steps) / len(steps))
        self._sums, self._left_out = _longer(self._sums), _longer(self._left_out)
        for sums in self._gaps.values():
            sums.append([0.0, 0.0, 0.0])
        if len(self._times) > _MOST_TRACES:
            self._thin()

    def read(self) -> Idle:
        """Return the idle seconds of all steps so far."""
        sums = self._sums + self._tally(len(self._recent))
        used = sums[:, :, 0].sum(1)
        steps = float(used.sum() + self._left_out.sum())
        # Left-out steps are like the usable ones of the same piece. More steps are left out where
        # the host is ahead, so one factor for the whole run would be biased.
        scale = np.where(used > 0, 1 + self._left_out / np.maximum(1, used), 0.0)
        scale *= steps / max(1.0, float((scale * used).sum()))
        sums *= scale[:, None, None]
        # Gaps that occur in most steps are scaled. Rare gaps of left-out steps are known.
        gaps, usual_gaps = dict[str, float](), np.zeros(len(used))
        for cause, pieces in self._gaps.items():
            each = np.array(pieces)
            if 2 * each[:, 1].sum() > used.sum():
                usual_gaps += scale * each[:, 0]
                gaps[cause] = float(scale @ each[:, 0])
            else:
                gaps[cause] = float(each[:, ::2].sum())
        totals = sums[:, :, :_SUMS].sum(0)
        outside, unproven = sum(gaps.values()), float(totals[0, 1] - totals[0, 2])
        is_measured = bool(self._times and used.sum())
        inside = self._inside(sums, usual_gaps) if is_measured else (0.0, 0.0, unproven)
        return Idle(
            steps=round(steps),
            seconds=float(totals[:, 1].sum()) + outside,
            gaps=gaps,
            inside=inside,
            inside_causes=self._split(inside[0]),
            is_inside_measured=is_measured,
        )

    def _inside(self, sums: Array, gaps: Array) -> tuple[float, float, float]:
        """Return the idle seconds inside the work: likely, least, most."""
        start, slope = _line(self._traced)
        times, ratios, pieces = self._ratios(start, slope)
        marks = sums[:, :, 6].sum()
        is_exposed = self._has_exposed_streams()
        # With exposed streams the host may be early, and yet the device waits.
        behind = sums.sum(1) if is_exposed else sums[:, 0]
        by_piece = _joined(behind, pieces)
        steps, work, ahead, size, number, both = by_piece[:, :6].T
        shape, shape_by_number = start * steps + slope * size, start * number + slope * both
        slopes = np.zeros(len(times) + 1)
        slopes[1:-1] = np.diff(ratios) / np.diff(times)
        left = np.concatenate([[0], np.arange(len(times))])
        busy = shape * (ratios[left] - slopes * times[left]) + slopes * shape_by_number
        guess = busy.sum() / max(1e-12, work.sum()) / 2
        least, likely, most = self._extra_work(
            by_piece[:, _SUMS:].sum(0), start, slope, (times, ratios), guess
        )
        kernels = sum(step.kernels for step in self._traced) / len(self._traced)
        tracer = _SYSTEMATIC * busy.sum() + _PAUSE_ERROR * kernels * steps.sum()
        spread = self._spread(start, slope) * shape.sum()
        half = np.hypot(np.hypot(self._half(shape, ratios), spread), tracer)
        idle, room = (work - busy).sum(), work.sum() if is_exposed else (work - ahead).sum()
        idle -= likely
        low = idle - np.hypot(half, most - likely) - self.slower * work.sum()
        # A host that is clearly behind loses at least half of the time of its marks.
        high = idle + np.hypot(half, likely - least) - min(0.5 * marks, 0.125 * max(0.0, idle))
        # The marks made the device idle, or took lead that is missing in a later gap.
        low, point, high = _clip(low, room) - marks, _clip(idle - marks, room), _clip(high, room)
        # Steps after a trace are left out. They may be unlike the others by as much as two
        # neighbouring pieces differ.
        rates = (work - busy + _joined(gaps, pieces)) / np.maximum(
            1, _joined(sums[:, :, 0].sum(1), pieces)
        )
        unlike = _UNLIKE * float(
            np.linalg.norm(np.diff(rates) * _joined(self._left_out, pieces)[1:])
        )
        low = point - np.hypot(point - low, unlike)
        return float(point), float(low), float(point + np.hypot(high - point, unlike))

    def _tally(self, end: int) -> Array:
        """Return sums of the recent steps up to `end`, by piece."""
        sums = np.zeros_like(self._sums)
        if end <= self._context:
            return sums
        table = np.array(self._recent, float)
        start, slope = _line(self._traced)
        shape = start + slope * table[:, _SIZE]
        pace = _robust_line(shape, table[:, _WORK])
        level = (pace * _medians(table[:, _WORK] / pace))[self._context : end]
        number, size, work, ahead, marks, gaps = table[self._context : end].T
        is_ahead = (ahead >= PROVEN * work).astype(int)
        piece = np.searchsorted(self._times, number)
        marks *= self._mark_seconds
        # Marks of a host with lead cost at most a later gap.
        marks = np.where(is_ahead, np.minimum(gaps, marks), marks)
        rows = np.stack(
            [np.ones_like(work), work, ahead, size, number, size * number, marks], axis=1
        )
        np.add.at(sums[:, :, :_SUMS], (piece, is_ahead), rows)
        factor = work / np.maximum(level, 1e-12)
        odd = factor > UNUSUAL
        bins = np.clip(np.searchsorted(_BINS, factor[odd]), 1, len(_BINS) - 1)
        np.add.at(sums, (piece[odd], is_ahead[odd], _SUMS + bins), (work - level)[odd])
        return sums

    def _ratios(self, start: float, slope: float) -> tuple[Array, Array, npt.NDArray[np.intp]]:
        """Return the times and ratios of the traces, and a number for the piece after each trace.

        A trace of nothing but heavier steps has no ratio, so its two pieces become one.
        """
        usual = _HEAVIER * float(np.median([step.kernels for step in self._traced]))
        busy: dict[int, list[float]] = {step.trace: [0.0, 0.0] for step in self._traced}
        for step in self._traced:
            if step.kernels <= usual:
                busy[step.trace][0] += step.busy
                busy[step.trace][1] += start + slope * step.size
        table = np.array(list(busy.values()))
        has_ratio = table[:, 1] > 0
        times = np.array(self._times)[has_ratio]
        return times, table[has_ratio, 0] / table[has_ratio, 1], np.cumsum([0, *has_ratio])

    def _half(self, shape: Array, ratios: Array) -> float:
        """Return half of the interval that comes from changes between traces, in seconds.

        A change by d at an unknown moment of a piece is an error of d / sqrt(12) of the piece. A
        speed that comes and goes errs by d / sqrt(2). The factor is twice a value between the two.
        """
        pieces = shape[1:-1].copy()
        # Nothing is known of a speed long after the last trace.
        unseen = float(shape[-1] - 2 * (pieces.mean() if len(pieces) else 0.0))
        unseen = _LONE * float(ratios[-1]) * max(0.0, unseen + (0.0 if len(pieces) else shape[0]))
        if len(pieces):
            pieces[0] += shape[0]
            pieces[-1] += shape[-1]
        return float(np.hypot(self._factor * np.linalg.norm(np.diff(ratios) * pieces), unseen))

    def _spread(self, start: float, slope: float) -> float:
        """Return the error of the mean ratio because traced steps differ: their deviation from the
        other steps of the same trace, over the root of their number."""
        usual = _HEAVIER * float(np.median([step.kernels for step in self._traced]))
        ratios: dict[int, list[float]] = {}
        for step in self._traced:
            if step.kernels <= usual:
                shape = start + slope * step.size
                ratios.setdefault(step.trace, []).append(step.busy / max(1e-12, shape))
        variances = [np.var(each, ddof=1) for each in ratios.values() if len(each) > 1]
        count = sum(map(len, ratios.values()))
        return float(np.sqrt(np.mean(variances) / count)) if variances else 0.0

    def _extra_work(
        self, extra: Array, start: float, slope: float, line: tuple[Array, Array], guess: float
    ) -> tuple[float, float, float]:
        """Return seconds of work in the extra time of unusual steps: least, likely, most."""
        sizes = start + slope * np.array([step.size for step in self._traced])
        numbers, busy, kernels, spans = np.array(
            [(step.number, step.busy, step.kernels, step.span) for step in self._traced]
        ).T
        levels = _robust_line(sizes, spans)
        # A host that is slow for a while is slow in all steps of a trace: no step is unusual then.
        traces = np.array([step.trace for step in self._traced])
        for trace in np.unique(traces):
            same = traces == trace
            levels[same] *= max(1.0, float((spans / levels)[same].min())) if same.sum() > 1 else 1.0
        added = busy - sizes * np.interp(numbers, *line)
        odd = (spans > UNUSUAL * levels) | (kernels > _HEAVIER * np.median(kernels))
        factors = (spans / levels)[odd]
        known = np.clip(added[odd] / np.maximum(spans - levels, 1e-9)[odd], 0.0, 1.0)
        least = likely = most = 0.0
        for seconds, factor in zip(extra, _BINS, strict=True):
            alike = known[abs(factors - factor) < _ALIKE * factor]
            if len(alike):
                slack = 0.2 / len(alike)
                least += seconds * max(0.0, alike.min() - slack)
                likely += seconds * alike.mean()
                most += seconds * min(1.0, alike.max() + slack)
            else:
                likely, most = likely + seconds * min(1.0, guess), most + seconds
        return least, likely, most

    def _has_exposed_streams(self) -> bool:
        exposed = sum(step.exchanging + step.copying for step in self._traced)
        return exposed > _EXPOSED * sum(step.span for step in self._traced)

    def _split(self, inside: float) -> dict[str, float]:
        """Divide the idle seconds inside the work by the shares that the traces show."""
        idle = sum(max(0.0, step.span - step.busy) for step in self._traced)
        shares = {
            "wait": sum(step.waiting for step in self._traced) / max(1e-12, idle),
            "communication": sum(step.exchanging for step in self._traced) / max(1e-12, idle),
            "copy": sum(step.copying for step in self._traced) / max(1e-12, idle),
        }
        shares["launch"] = max(0.0, 1 - sum(shares.values()))
        return {cause: inside * share / sum(shares.values()) for cause, share in shares.items()}

    def _thin(self) -> None:
        """Drop every second trace, and join the pieces on its two sides."""
        traces = sorted({step.trace for step in self._traced})
        kept = set(traces[::2])
        self._traced = [step for step in self._traced if step.trace in kept]
        self._times = self._times[::2]
        piece = (np.arange(len(self._sums)) + 1) // 2
        self._sums, self._left_out = _joined(self._sums, piece), _joined(self._left_out, piece)
        for cause, sums in self._gaps.items():
            self._gaps[cause] = _joined(np.array(sums), piece).tolist()


def _joined(sums: Array, piece: npt.NDArray[np.intp]) -> Array:
    """Return sums of pieces that are joined by these numbers."""
    joined = np.zeros((int(piece[-1]) + 1, *sums.shape[1:]))
    np.add.at(joined, piece, sums)
    return joined


def _line(traced: list[TracedStep]) -> tuple[float, float]:
    """Return busy seconds as a line over sizes: start and slope, neither below 0."""
    if not traced:
        return 0.0, 1.0
    sizes, busy = np.array([(step.size, step.busy) for step in traced], float).T
    most = busy.mean() / sizes.mean()
    if len(sizes) < 4 or sizes.std() < 0.01 * sizes.mean():
        return 0.0, most
    slope = min(max(0.0, float(np.cov(sizes, busy)[0, 1] / sizes.var(ddof=1))), most)
    return busy.mean() - slope * sizes.mean(), slope


def _robust_line(sizes: Array, seconds: Array) -> Array:
    """Return the usual seconds of each size: a line from small to large sizes, by medians.

    The line is level if the host sets the pace, and steep if the device does. Steps that stop, or
    have more work, do not move it.
    """
    middle = float(np.median(seconds))
    least, most = np.quantile(sizes, [0.33, 0.67])
    small, large = sizes <= least, sizes >= most
    run = np.median(sizes[large]) - np.median(sizes[small])
    if run < 0.02 * most:
        return np.full(len(sizes), max(middle, 1e-12))
    slope = float(np.median(seconds[large]) - np.median(seconds[small])) / float(run)
    line = float(np.median(seconds - slope * sizes)) + slope * sizes
    return np.maximum(line, 0.1 * middle + 1e-12, dtype=np.float64)


def _longer(sums: Array) -> Array:
    """Return sums with a row for another piece."""
    return np.concatenate([sums, np.zeros_like(sums[:1])])


def _medians(values: Array) -> Array:
    """Return the median of the neighbourhood of each value."""
    padded = np.pad(values, _REACH, mode="reflect" if len(values) > _REACH else "edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _REACH + 1), axis=1)


def _clip(seconds: float, most: float) -> float:
    return min(max(0.0, seconds), most)
