"""The idle accounts turn steps and short traces into idle seconds with an interval, without I/O.

Two marks enclose each bracket of the loop, so the idle seconds in brackets (gaps) are exact. The
idle seconds inside the work cannot be read from marks. They are the work of a step minus its busy
seconds, and short traces at regular times show the busy seconds:

    busy(step)  = shape(size) * ratio(number)
    shape(size) = a line through all traced steps
    ratio(t)    = traced busy seconds / shape of one trace, and a line between two traces
    idle        = sum of work - busy, over the steps in which the host may have been late

Traces are a sample of a speed that changes. Between two traces the speed may have changed at any
moment. A piece is the time between two traces, and its change is the change of the ratio times the
shape of its steps. Half of the interval is

    sqrt((0.3 + 1.2 / pieces) * sum of squared changes + turns)

The turns are products of successive changes with opposite signs: a speed that comes and goes is
seen less well than one that changes once. More errors are added as squares: 1.8 standard deviations
of the steps within a trace and of left-out steps, 0.3 % of busy for traced durations with 0.1 us
per kernel for the measured pause between kernels, unusual steps, and 5 % of busy for the time long
after the last trace.

A step is proven ahead if the device had not reached its start when its end was queued: then the
host was late nowhere in the step. An unusual step takes 15 % longer than its neighbours: a step
with more kernels and a step in which the host stopped look alike, so only traced steps of this kind
show which share of the extra time is work.

Steps after a trace are left out, since the trace has taken the lead of the host. Neighbours stand
for them, mostly those on the side whose sizes are like theirs. How well neighbours stand for a
block of steps is seen at the other steps.

Memory is bounded: each 1,024 steps are folded into sums for each piece.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.reading import StallReading

Array = npt.NDArray[np.float64]

PROVEN = 0.999
"""A step is proven ahead if this share of its work was queued before it began."""
UNUSUAL = 1.15
"""A step is unusual if its work takes this many times as long as that of its neighbours."""
_HEAVIER = 1.1
"""A traced step with this many times the usual kernels does not count for the ratios."""
_ALIKE = 0.12
"""Two unusual steps are alike if their factors differ by less than this share."""
_REACH = 12
"""Number of neighbours on each side of a step that show what is usual there."""
_STAND_INS = 16
"""Number of neighbours on each side that stand for a step that is left out."""
_ONCE, _FEW_PIECES = 0.3, 1.2
"""Shares of the squared changes that count if the speed changes once: of any number of pieces, and
more of few."""
_DEVIATIONS = 1.8
"""Standard deviations of what is sampled that are half of an interval."""
_LONE = 0.05
"""Share by which busy seconds may be wrong long after the last trace."""
_SYSTEMATIC = 0.003
"""Share by which a traced kernel may take longer or shorter than an untraced one."""
_PAUSE_ERROR = 0.1e-6
"""Seconds by which the measured pause of the device between two kernels may be wrong."""
_EXPOSED = 0.003
"""If traced steps wait for another stream for more than this share, no step is proven ahead."""
_FOLD_AT = 1024
"""Number of steps after which they are folded into sums."""
_BINS = 1.05 ** np.arange(3, 100)
"""Borders between factors of unusual steps, 5 % apart."""
_COLUMNS = 7
"""Sums of a piece: steps, work, ahead, size, number, size * number, seconds of marks."""


@dataclass(slots=True)
class Step:
    """One step of a loop. `StallMeter` sets what it was; the marks set how long it took."""

    number: int
    """From 0, without gaps, also over steps that are not usable."""
    size: float
    """Token slots, or any number that the work of a step grows with; 1.0 if unknown."""
    work: float = 0.0
    """Device seconds outside of brackets."""
    ahead: float = 0.0
    """The part of `work` that was queued before it began."""
    gaps: dict[str, float] = field(default_factory=dict)
    """Device seconds in brackets, by cause."""
    marks: int = 0
    is_usable: bool = True
    """False while a trace is on, and for the steps that the meter leaves out after a trace."""
    is_seen: bool = True
    """Whether a forward pass was seen. On a GPU always."""
    tokens: int = 0
    slots: int = 0
    blamed: Cause | None = None
    """An event that happened during the step, at an unknown time, and stops the device."""


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


class GapAccounts:
    """Add steps on a device without traces, and read their gaps: sums, in a fraction of the time.

    Args:
        is_host: Whether the device is the host, whose work has no idle time.
    """

    def __init__(self, *, is_host: bool) -> None:
        self._is_host = is_host
        self._steps = self._tokens = self._slots = 0
        self._work = self._unproven = 0.0
        self._gaps: dict[str, float] = dict.fromkeys(CAUSES, 0.0)

    def add(self, step: Step) -> None:
        """Add a step."""
        self._steps += 1
        self._tokens += step.tokens
        self._slots += step.slots
        self._work += step.work
        self._unproven += 0.0 if step.ahead >= PROVEN * step.work else step.work - step.ahead
        for cause, seconds in step.gaps.items():
            self._gaps[cause] += seconds

    def read(self) -> StallReading:
        """Return the sums. The most idle seconds are the work that is not proven ahead."""
        return StallReading(
            steps=self._steps,
            tokens=self._tokens,
            slots=self._slots,
            seconds=self._work + sum(self._gaps.values()),
            gaps={cause: self._gaps[cause] for cause in CAUSES if self._gaps[cause]},
            most=self._unproven,
            is_inside_measured=self._is_host,
        )


class Accounts:
    """Add steps and traced steps; read the idle seconds of the run so far at any time.

    Args:
        mark_seconds: Host seconds that a mark takes.

    Example:
        A run of 100 steps of 10 ms has two traces, in which a step is busy for 7 ms and then for
        8 ms. No step is proven ahead. Then 250 ms are idle. Half of the interval is about
        100 steps * 1 ms = 100 ms.
    """

    def __init__(self, mark_seconds: float = 13e-6) -> None:
        self._mark_seconds = mark_seconds
        self.slower = 0.0
        """Share by which steps were slower after the first trace; it widens the interval."""
        self._recent: list[Step] = []
        """Steps that are not folded yet."""
        self._traced: list[TracedStep] = []
        self._times: list[float] = []
        """The mean step number of each trace."""
        self._sums = np.zeros((1, 2, _COLUMNS))
        """By piece, for steps behind and steps proven ahead."""
        self._extra = np.zeros((2, len(_BINS)))
        """Extra work of unusual steps by factor, for steps behind and steps proven ahead."""
        self._gaps = np.zeros((len(CAUSES), 3))
        """Seconds by cause: of all steps, and of usable steps, which stand for others too; and the
        number of the latter."""
        self._guessed = 0.0
        """Variance of the seconds of left-out steps, given those that stand for them."""
        self._steps = self._tokens = self._slots = 0

    def add(self, step: Step) -> None:
        """Add a step. Numbers must grow."""
        self._recent.append(step)
        self._steps += 1
        self._tokens += step.tokens
        self._slots += step.slots
        if len(self._recent) >= _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        self._sums, self._extra, self._gaps, self._guessed = self._totals()
        self._recent = []

    def add_trace(self, steps: list[TracedStep]) -> None:
        """Add the valid steps of one trace. Traces come in order."""
        if steps:
            self._traced += steps
            self._times.append(sum(step.number for step in steps) / len(steps))
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums[:1])])

    def read(self) -> StallReading:
        """Return the idle seconds of all steps so far, left-out steps included.

        Without a valid trace, the most idle seconds are the work that is not proven ahead.
        """
        sums, extra, gaps, guessed = self._totals(with_extra=bool(self._times))
        whole = sums.sum(0)
        # Gaps of most steps are those of the usable steps. Rare gaps are known of all steps.
        is_usual = 2 * gaps[:, 2] > whole[:, 0].sum()
        outside = np.where(is_usual, gaps[:, 1], gaps[:, 0])
        is_measured = bool(self._times) and bool(whole[:, 0].any())
        unproven = float(whole[0, 1] - whole[0, 2])
        inside = self._inside(sums, extra) if is_measured else (0.0, 0.0, unproven)
        seconds = float(whole[:, 1].sum() + outside.sum())
        if is_measured:
            likely, least, most = inside
            # More seconds are more idle seconds, of a longer time.
            left = _DEVIATIONS * guessed**0.5 * (1 - (outside.sum() + likely) / seconds)
            least = likely - _length(likely - least, left)
            inside = likely, least, likely + _length(most - likely, left)
        return StallReading(
            steps=self._steps,
            tokens=self._tokens,
            slots=self._slots,
            seconds=seconds,
            gaps={c: float(each) for c, each in zip(CAUSES, outside, strict=True) if each},
            inside=self._split(inside[0]),
            least=inside[1],
            most=inside[2],
            is_inside_measured=is_measured,
        )

    def _totals(self, *, with_extra: bool = True) -> tuple[Array, Array, Array, float]:
        """Return `_sums`, `_extra`, `_gaps` and `_guessed` with the recent steps. Only traces need
        `_extra` and `_guessed`; a loop of short steps on a CPU would notice the time."""
        sums, extra, gaps = self._sums.copy(), self._extra.copy(), self._gaps.copy()
        if not self._recent:
            return sums, extra, gaps, self._guessed
        steps = [step for step in self._recent if step.is_usable]
        weights = self._weights()
        found: dict[str, list[tuple[int, float]]] = {}
        for at, step in enumerate(self._recent):
            for cause, gap in step.gaps.items():
                found.setdefault(cause, []).append((at, gap))
        for cause, places in found.items():
            steps_with, seconds = zip(*places, strict=True)
            weight = weights[[*steps_with]]
            gaps[CAUSES.index(cause)] += sum(seconds), weight @ seconds, weight.sum()
        if not steps:
            return sums, extra, gaps, self._guessed
        weights = weights[[step.is_usable for step in self._recent]]
        number, size, work, ahead, marks, outside = np.array(
            [(s.number, s.size, s.work, s.ahead, s.marks, sum(s.gaps.values())) for s in steps]
        ).T
        piece, is_ahead = np.searchsorted(self._times, number), (ahead >= PROVEN * work).astype(int)
        # Marks of a host with lead cost at most a later gap.
        marks = self._mark_seconds * marks
        marks = np.where(is_ahead, np.minimum(outside, marks), marks)
        rows = [np.ones_like(work), work, ahead, size, number, size * number, marks]
        np.add.at(sums, (piece, is_ahead), (weights * np.array(rows)).T)
        if not with_extra:
            return sums, extra, gaps, self._guessed
        start, slope = _line(self._traced)
        pace = _robust_line(start + slope * size, work)
        level = np.maximum(1e-12, pace * _medians(work / pace))
        odd = work > UNUSUAL * level
        bins = np.clip(np.searchsorted(_BINS, (work / level)[odd]), 1, len(_BINS) - 1)
        np.add.at(extra, (is_ahead[odd], bins), (weights * (work - level))[odd])
        return sums, extra, gaps, self._guessed + self._variance(steps)

    def _weights(self) -> Array:
        """Return how many steps each recent step stands for: 0 if it is left out, 1 for itself,
        and parts of the left-out steps near it."""
        is_usable = np.array([step.is_usable for step in self._recent], bool)
        weights = is_usable.astype(float)
        usable, left = np.flatnonzero(is_usable), np.flatnonzero(~is_usable)
        if not len(left) or not len(usable):
            return weights
        sizes = np.array([step.size for step in self._recent])
        sums = np.concatenate([[0.0], np.cumsum(sizes[usable])])
        place = np.searchsorted(usable, left)
        sides = (
            (np.maximum(place - _STAND_INS, 0), place),
            (place, np.minimum(place + _STAND_INS, len(usable))),
        )
        likeness = []
        for first, last in sides:
            mean = (sums[last] - sums[first]) / np.maximum(1, last - first)
            near = abs(mean - sizes[left]) + 0.01 * sizes[left]
            likeness.append(np.where(last > first, 1 / near, 0.0))
        added = np.zeros(len(usable) + 1)
        for (first, last), like in zip(sides, likeness, strict=True):
            share = like / sum(likeness) / np.maximum(1, last - first)
            np.add.at(added, first, share)
            np.add.at(added, last, -share)
        weights[usable] += np.cumsum(added)[:-1]
        # In all, they have the sizes of the steps that they stand for, if there are such sizes.
        around = sizes[usable] - sizes[usable].mean()
        if spread := float(around @ around):
            change = (sizes.sum() - weights @ sizes) / spread * around
            weights[usable] += change * min(1.0, 0.5 / max(0.5, abs(change).max()))
        return weights

    def _variance(self, steps: list[Step]) -> float:
        """Return the variance of the seconds of left-out steps, given those that stand for them.

        It is seen at usable steps: how well do neighbours stand for a block of them?
        """
        is_left = np.array([not step.is_usable for step in self._recent])
        blocks, count = np.count_nonzero(np.diff(is_left, prepend=False) & is_left), len(steps)
        length = round(is_left.sum() / max(1, blocks))
        side = min(_STAND_INS, (count - length) // 2)
        if not length or side < 1:
            return 0.0
        usual = [c for c in CAUSES if 2 * sum(c in step.gaps for step in steps) > count]
        seconds = np.array([s.work + sum(s.gaps.get(c, 0.0) for c in usual) for s in steps])
        sizes = np.array([step.size for step in steps])
        if spread := float(sizes.var()):
            seconds = seconds - np.mean((sizes - sizes.mean()) * seconds) / spread * sizes
        sums = np.concatenate([[0.0], np.cumsum(seconds)])
        at = np.arange(side, count - length - side + 1)
        block = sums[at + length] - sums[at]
        near = sums[at] - sums[at - side] + sums[at + length + side] - sums[at + length]
        return float(blocks * np.mean((block - length * near / (2 * side)) ** 2))

    def _inside(self, sums: Array, extra: Array) -> tuple[float, float, float]:
        """Return the idle seconds inside the work: likely, least, most."""
        start, slope = _line(self._traced)
        times, ratios, spread, pieces = self._ratios(start, slope)
        # With exposed streams the host may be early, and yet the device waits.
        exposed = sum(step.exchanging + step.copying for step in self._traced)
        is_exposed = exposed > _EXPOSED * sum(step.span for step in self._traced)
        behind = _joined(sums.sum(1) if is_exposed else sums[:, 0], pieces)
        steps, work, ahead, size, number, both, _ = behind.T
        shape, shape_by_number = start * steps + slope * size, start * number + slope * both
        slopes = np.zeros(len(times) + 1)
        slopes[1:-1] = np.diff(ratios) / np.diff(times)
        left = np.concatenate([[0], np.arange(len(times))])
        busy = shape * (ratios[left] - slopes * times[left]) + slopes * shape_by_number
        guess = min(1.0, busy.sum() / max(1e-12, work.sum()) / 2)
        least, likely, most = self._extra_work(
            extra.sum(0) if is_exposed else extra[0],
            start + slope * _column(self._traced, "size"),
            np.interp(_column(self._traced, "number"), times, ratios),
            guess,
        )
        kernels = _column(self._traced, "kernels").mean()
        half = _length(
            self._change(shape, ratios),
            _DEVIATIONS * spread * shape.sum(),
            _SYSTEMATIC * busy.sum() + _PAUSE_ERROR * kernels * steps.sum(),
        )
        idle, room = (work - busy).sum() - likely, (work if is_exposed else work - ahead).sum()
        marks = sums[:, :, 6].sum()
        low = idle - _length(half, most - likely) - self.slower * work.sum()
        # A host that is clearly behind loses at least half of the time of its marks.
        high = idle + _length(half, likely - least) - min(0.5 * marks, 0.125 * max(0.0, idle))
        # The marks made the device idle, or took lead that is missing in a later gap.
        return _clip(idle - marks, room), _clip(low, room) - float(marks), _clip(high, room)

    def _ratios(
        self, start: float, slope: float
    ) -> tuple[Array, Array, float, npt.NDArray[np.intp]]:
        """Return the times and ratios of the traces, the error of their mean because the steps of
        a trace differ, and a number for the piece after each trace.

        A trace of nothing but heavier steps has no ratio, so its two pieces become one.
        """
        usual = _HEAVIER * float(np.median(_column(self._traced, "kernels")))
        found: dict[int, list[tuple[float, float]]] = {step.trace: [] for step in self._traced}
        for step in self._traced:
            if step.kernels <= usual:
                found[step.trace].append((step.busy, max(1e-12, start + slope * step.size)))
        has_ratio = np.array([bool(rows) for rows in found.values()])
        tables = [np.array(rows) for rows in found.values() if rows]
        ratios = np.array([table[:, 0].sum() / table[:, 1].sum() for table in tables])
        spreads = [np.var(table[:, 0] / table[:, 1], ddof=1) for table in tables if len(table) > 1]
        spread = float(np.sqrt(np.mean(spreads) / sum(map(len, tables)))) if spreads else 0.0
        return np.array(self._times)[has_ratio], ratios, spread, np.cumsum([0, *has_ratio])

    def _change(self, shape: Array, ratios: Array) -> float:
        """Return half of the interval that comes from changes between traces, in seconds.

        A change by d at an unknown moment of a piece is an error of d / sqrt(12) of the piece. A
        speed that comes and goes, and noise, err by d / sqrt(2), and turn back in the next piece.
        """
        pieces = shape[1:-1].copy()
        # Nothing is known of a speed long after the last trace.
        unseen = float(shape[-1] - (2 * pieces.mean() if len(pieces) else -shape[0]))
        if len(pieces):
            pieces[0] += shape[0]
            pieces[-1] += shape[-1]
        changes, count = np.diff(ratios) * pieces, max(1, len(pieces))
        squares = float(changes @ changes)
        turns = max(0.0, -float(changes[1:] @ changes[:-1])) * count / max(1, count - 1)
        half = min(squares, (_ONCE + _FEW_PIECES / count) * squares + turns) ** 0.5
        return _length(half, _LONE * float(ratios[-1]) * max(0.0, unseen))

    def _extra_work(
        self, extra: Array, shape: Array, ratios: Array, guess: float
    ) -> tuple[float, float, float]:
        """Return seconds of work in the extra time of unusual steps: least, likely, most.

        Args:
            extra: Extra seconds by factor.
            shape: Shape of each traced step.
            ratios: Ratio at each traced step.
            guess: Likely share of work without a traced step that is alike.
        """
        spans, kernels = _column(self._traced, "span"), _column(self._traced, "kernels")
        levels = _robust_line(shape, spans)
        odd = (spans > UNUSUAL * levels) | (kernels > _HEAVIER * np.median(kernels))
        factors, longer = (spans / levels)[odd], np.maximum(spans - levels, 1e-9)[odd]
        known = np.clip((_column(self._traced, "busy") - shape * ratios)[odd] / longer, 0.0, 1.0)
        least = likely = most = 0.0
        for seconds, factor in zip(extra, _BINS, strict=True):
            alike = known[abs(factors - factor) < _ALIKE * factor]
            if len(alike):
                slack = 0.2 / len(alike)
                least += seconds * max(0.0, alike.min() - slack)
                likely += seconds * alike.mean()
                most += seconds * min(1.0, alike.max() + slack)
            else:
                likely, most = likely + seconds * guess, most + seconds
        return least, likely, most

    def _split(self, inside: float) -> dict[Cause, float]:
        """Divide the idle seconds inside the work by the shares that the traces show."""
        parts: dict[Cause, float] = {
            "wait": sum(step.waiting for step in self._traced),
            "communication": sum(step.exchanging for step in self._traced),
            "copy": sum(step.copying for step in self._traced),
        }
        idle = sum(max(0.0, step.span - step.busy) for step in self._traced)
        parts["launch"] = max(0.0, idle - sum(parts.values()))
        whole = sum(parts.values())
        parts = parts if whole else {"launch": 1.0}
        return {cause: inside * part / (whole or 1.0) for cause, part in parts.items() if part}


def _column(traced: list[TracedStep], name: str) -> Array:
    return np.array([getattr(step, name) for step in traced], float)


def _joined(sums: Array, piece: npt.NDArray[np.intp]) -> Array:
    """Return sums of pieces that are joined by these numbers."""
    joined = np.zeros((int(piece[-1]) + 1, *sums.shape[1:]))
    np.add.at(joined, piece, sums)
    return joined


def _line(traced: list[TracedStep]) -> tuple[float, float]:
    """Return busy seconds as a line over sizes: start and slope, neither below 0."""
    if not traced:
        return 0.0, 1.0
    sizes, busy = _column(traced, "size"), _column(traced, "busy")
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


def _medians(values: Array) -> Array:
    """Return the median of the neighbourhood of each value."""
    padded = np.pad(values, _REACH, mode="reflect" if len(values) > _REACH else "edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _REACH + 1), axis=1)


def _length(*parts: float) -> float:
    """Return the root of the sum of squares."""
    return float(np.linalg.norm(parts))


def _clip(seconds: float, most: float) -> float:
    return float(min(max(0.0, seconds), most))
