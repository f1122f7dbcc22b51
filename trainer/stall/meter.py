"""The stall meter puts marks into the device's queue and adds up the time between them.

    meter = StallMeter()
    for batch in meter.watch(loader):
        train_on(batch)
        meter.step(tokens=batch.num_tokens)
    print(meter.report())

The marks form one chain, from the creation of the meter to its latest step. So causes and work sum
to the wall time. Nothing here waits for the device.
"""

import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.stall.accounts import Accounts, Divider, StepEnd
from tokenfeed.trainer.stall.causes import CAUSES, REMEDIES, Cause, Phase
from tokenfeed.trainer.stall.device import Calibration, Clock, MeteredDevice, Moment
from tokenfeed.trainer.stall.ranks import (
    Exchange,
    RankStall,
    is_distributed,
    own_place,
    rank_stalls,
    slowest_rank,
)
from tokenfeed.trainer.stall.reading import StallReading, StepSeconds, numbers_of
from tokenfeed.trainer.stall.stall_report import CauseReport, Interval, StallReport
from tokenfeed.trainer.stall.verdict import conclude
from tokenfeed.trainer.stall.watchers import (
    AllocatorWatch,
    CollectorWatch,
    CompilerWatch,
    CoreWait,
    LoaderUse,
    WaitFinder,
    WatchedLoader,
)

if TYPE_CHECKING:
    import torch


WARMUP_STEPS = 5
_EXAMINED_STEPS = 5
"""Steps to delay before each part between waits, after a step in which torch reported waits."""
_EARLY_STEPS = (8, 16, 32)
"""Steps after which to resolve segments early: spins may have shown waits."""
_LINKS_AT_ONCE = 256
"""Number of segments to resolve together. A tight loop runs several times faster than the same code
run once after each step, because a step evicts this code's data from the CPU caches."""

_Link = tuple[tuple[Any, float, float], Phase, StepEnd | None, Divider | None]
"""A mark with the host time before and after it, the phase of the segment that it ends, the step
that it ends, and what divides the work there. A tuple, since one is made at each mark."""


def warmup_steps(steps: int) -> int:
    """Return how many steps at the start of a session to leave out of the measurement.

    Workers start, memory is allocated, and kernels are compiled in these steps. A short session
    leaves out half of its steps. The first step is always left out: it follows the first
    evaluation.
    """
    return max(1, min(WARMUP_STEPS, steps // 2))


Batch = TypeVar("Batch")


class StallMeter:
    """Measures where the time of a training loop goes.

    The measurement starts at the end of the last warm-up step. It ends with the latest step whose
    marks the device has passed. Time after a step belongs to the next step, so time after the last
    step, such as the final checkpoint, is not measured.

    Each mark takes about 13 µs of the host. In steps shorter than 2 ms the marks can raise the
    stall by up to 3.4 percentage points; its interval contains this error.

    Args:
        device: The device that the loop trains on. None: the first accelerator, or the CPU.
        skipped_steps: Warm-up steps to leave out.
        operations_per_token: Floating-point operations to train on a token, for the MFU. `6 * N` is
            a good estimate for a model of N parameters. It leaves out attention, which adds `12 * L
            * C * T` for L layers of width C and rows of T tokens.
        devices: Number of devices that share the tokens passed to `step`.
        calibrate: Delay the device now and then, for less than 0.5 % of the time, so that kernels
            are queued beforehand. This shows how long the work takes by itself. Without it, only an
            upper bound of idle time inside the work is known.
        clock: A clock to use instead of the device's.
        remedies: Advice for reports, by cause, instead of the general advice. Further keys: `work`,
            `exchange` and `padding`.
    """

    def __init__(
        self,
        device: "torch.device | str | None" = None,
        *,
        skipped_steps: int = WARMUP_STEPS,
        operations_per_token: float | None = None,
        devices: int = 1,
        calibrate: bool = True,
        clock: Clock | None = None,
        remedies: Mapping[str, str] | None = None,
    ) -> None:
        devices = _whole("devices", devices, least=1)
        skipped_steps = _whole("skipped_steps", skipped_steps)
        operations_per_token = _operations(operations_per_token)
        self._machine = MeteredDevice(device, operations_per_token, devices, clock)
        self._clock = self._machine.clock
        self._is_beside_host = beside = self._clock.is_beside_host
        self._accounts = Accounts(is_beside_host=beside, skipped_steps=skipped_steps)
        self._calibration = Calibration(skipped_steps) if beside and calibrate else None
        self._chain = MarkChain(self._clock, self._accounts)
        self._append, self._mark = self._chain.append, self._clock.mark
        self._phase: Phase = "work"
        self._is_busy = False
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._remedies = _remedies(remedies)
        self._ranks: list[RankStall] = []
        self._group: Any = None
        self._place = own_place()
        self._queued_steps, self._core_wait = 0, CoreWait() if clock is None else None
        self._loader: LoaderUse | None = None
        self._waits = WaitFinder(weakref.WeakMethod(self._waited), self._clock.now)
        self._collector = CollectorWatch(self)
        self._compiler = CompilerWatch(self)
        self._compiler.attach()
        self._allocator = AllocatorWatch(self._machine.allocator_statistics)

    def watch(self, batches: Iterable[Batch]) -> "WatchedLoader[Batch]":
        """Return the same batches. Waiting for a batch is charged to `data`."""
        watched = WatchedLoader(self, batches)
        self._loader = watched.use
        return watched

    @contextlib.contextmanager
    def cause(self, name: Cause) -> Iterator[None]:
        """Charge the idle time in a `with` block to a cause. The block must queue no training work.

        In nested blocks, the innermost cause counts.
        """
        _check_cause("cause", name)
        outer = self.enter(name)
        try:
            yield
        finally:
            self.leave(outer)

    def enter(self, name: Cause) -> Phase:
        """Start a block of `cause`. Pass the result to `leave`."""
        if name not in CAUSES:
            _check_cause("enter", name)
        if self._calibration is not None:
            self._close_work(self._calibration)
        outer: Phase = self._phase
        self._is_busy = True  # inlines `_cut`: a call would take as long as its body (decision 20)
        self._append((self._mark(), outer, None, None))
        self._is_busy = False
        self._phase = name
        return outer

    def leave(self, outer: Phase) -> None:
        """End a block of `cause`."""
        self._is_busy = True
        self._append((self._mark(), self._phase, None, None))
        self._is_busy = False
        self._phase = outer
        if self._calibration is not None:
            self._open_work(self._calibration)

    def charge(self, name: Cause) -> None:
        """Charge the time since the previous mark to a cause, where a block is not possible."""
        _check_cause("charge", name)
        self._cut(name)

    def mark(self) -> None:
        """Set another mark inside the work, such as between forward and backward.

        The mark narrows the bound of unseen idle time. With marks, a step of thousands of kernels
        can be calibrated in parts.
        """
        self._divide("mark")

    def step(self, tokens: int = 0, slots: int | None = None) -> None:
        """End a step. Call this after its last kernel was queued.

        Args:
            tokens: Real tokens trained in the step.
            slots: Token slots, padding included. Default: as many as tokens.

        Raises:
            ConfigError: The numbers are not whole, or there are fewer slots than tokens.
        """
        slots = tokens if slots is None else slots
        # These comparisons take less time than a call of `_whole`.
        if type(tokens) is not int or type(slots) is not int or not 0 <= tokens <= slots:
            tokens = _whole("tokens", tokens)
            slots = _whole("slots", slots, least=tokens)
        self._queued_steps += 1
        if self._is_beside_host:
            self._step_of_device(tokens, slots)
        else:
            self._cut(self._phase, StepEnd(tokens, slots))
        if self._chain.is_long or self._queued_steps in _EARLY_STEPS:
            self._resolve()
            self._compiler.attach()

    def find_waits(self, steps: int = 1) -> None:
        """Find the lines that wait for a GPU during the next steps, which are not measured.

        After a spin that shows such waits, the meter examines one step by itself, and five more if
        a line of this step waits.
        """
        steps = _whole("steps", steps, least=1)
        if self._clock.is_beside_host:
            self._waits.begin(steps)

    def read(self) -> StallReading:
        """Return the sums so far, without waiting for the device."""
        self._resolve()
        return self._accounts.read()

    def latest_steps(self) -> StepSeconds | None:
        """Return figures of the steps since the previous call; None without steps."""
        self._resolve()
        return self._accounts.step_times.take()

    def report(self) -> StallReport:
        """Return a report on the steps so far, without waiting for the device."""
        self._place = max(self._place, own_place(), key=lambda place: place[1])
        reading, accounts, machine = self.read(), self._accounts, self._machine
        seconds, tokens_per_s = reading.seconds, reading.tokens_per_s
        total = reading.fraction if reading.steps else None
        unseen = reading.unseen_seconds / seconds if seconds else 0.0
        mfu, formula = machine.mfu(tokens_per_s)
        report = StallReport(
            stall=total,
            interval=interval_of(None, reading, accounts, unseen),
            at_most=None if total is None else min(1.0, total + unseen),
            causes={cause: cause_report(cause, reading, accounts) for cause in CAUSES},
            steps=reading.steps,
            queued_steps=self._queued_steps,
            seconds=seconds,
            tokens=reading.tokens,
            real_tokens_per_s=tokens_per_s if reading.tokens else None,
            padding=1 - reading.tokens / reading.slots if reading.slots else None,
            mfu=mfu,
            mfu_formula=formula,
            core_wait=self._core_wait.share() if self._core_wait else None,
            device=machine.name,
            on_gpu=machine.on_gpu,
            method=machine.clock.method,
            events={
                "collections": self._collector.count,
                "compilations": self._compiler.count,
                **self._allocator.counts(),
                "waits": self._waits.found(),
            },
            rank=self._place[0],
            world_size=self._place[1],
            ranks=[*self._ranks],
            slowest_rank=slowest_rank(self._ranks),
            advice=[],
        )
        return conclude(report, self._remedies, self._loader)

    def gather(self, exchange: Exchange | None = None) -> None:
        """Exchange readings with the meters of the other ranks, for the next reports.

        All ranks must call this, now and then and at the end. A single process need not.

        Args:
            exchange: Returns the arguments of all ranks, in order; None for `torch.distributed`.
        """
        if exchange is None and not is_distributed():
            self._group = None  # the former group has ended; a new one may follow
            return
        with self.cause("communication"):
            figures = (exchange or self._gathered)(numbers_of(self.read()))
            self._ranks = rank_stalls(figures) or self._ranks

    def _gathered(self, numbers: list[float]) -> list[list[float]]:
        """Exchange over a gloo group. The default group may wait for a GPU."""
        import torch.distributed as dist

        self._group = self._group or dist.new_group(backend="gloo")
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, numbers, group=self._group)
        return found

    def write(self, folder: Path | str) -> Path:
        """Write the report so far, and return its page. See `StallReport.write`."""
        return self.report().write(folder)

    def close(self) -> None:
        """Stop watching the program. A deleted meter does this by itself."""
        self._collector.close()
        self._compiler.close()
        self._waits.close()

    def interrupt(self, cause: Cause) -> Phase | None:
        """Start an interruption, at any place of the program. Pass the result to `resume`.

        Return None if no mark can be set: in another thread, or in a forked worker of a loader.
        """
        is_ours = threading.get_ident() == self._thread and os.getpid() == self._process
        if self._is_busy or not is_ours or not self._clock.takes_marks():
            return None
        outer: Phase = self._phase
        self._cut(outer)
        self._phase = cause
        return outer

    def resume(self, outer: Phase) -> None:
        """End an interruption."""
        self._cut(self._phase)
        self._phase = outer

    def _step_of_device(self, tokens: int, slots: int) -> None:
        calibration, waits = self._calibration, self._waits
        self._cut(self._phase, StepEnd(tokens, slots, not waits.is_looking, self._blamed()))
        waits.end_step()
        if self._accounts.waits_inside and not waits.is_looking:
            if not waits.steps:
                self.find_waits()
            elif waits.found_none:
                self._accounts.take_as_partly_queued()
            elif waits.found_any and waits.steps < _EXAMINED_STEPS and calibration is not None:
                self.find_waits(_EXAMINED_STEPS)
        if calibration is not None:
            examined = waits.steps if waits.is_looking else None
            calibration.end_step(self._clock.now(), self._accounts.behind_share, examined)

    def _waited(self, began: float | None) -> None:
        """Divide the work after a wait for the device that began at a host time, if known."""
        if self._phase == "work" and not self._is_busy and threading.get_ident() == self._thread:
            self._divide("stop", began)

    def _divide(self, divider: Divider, queued: float | None = None) -> None:
        """Divide the work by a mark. If known, `queued` is when the work before it was queued."""
        if self._calibration is not None:
            self._close_work(self._calibration)
        self._is_busy = True
        mark, before, after = self._mark()
        moments = mark, before, after if queued is None else queued
        self._append((moments, self._phase, None, divider))
        self._is_busy = False
        if self._calibration is not None:
            self._open_work(self._calibration)

    def _blamed(self) -> Cause | None:
        has_allocated = self._allocator.poll(self._clock.now())
        if self._compiler.is_blamed:
            self._compiler.is_blamed = False
            return "recompilation"
        return "allocator" if has_allocated else None

    def _close_work(self, calibration: Calibration) -> None:
        if self._phase == "work":
            calibration.close(self._clock.now())

    def _open_work(self, calibration: Calibration) -> None:
        spin = calibration.open(self._clock.now()) if self._phase == "work" else 0.0
        if spin and self._clock.spin(spin):
            self._cut("calibration")
        elif spin:
            self._calibration = None  # this device cannot be delayed

    def _cut(self, phase: Phase, end: StepEnd | None = None) -> None:
        """End a segment with a mark. Mark the meter as busy: the collector may run at any line."""
        self._is_busy = True
        self._append((self._mark(), phase, end, None))
        self._is_busy = False

    def _resolve(self) -> None:
        """Add segments whose marks the device has passed to the accounts."""
        self._is_busy = True
        self._chain.resolve()
        self._is_busy = False


class MarkChain:
    """The chain of marks in the device's queue. Two neighbouring marks enclose a segment.

    Appending a mark costs next to nothing. A segment is added to the accounts once the device has
    passed its marks. Not safe for threads, nor for callbacks during `resolve`.
    """

    def __init__(self, clock: Clock, accounts: Accounts) -> None:
        self._clock, self._accounts = clock, accounts
        self._links: deque[_Link] = deque()
        self.append = self._links.append
        """Appends a mark that was just queued."""
        self._last_mark: Any
        self._last_mark, before, after = clock.mark()
        self._last = Moment(0.0, before, after, after - before)
        self._device = 0.0
        self._not_passed_at = before
        """The latest host time at which the device had not passed the first of these marks."""

    @property
    def is_long(self) -> bool:
        """Whether enough segments wait to be resolved together."""
        return len(self._links) >= _LINKS_AT_ONCE

    def resolve(self) -> None:
        """Add segments whose marks the device has passed to the accounts."""
        links, clock, add = self._links, self._clock, self._accounts.add
        last_mark, last, polled_at = self._last_mark, self._last, clock.now()
        while links and clock.passed(links[0][0][0]):
            (mark, before, after), phase, end, divider = links.popleft()
            self._device += clock.seconds(last_mark, mark)
            clock.recycle(last_mark)
            # Marks on two streams may pass out of order. Device time then stays at the later value.
            device = max(last.device, self._device)
            earliest = max(before, self._not_passed_at)
            moment = Moment(device, earliest, after, after - before)
            add(phase, last, moment)
            last_mark, last = mark, moment
            if divider is not None:
                self._accounts.mark(divider)
            if end is not None:
                self._accounts.end_step(end)
        if links:
            self._not_passed_at = polled_at
        self._last_mark, self._last = last_mark, last


_LEAST_ERROR = 0.001
"""Error from latencies and rounding, as a share of the time; measured on the simulated device."""


def cause_report(cause: Cause, reading: StallReading, accounts: Accounts) -> CauseReport:
    """Return the figures of one cause."""
    fraction = reading.cause_fractions[cause]
    return CauseReport(
        fraction=fraction,
        seconds=reading.cause_seconds[cause],
        interval=interval_of(cause, reading, accounts),
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


def _whole(name: str, value: object, *, least: int = 0) -> int:
    """Return a whole number. Reject tensors: reading a tensor would wait for its device."""
    if not isinstance(value, Integral):
        raise checks.refusal(name, value, "a whole number; for a tensor `int(...)`, which waits")
    return checks.whole(name, value, least=least)


def _operations(value: object) -> float | None:
    """Return operations per token, or None if unknown."""
    if value is not None and (not isinstance(value, Real) or not 0 < float(value) < math.inf):
        raise checks.refusal("operations_per_token", value, "a finite number above 0, or None")
    return None if value is None else float(value)


def _remedies(value: Mapping[str, str] | None) -> Mapping[str, str]:
    value = value or {}
    if unknown := value.keys() - REMEDIES.keys():
        known = ", ".join(REMEDIES)
        raise ConfigError(f"`remedies` has {min(map(str, unknown))!r}: expected names of {known}.")
    return value


def _check_cause(call: str, name: object) -> None:
    if name not in CAUSES:
        raise ConfigError(f"`{call}({name!r})`: expected one of {', '.join(CAUSES)}.")
