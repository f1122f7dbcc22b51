"""The stall meter puts marks into the device's queue and adds up the time between them.

    meter = StallMeter()
    for batch in meter.watch(loader):
        train_on(batch)
        meter.step(tokens=batch.num_tokens)
    print(meter.report())

The marks form one chain, from the creation of the meter to its latest step. So causes and work sum
to the wall time. Only a short trace, now and then, waits for the device.
"""

import contextlib
import logging
import math
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.stall.causes import CAUSES, REMEDIES, Cause
from tokenfeed.trainer.stall.cpu_work import ForwardWatch
from tokenfeed.trainer.stall.idle import Accounts, GapAccounts, Step
from tokenfeed.trainer.stall.marks import Clock, EventClock, MarkChain, Phase
from tokenfeed.trainer.stall.ranks import (
    Exchange,
    RankStall,
    is_distributed,
    own_place,
    rank_stalls,
    slowest_rank,
)
from tokenfeed.trainer.stall.reading import StallReading, StepSeconds, numbers_of
from tokenfeed.trainer.stall.stall_report import CauseReport, Sample, Samples, StallReport
from tokenfeed.trainer.stall.traces import Tracing
from tokenfeed.trainer.stall.verdict import conclude
from tokenfeed.trainer.stall.waits import WaitFinder
from tokenfeed.trainer.stall.watchers import (
    AllocatorWatch,
    CollectorWatch,
    CompilerWatch,
    CoreWait,
    Loader,
    WatchedLoader,
)

if TYPE_CHECKING:
    import torch


_log = logging.getLogger(__name__)

WARMUP_STEPS = 5
"""Usual number of steps at the start that are not measured."""
_EARLY_STEPS = (7, 15, 31)
"""After these steps, the meter reads marks early, and looks for the compiler."""
_STEPS_AT_ONCE = 64
"""The meter reads the marks of this many steps at once. In a tight loop this takes a fraction of
the time that it takes after each step, when the step has emptied the caches of the CPU."""
_MARK_SECONDS = 13e-6
"""Host seconds that a mark takes in a step. A row of marks without a step is faster."""
_TIMED_MARKS = 200
"""Marks that a meter of a GPU times when it is made."""
_MOST_SECONDS = 4096
"""Most steps whose seconds are kept."""
_SAMPLE_SECONDS = 1.0
"""Least seconds between two points of a plot. A reading takes about half a millisecond."""
_LEAST_UNSEEN = 0.02
"""If a larger share of the steps of a CPU has no forward pass, a part of the stall is unknown."""

UNSEEN = "host code that no hook saw counts as work"
"""Why a part of the stall is unknown on a CPU."""


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

    On a GPU, idle time inside the work is measured by traces of three steps. A run of a few minutes
    has about 12 of them. Each takes up to 0.2 s of the host, and later ones 0.3 % of the time. The
    time of traces is left out. Each mark takes about 13 µs of the host, and each step has at least
    one.

    Args:
        device: The device that the loop trains on. None: the first accelerator, or the CPU.
        skipped_steps: Warm-up steps to leave out.
        operations_per_token: Floating-point operations to train on a token, for the MFU. `6 * N` is
            a good estimate for a model of N parameters. It leaves out attention, which adds `12 * L
            * C * T` for L layers of width C and rows of T tokens.
        devices: Number of devices that share the tokens passed to `step`.
        clock: A clock to use instead of the device's.
        remedies: Advice for reports, by cause, instead of the general advice. Further keys: `work`,
            `exchange`, `padding` and `steps`.
    """

    def __init__(
        self,
        device: "torch.device | str | None" = None,
        *,
        skipped_steps: int = WARMUP_STEPS,
        operations_per_token: float | None = None,
        devices: int = 1,
        clock: Clock | None = None,
        remedies: Mapping[str, str] | None = None,
    ) -> None:
        devices = _whole("devices", devices, least=1)
        self._counts_all_ranks = devices > 1
        self._warmup = skipped_steps = _whole("skipped_steps", skipped_steps)
        operations = _operations(operations_per_token)
        self._operations = operations and operations / devices
        self._core_wait = CoreWait() if clock is None else None
        self._clock = clock = clock or _clock_of(device)
        self._place = own_place()
        tracer = clock.tracer()
        self._accounts: Accounts | GapAccounts = GapAccounts(is_host=not clock.is_beside_host)
        done = weakref.WeakMethod(self._add)  # a meter that nothing refers to is to be deleted
        self._chain = chain = MarkChain(clock, lambda step: (own := done()) and own(step))
        self._tracing: Tracing | None = None
        if tracer:
            is_alone, self._accounts = self._place[1] == 1, Accounts(_mark_seconds(clock))
            self._tracing = Tracing(tracer, chain, self._accounts, skipped_steps, is_alone=is_alone)
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._remedies = _remedies(remedies)
        self._ranks: list[RankStall] = []
        self._group: Any = None
        self._loader: Loader | None = None
        self._fetch_s = self._computed_s = 0.0
        """Seconds in `next` of the loader, and those of them in which this thread computed."""
        self._number = self._unseen = 0
        self.knows_padding = False
        """Whether a step has said its slots."""
        self._next_read = 0
        """The step after which the meter reads marks."""
        self._latest = deque[float](maxlen=_MOST_SECONDS)
        """Seconds of the steps since somebody asked."""
        self._samples = Samples()
        self._unsampled = 0.0
        """Seconds of steps since the latest sample."""
        self._forward = None if clock.is_beside_host else ForwardWatch(self)
        self._is_resumed = False
        """Whether the work of this step has ended and may go on."""
        self.phase: Phase = "before" if self._forward else "work"
        """The present activity of the loop."""
        self.end_segment = self._tracing.mark if self._tracing else chain.add
        """End a segment of a phase with a mark, and return the host time. Hooks that run in each
        step call this, and then set `phase`."""
        self.add_work = chain.add_work
        self._waits = WaitFinder()
        self._collector = CollectorWatch(self)
        self._compiler = CompilerWatch(self)
        self._compiler.attach()
        self._allocator = AllocatorWatch(clock.memory_statistics)
        if self._forward:
            self._forward.wait()

    def watch(self, batches: Iterable[Batch]) -> "WatchedLoader[Batch]":
        """Return the same batches. Waiting for a batch is charged to `data`."""
        self._loader = Loader.of(batches)
        return WatchedLoader(self, batches)

    def reads_from(self, batches: Iterable[Any]) -> None:
        """Find the loader behind an iterator, unless it is known. Loops that fetch call this."""
        if self._loader is None or self._loader.num_workers is None:
            self._loader = Loader.of(batches)

    def fetched(self, seconds: float, computed: float) -> None:
        """Count a call of `next`: its seconds, and those in which this thread computed."""
        self._fetch_s += seconds
        self._computed_s += computed

    @property
    def loader(self) -> Loader | None:
        """The loader of the batches; None if it is unknown."""
        return self._loader and self.measured(self._loader)

    def measured(self, loader: Loader) -> Loader:
        """Return a loader with the share of the time in which it computed, if it has no workers."""
        is_known = loader.num_workers == 0 and self._fetch_s > 0
        return loader._replace(busy=self._computed_s / self._fetch_s if is_known else None)

    @contextlib.contextmanager
    def cause(self, name: Cause) -> Iterator[None]:
        """Charge the idle time in a `with` block to a cause. The block must queue no training work.

        In nested blocks, the innermost cause counts.
        """
        _check_cause("cause", name)
        outer = self.begin(name)
        try:
            yield
        finally:
            self.leave(outer)

    def enter(self, name: Cause) -> Phase:
        """Start a block of `cause`. Pass the result to `leave`."""
        if name not in CAUSES:
            _check_cause("enter", name)
        return self.begin(name)

    def begin(self, phase: Phase) -> Phase:
        """Start a block of any phase."""
        outer = self.phase
        self.leave(phase)
        return outer

    def leave(self, phase: Phase) -> None:
        """End a block: another phase begins, or goes on."""
        self.end_segment(self.phase)
        self.phase = phase

    def charge(self, name: Cause) -> None:
        """Charge the time since the previous mark to a cause, where a block is not possible."""
        _check_cause("charge", name)
        self.end_segment(name)

    def step(self, tokens: int = 0, slots: int | None = None, size: float | None = None) -> None:
        """End a step. Call this after its last kernel was queued.

        Args:
            tokens: Real tokens trained in the step.
            slots: Token slots, padding included. Default: as many as tokens; then the report names
                no padding.
            size: Any number that the work of a step grows with. Default: slots.

        Raises:
            ConfigError: The numbers are not whole, or there are fewer slots than tokens.
        """
        if slots is None:
            slots = tokens
        else:
            self.knows_padding = True
        # These comparisons take less time than a call of `_whole`.
        if type(tokens) is not int or type(slots) is not int or not 0 <= tokens <= slots:
            tokens = _whole("tokens", tokens)
            slots = _whole("slots", slots, least=tokens)
        self.end_step(tokens, slots, float(size or slots or 1))

    def end_step(self, tokens: int, slots: int, size: float) -> float:
        """End a step, whose numbers are known to be right. Return the host time."""
        number, tracing = self._number, self._tracing
        is_usable, blamed = True, None
        if self._is_resumed:  # a forward pass was seen, but not since the work ended
            self._is_resumed = False
            if self.phase == "before":
                self.leave("work")
        if tracing is not None:
            is_usable = tracing.is_usable and not self._waits.is_on
        if self._allocator.is_on or self._compiler.is_blamed:
            blamed = self._blamed()
        self._number = number + 1
        now = self.end_segment(self.phase, (number, size, tokens, slots, is_usable, blamed))
        if self._forward is not None and self.phase == "work":
            self.phase = "before"
            self._forward.wait()
        if tracing is not None:
            if self._waits.is_on:
                self._waits.end_step()
            tracing.end_step(number, may_start=not self._waits.is_on)
        if number >= self._next_read:
            later = (each for each in _EARLY_STEPS if each > number)
            self._next_read = next(later, number + _STEPS_AT_ONCE)
            self._chain.resolve()
            self._compiler.attach()
        return now

    def end_work(self) -> None:
        """End a part of the work that ends no step, such as the first of two optimizers. On a CPU,
        what follows is `other` until the next forward pass."""
        if self._forward is not None and self.phase == "work":
            self.leave("before")
            self._is_resumed = True
            self._forward.wait()

    def find_waits(self, steps: int = 1) -> None:
        """Find the lines that wait for a GPU during the next steps, which are not measured.

        A trace with stacks makes these steps several times slower. On a CPU nothing waits. If the
        program cannot be traced now, a warning is logged.
        """
        steps = _whole("steps", steps, least=1)
        tracer = self._clock.tracer()
        if tracer is None:
            return
        is_on = self._tracing is not None and self._tracing.is_on
        why_not = "a trace is being taken" if is_on else tracer.why_not()
        if why_not is None:
            self._waits.begin(steps)
        else:
            _log.warning("stall: cannot find waits: %s", why_not)

    def collect(self, generation: int = 2) -> None:
        """Collect Python's garbage as `gc.collect` does, and charge it. An interruption that
        arrives meanwhile is raised; in an automatic collection, Python may drop it."""
        self._collector.collect(generation)

    def read(self) -> StallReading:
        """Return the sums so far, without waiting for the device."""
        self._chain.resolve()
        return self._accounts.read()

    def latest_steps(self) -> StepSeconds | None:
        """Return figures of the steps since the previous call, at most the latest 4,096; None
        without steps."""
        self._chain.resolve()
        seconds, self._latest = sorted(self._latest), deque(maxlen=_MOST_SECONDS)
        return StepSeconds(seconds[len(seconds) // 2], seconds[-1]) if seconds else None

    def report(self) -> StallReport:
        """Return a report on the steps so far, without waiting for the device."""
        self._place = max(self._place, own_place(), key=lambda place: place[1])
        reading, clock = self.read(), self._clock
        tokens_per_s, unmeasured = reading.tokens_per_s, self._unmeasured(reading)
        is_measured = reading.steps > 0
        on_gpu = isinstance(clock, EventClock)
        rate = _mfu(clock.name, self._operations, tokens_per_s) if on_gpu else None
        report = StallReport(
            stall=reading.fraction if is_measured else None,
            interval=reading.interval() if is_measured and not unmeasured else None,
            at_most=self._at_most(reading) if is_measured else None,
            unmeasured=unmeasured,
            causes={cause: _cause_report(cause, reading) for cause in CAUSES},
            steps=reading.steps,
            queued_steps=self._number,
            seconds=reading.seconds,
            tokens=reading.tokens,
            real_tokens_per_s=tokens_per_s if reading.tokens else None,
            padding=1 - reading.tokens / reading.slots
            if self.knows_padding and reading.slots
            else None,
            mfu=rate and rate[0],
            mfu_formula=rate and rate[1],
            core_wait=self._core_wait.share() if self._core_wait else None,
            device=clock.name,
            on_gpu=on_gpu,
            method=clock.method,
            events={
                "collections": self._collector.count,
                "compilations": self._compiler.count,
                **self._allocator.counts(),
                "waits": self._waits.found(),
            },
            rank=self._place[0],
            world_size=self._place[1],
            counts_all_ranks=self._counts_all_ranks,
            ranks=[*self._ranks],
            slowest_rank=slowest_rank(self._ranks),
            advice=[],
            samples=self._samples.read(_sample(self._number, reading)) if is_measured else [],
        )
        return conclude(report, self._remedies, self.loader)

    def gather(self, exchange: Exchange | None = None, first_rank: int = 0) -> None:
        """Exchange readings with the meters of the other ranks, for the next reports.

        All ranks must call this, now and then and at the end. A single process need not.

        Args:
            exchange: Returns the arguments of all ranks, in order; None for `torch.distributed`.
            first_rank: The first rank that `exchange` returns figures of.
        """
        if exchange is None and not is_distributed():
            self._group = None  # the former group has ended; a new one may follow
            return
        with self.cause("communication"):
            distance = self._tracing.schedule.distance if self._tracing else 0
            figures = (exchange or self._gathered)([*numbers_of(self.read()), distance])
            found = rank_stalls([numbers[:-1] for numbers in figures], first_rank)
            self._ranks = found or self._ranks
        if self._tracing is not None:
            self._tracing.align(self._number, int(max(numbers[-1] for numbers in figures)))

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
        if self._forward is not None:
            self._forward.close()
        if self._tracing is not None:
            self._tracing.stop()

    def interrupt(self, cause: Cause) -> Phase | None:
        """Start an interruption, at any place of the program. Pass the result to `leave`.

        Return None if no mark can be set: in another thread, in a forked worker of a loader, or
        while a trace is on, whose borders have to follow the marks.
        """
        is_ours = threading.get_ident() == self._thread and os.getpid() == self._process
        is_traced = self._tracing is not None and self._tracing.is_on
        if is_traced or not is_ours or not self._clock.takes_marks():
            return None
        return self.begin(cause)

    def _add(self, step: Step) -> None:
        """Add a complete step to the accounts."""
        if step.number < self._warmup:
            return
        self._accounts.add(step)
        self._unseen += not step.is_seen
        seconds = step.work + sum(step.gaps.values())
        self._latest.append(seconds)
        self._unsampled += seconds
        if self._unsampled > _SAMPLE_SECONDS and self._samples.is_due(step.number + 1):
            self._unsampled = 0.0
            self._samples.add(_sample(step.number + 1, self._accounts.read()))
        if self._tracing is not None:
            self._tracing.watch(step)

    def _unmeasured(self, reading: StallReading) -> str | None:
        """Return why a part of the stall is unknown."""
        if not self._clock.is_beside_host:
            return UNSEEN if self._unseen > _LEAST_UNSEEN * reading.steps else None
        if reading.is_inside_measured:
            return None
        return self._tracing.why_unmeasured if self._tracing else "the device has no tracer"

    def _at_most(self, reading: StallReading) -> float:
        """Return the stall plus all possible idle time that was not measured."""
        if self._unmeasured(reading) is None:
            return reading.fraction
        return reading.interval()[1] if self._clock.is_beside_host else 1.0

    def _blamed(self) -> Cause | None:
        has_freed = self._allocator.poll(self._clock.now())
        if self._compiler.is_blamed:
            self._compiler.is_blamed = False
            return "recompilation"
        return "allocator" if has_freed else None


def _clock_of(device: "torch.device | str | None") -> Clock:
    """Return the clock of a device. None: the first accelerator, or the CPU without one."""
    from tokenfeed.pipeline.feeding.devices import default_device, resolve_device

    found = default_device() if device is None else resolve_device(device)
    return Clock() if found.type == "cpu" else EventClock(found)


def _mark_seconds(clock: Clock) -> float:
    """Return the host seconds of a mark, with the query of the mark before it."""
    began = clock.now()
    chain = MarkChain(clock, lambda step: None)
    for _ in range(_TIMED_MARKS):
        chain.add("work")
    return max(_MARK_SECONDS, (clock.now() - began) / _TIMED_MARKS)


def _sample(step: int, reading: StallReading) -> Sample:
    idle = reading.cause_seconds
    causes: dict[Cause, float] = {cause: idle[cause] for cause in CAUSES if idle[cause]}
    return Sample(
        step=step,
        steps=reading.steps,
        seconds=reading.seconds,
        tokens=reading.tokens,
        causes=causes,
    )


def _cause_report(cause: Cause, reading: StallReading) -> CauseReport:
    fraction = reading.cause_fractions[cause]
    return CauseReport(
        fraction=fraction,
        seconds=reading.cause_seconds[cause],
        interval=reading.interval(cause) if reading.steps and reading.is_inside_measured else None,
        speed_up=1 / max(1e-9, 1 - fraction),
    )


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


def _mfu(name: str, operations: float | None, tokens_per_s: float) -> tuple[float, str] | None:
    """Return the MFU of a device, and its formula; None if it is not known."""
    peak = peak_tflops(name)
    if peak is None or not operations or not tokens_per_s:
        return None
    formula = (
        f"{operations:.4g} operations per token x {tokens_per_s:,.0f} real tok/s / "
        f"{peak:g} TFLOP/s, dense half precision of {name}"
    )
    return operations * tokens_per_s / (peak * 1e12), formula


PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "H100-NVL": 835,
    "H100-PCIe": 756,
    "A100": 312,
    "L40S": 362,
    "A40": 149.7,
    "A6000": 154.8,
    "L4": 121,
    "RTX-5090": 209.5,
    "RTX-4090": 165.2,
    "RTX-3090": 71,
    "V100": 125,
    "T4": 65,
}
"""TFLOP/s by the words of a model's name. They are from the vendors' data sheets for dense matrix
products in half precision, as torchtitan, nanochat and llm.c use them for their MFU. A GPU in a
small case or with a lower power limit is slower."""


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU by its driver's name; None if unknown."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    same = [model for model in PEAK_TFLOPS if words.issuperset(model.split("-"))]
    closest = max(same, key=lambda model: model.count("-"), default="")
    return PEAK_TFLOPS.get(closest)
