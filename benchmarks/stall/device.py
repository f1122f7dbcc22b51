"""A GPU beside its host, simulated with numpy, and a tracer that disturbs and forgets.

There is one true clock, in seconds. Kernels of the compute stream run in order. Each starts when it
has reached the device and the kernel before it has ended, plus a pause between two kernels that no
host can avoid. `idle` is what the device loses on top, by cause: 0 if the host is always ahead. The
tracer has the faults of Kineto.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenfeed.trainer.stall.marks import Clock
from tokenfeed.trainer.stall.traces import Trace, Tracer

Array = npt.NDArray[np.float64]

LATENCY = 4e-6
"""Seconds from the host's queue to the device."""
_NOISE = 1 << 15
"""Random numbers that kernels and launches draw from."""
LAG = 2e-6
"""Seconds until `passed` shows that the device has passed a mark."""


class Device(Clock):
    """A device and its host: a `Clock` of the stall meter.

    Args:
        seed: Seed of the noise of kernels and launches.
        launch: Host seconds to queue a kernel.
        pause: Seconds from the end of a kernel to the start of the next one in a full queue.
        depth: Kernels that the queue holds.
        mark_seconds: Host seconds of a mark, with the meter's Python.
        is_exact: No noise, no drift, no latency, and `passed` knows it at once.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        launch: float,
        pause: float = 1e-6,
        depth: int = 1024,
        mark_seconds: float = 13e-6,
        is_exact: bool = False,
    ) -> None:
        noise = np.random.default_rng(seed).uniform(-0.1, 0.1, _NOISE) * (not is_exact)
        self._pool, self._pauses = 1 + noise, pause * (1 + 3 * noise)
        self._dice = random.Random(seed)
        self.launch, self.pause, self.depth, self.mark_seconds = launch, pause, depth, mark_seconds
        self.host = self.free = self.copied = 7.0
        self._ends = np.full(depth, -np.inf)
        self.speed, self.host_speed, self.slower_launch = 1.0, 1.0, 0.0
        self.cause, self.idle = "launch", dict[str, float]()
        """Idle seconds by cause. `cause` is a bracket, or `launch` outside of brackets."""
        self.records: Records | None = None
        self.trace_seconds = 0.0
        self._waited = False
        self._drift = 1 + self._dice.gauss(0, 2e-5) * (not is_exact)
        self._latency, self._lag = (0.0, 0.0) if is_exact else (LATENCY, LAG)
        self.faults: TracerFaults | None = None
        """Of the tracer; None without one."""
        self.traces = 0
        self._seed = seed

    @property
    def lost(self) -> float:
        """Idle seconds so far."""
        return sum(self.idle.values())

    def kernels(self, count: int, seconds: float) -> None:
        """Queue equal kernels."""
        self.work(np.full(count, seconds), np.ones(count))

    def work(self, durations: Array, launches: Array) -> None:
        """Queue kernels: seconds on the device, and multiples of `launch` on the host."""
        count, depth = len(durations), self.depth
        durations = self._noise(count) * durations
        durations *= self.speed
        launches = self._noise(count) * launches
        launches *= self.launch * self.host_speed
        if self.slower_launch:
            launches += self.slower_launch
        for at in range(0, count, depth):
            self._queue(durations[at : at + depth], launches[at : at + depth])

    def _noise(self, count: int) -> Array:
        at = int(self._dice.random() * (_NOISE - count))
        return self._pool[at : at + count]

    def _queue(self, durations: Array, launches: Array) -> None:
        count = len(durations)
        at = int(self._dice.random() * (_NOISE - count))
        pauses = self._pauses[at : at + count]
        queued = np.add.accumulate(launches)
        if self._ends[count - 1] <= self.host:
            queued += self.host
        else:  # the host waits for room in the queue
            room = np.maximum(self._ends[:count] - queued, self.host)
            queued += np.maximum.accumulate(room, out=room)
        ends = durations + pauses
        np.add.accumulate(ends, out=ends)
        total = ends[-1]
        starts = queued + self._latency
        starts -= ends
        starts += durations
        first = starts[0] + pauses[0]
        if self._waited:
            if first > self.free and self.cause == "launch":
                self._lose(float(first - self.free), "wait")
                self.free = float(first)
            self._waited = False
        np.maximum(starts, self.free, out=starts)
        np.maximum.accumulate(starts, out=starts)
        ends += starts
        free = float(ends[-1])
        self._lose(free - self.free - float(total), self.cause)
        self.host, self.free = float(queued[-1]), free
        self._ends = np.concatenate([self._ends[count:], ends])
        if self.records is not None:
            self.records.kernels.append(np.stack([ends - durations, ends], 1))
            self.records.segments.append(len(self.records.borders) - 1)

    def _lose(self, seconds: float, cause: str) -> None:
        if seconds > 0:
            self.idle[cause] = self.idle.get(cause, 0.0) + seconds

    def copy(self, seconds: float) -> None:
        """Copy a batch on another stream. The compute stream waits for the copy."""
        self.copied = max(self.copied, self.host + self._latency) + seconds
        self.hold(self.copied - seconds, self.copied, "copy")

    def hold(self, start: float, end: float, cause: str) -> None:
        """Let the compute stream wait for another stream that is busy from `start` to `end`."""
        inside = self.cause == "launch"
        self._lose(end - self.free, cause if inside else self.cause)
        if self.records is not None and inside:
            others = self.records.copies if cause == "copy" else self.records.exchanges
            others.append((start, end))
        self.free, self._waited = max(self.free, end), False

    def stop(self, seconds: float) -> None:
        """The host does something else."""
        self.host += seconds

    def wait(self) -> None:
        """The host waits for the device."""
        began = self.host
        self.host = max(self.host, self.free) + self._latency
        self._waited = self.free > began
        if self.records is not None:
            self.records.waits.append((began, self.host))

    def border(self) -> float:
        """Return when the device will reach what is queued now, at no cost."""
        moment = max(self.free, self.host + self._latency)
        if moment > self.free:
            self._lose(moment - self.free, "wait" if self._inside_wait() else self.cause)
        self.free, self._waited = moment, self._waited and moment <= self.free
        return moment

    def _inside_wait(self) -> bool:
        return self._waited and self.cause == "launch"

    method, is_beside_host = "simulated", True

    def tracer(self) -> Tracer | None:
        """Return the tracer of the device."""
        return None if self.faults is None else SimulatedTracer(self, self._seed, self.faults)

    def now(self) -> float:
        """Return the host time, without the time of traces."""
        return self.host - self.trace_seconds

    def mark(self) -> float:
        """Queue a mark."""
        self.host += self.mark_seconds / 2
        moment = self.border()
        self.host += self.mark_seconds / 2
        return moment

    def passed(self, mark: float) -> bool:
        """Return whether the device has passed a mark, as the host sees it."""
        return mark + self._lag <= self.host

    def seconds(self, earlier: float, later: float) -> float:
        """Return device seconds between two marks: 32-bit milliseconds, as of CUDA events."""
        return float(np.float32((later - earlier) * self._drift * 1e3)) / 1e3


@dataclass
class Records:
    """What a tracer records, in seconds of the true clock."""

    kernels: list[Array] = field(default_factory=list)
    """Rows of start and end, on the compute stream."""
    segments: list[int] = field(default_factory=list)
    """The segment between two borders that each of `kernels` was queued in."""
    copies: list[tuple[float, float]] = field(default_factory=list)
    exchanges: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    borders: list[tuple[float, float]] = field(default_factory=list)


@dataclass(kw_only=True)
class TracerFaults:
    """How a tracer disturbs and forgets."""

    usual_seconds: float
    """Seconds from trace to trace. A start and a stop take 0.1 % of this each."""
    loss: float | None = None
    """Share of records that every trace loses. None: 1 % in 30 % of the traces."""
    blocks: float = 1 / 30
    """Share of traces that lose a tenth of their records in a block."""
    left: float = 0.0
    """Seconds by which each launch is slower for ever after the first trace."""
    pause_error: float = 0.05e-6
    """Standard deviation of the measured pause."""
    pause: float | None = None
    """What the measured pause is taken for; None: it is measured."""
    has_graphs: bool = False
    lost_borders: tuple[int, ...] | None = None
    """Borders that every trace loses. None: as large a share as of the kernels."""
    stretch: float = 1.0
    """Speed of the tracer's clock."""
    why_not: str | None = None
    """Why no trace can be taken now."""
    error: Exception | None = None
    """What a start raises."""


class SimulatedTracer:
    """What `torch.profiler` with CUDA activity returns. A `Tracer` of the stall meter."""

    def __init__(self, device: Device, seed: int, faults: TracerFaults) -> None:
        self._dice, self._rng = random.Random(seed), np.random.default_rng(seed)
        self._device, self._faults = device, faults
        self.usual_seconds, self.least_seconds = faults.usual_seconds, 0.6 * faults.usual_seconds
        self._slower = self._dice.uniform(0.5e-6, 2e-6)
        self._longer = self._dice.uniform(0, 0.2e-6)
        """Seconds by which a traced kernel is longer."""
        self._offset, self._rate = self._dice.uniform(-1e3, 1e3), 1 + self._dice.gauss(0, 5e-5)
        # A burst of small kernels without and with the tracer. Traced durations cancel.
        self._pause = device.pause - self._longer + self._dice.gauss(0, faults.pause_error)

    def why_not(self) -> str | None:
        """Return why no trace can be taken now; None if one can."""
        return self._faults.why_not

    def start(self) -> None:
        """Start a trace: the queue is drained."""
        if self._faults.error is not None:
            raise self._faults.error
        self._device.traces += 1
        self._drain()
        self._device.slower_launch, self._device.records = self._slower, Records()

    def _drain(self) -> None:
        began = self._device.host
        self._device.wait()
        self._device.host += 0.001 * self.usual_seconds
        self._device.trace_seconds += self._device.host - began

    def border(self) -> None:
        """Queue a border."""
        device = self._device
        assert device.records is not None
        device.host += 5e-6
        start = device.border()
        device.free = start + 1e-6
        device.records.borders.append((start, device.free))

    def stop(self) -> Trace:
        """Stop the trace: the queue is drained."""
        device, faults = self._device, self._faults
        self._drain()
        records = device.records
        assert records is not None
        device.records, device.slower_launch = None, faults.left
        kernels = np.concatenate(records.kernels)
        kernels[:, 1] += self._longer
        segments = np.repeat(records.segments, [len(part) for part in records.kernels])
        keep = np.ones(len(kernels), bool)
        if faults.loss is not None:
            keep &= self._rng.random(len(keep)) > faults.loss
        elif self._dice.random() < 0.3:
            keep &= self._rng.random(len(keep)) > 0.01
        if self._dice.random() < faults.blocks:
            at = self._dice.randrange(len(keep))
            keep[at : at + len(keep) // 10] = False
        kept = keep.mean()
        keep[: min(self._dice.choice([0, 0, 3, 30]), len(keep) // 10)] = False
        borders = np.array(records.borders)
        if faults.lost_borders is None:
            borders[self._rng.random(len(borders)) > kept] = np.nan
        else:
            borders[[*faults.lost_borders]] = np.nan
        return Trace(
            borders=self._clock(borders),
            kernels=self._clock(kernels[keep]),
            lost=np.empty(0, int) if faults.has_graphs else segments[~keep],
            pause=self._pause if faults.pause is None else faults.pause,
            copies=self._clock(np.array(records.copies).reshape(-1, 2)),
            exchanges=self._clock(np.array(records.exchanges).reshape(-1, 2)),
            waits=self._clock(np.array(records.waits).reshape(-1, 2)),
            has_graphs=faults.has_graphs,
        )

    def _clock(self, seconds: Array) -> Array:
        return (seconds + self._offset) * self._rate * self._faults.stretch
