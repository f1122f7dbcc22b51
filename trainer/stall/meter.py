"""The meter: marks in the device's queue, put there by a loop, and what they amount to.

    meter = StallMeter()
    for batch in meter.watch(loader):
        train_on(batch)
        meter.step(tokens=batch.num_tokens)
    print(meter.report())

The marks form one chain, from the meter's making to its latest step, so causes and work sum to the
wall time. Nothing here waits for the device.
"""

import contextlib
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tokenfeed.pipeline import checks
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.stall.accounts import Ledger, StepEnd
from tokenfeed.trainer.stall.calibration import Calibration
from tokenfeed.trainer.stall.causes import CAUSES, Cause, Phase
from tokenfeed.trainer.stall.clocks import Clock
from tokenfeed.trainer.stall.device import Machine, clock_of
from tokenfeed.trainer.stall.make_report import REMEDIES, make_report
from tokenfeed.trainer.stall.marks import Chain, Timeline
from tokenfeed.trainer.stall.ranks import Exchange, Ranks, is_distributed
from tokenfeed.trainer.stall.reading import StallReading
from tokenfeed.trainer.stall.report import StallReport
from tokenfeed.trainer.stall.statistics import StepSeconds
from tokenfeed.trainer.stall.watchers import (
    AllocatorWatch,
    CollectorWatch,
    CompilerWatch,
    CoreWait,
    LoaderUse,
    WaitFinder,
    Watched,
)

if TYPE_CHECKING:
    import torch

__all__ = ["WARMUP_STEPS", "StallMeter", "warmup_steps"]

WARMUP_STEPS = 5


def warmup_steps(steps: int) -> int:
    """How many of a session's steps to leave out: workers start, memory is allocated, kernels are
    compiled. Of a short one half, and always the first, which follows the first evaluation."""
    return max(1, min(WARMUP_STEPS, steps // 2))


Mark = TypeVar("Mark")
Batch = TypeVar("Batch")


class StallMeter(Generic[Mark]):
    """Tells where the time of a training loop goes.

    The window reaches from the end of the last warm-up step to the end of the latest step whose
    marks have passed. What comes after a step belongs to the next one: what follows the last step
    (the final checkpoint) is outside.

    Each mark takes about 13 µs of the host. In steps shorter than 2 ms the marks can raise the
    stall by up to 3.4 percentage points; its interval contains this error.

    Args:
        device: What the loop trains on; None for the first accelerator that is here, else the CPU.
        skipped_steps: Warm-up to leave out.
        operations_per_token: Floating-point operations to train on a token, for the MFU; `6 * N`
            for a model of N parameters is a good guess, without attention: `12 * L * C * T` more
            for L layers of width C over rows of T tokens.
        devices: How many devices share the tokens that `step` is told.
        calibrate: Hold the device up now and then, for less than 0.5 % of the time, to see what the
            work takes when its kernels are queued beforehand. Without, idle time inside the work is
            known by an upper bound.
        clock: Another clock than the device's.
        remedies: What reports advise, by cause, instead of general advice. Besides causes: `work`,
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
        clock: Clock[Mark] | None = None,
        remedies: Mapping[str, str] | None = None,
    ) -> None:
        devices = _whole("devices", devices, least=1)
        skipped_steps = _whole("skipped_steps", skipped_steps)
        operations_per_token = _operations(operations_per_token)
        self._machine = Machine(device, operations_per_token, devices, clock)
        self._clock: Clock[Any] = clock or clock_of(self._machine)
        self._is_beside_host = beside = self._clock.is_beside_host
        self._ledger = Ledger(is_beside_host=beside, skipped_steps=skipped_steps)
        self._timeline = Timeline()
        self._calibration = Calibration(skipped_steps) if beside and calibrate else None
        self._chain = Chain(self._clock, self._ledger, self._timeline)
        self._append, self._mark = self._chain.append, self._clock.mark
        self._left_to_skip = skipped_steps
        self._phase: Phase = "work"
        self._interrupted: Phase = "work"
        self._is_busy = False
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._ranks, self._remedies = Ranks(), _remedies(remedies)
        self._queued_steps, self._core_wait = 0, CoreWait() if clock is None else None
        self._loader: LoaderUse | None = None
        self._waits = WaitFinder()
        self._collector = CollectorWatch(self)
        self._compiler = CompilerWatch(self)
        self._compiler.attach()
        self._allocator = AllocatorWatch(self._machine.allocator_statistics())

    @property
    def method(self) -> str:
        """What is measured and how, in a sentence."""
        return self._clock.method

    def watch(self, batches: Iterable[Batch]) -> "Watched[Batch]":
        """The same batches; to wait for one is charged to `data`."""
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise checks.refusal("batches", batches, "a loader, or any other iterable")
        watched = Watched(self, batches)
        self._loader = watched.use
        return watched

    @contextlib.contextmanager
    def cause(self, name: Cause) -> Iterator[None]:
        """Bracket code that queues nothing of the training; of nested brackets the inner counts."""
        _check_cause("cause", name)
        outer = self.enter(name)
        try:
            yield
        finally:
            self.leave(outer)

    def enter(self, name: Cause) -> Phase:
        """Open a bracket; what it returns is for `leave`."""
        if name not in CAUSES:
            _check_cause("enter", name)
        if self._calibration is not None:
            self._close_work(self._calibration)
        outer: Phase = self._phase
        self._is_busy = True  # as `_cut`, whose call would cost as much again: see decision 20
        self._append((self._mark(), outer, None, False))
        self._is_busy = False
        self._phase = name
        return outer

    def leave(self, outer: Phase) -> None:
        """Close a bracket."""
        self._is_busy = True
        self._append((self._mark(), self._phase, None, False))
        self._is_busy = False
        self._phase = outer
        if self._calibration is not None:
            self._open_work(self._calibration)

    def charge(self, name: Cause) -> None:
        """Charge the time since the mark before to a cause, where no bracket can stand."""
        _check_cause("charge", name)
        self._cut(name)

    def mark(self) -> None:
        """A mark more inside the work, as between forward and backward: it narrows the bound of
        what cannot be seen, and lets a step of thousands of kernels be calibrated in pieces."""
        if self._calibration is not None:
            self._close_work(self._calibration)
        self._cut(self._phase, is_inside=True)
        if self._calibration is not None:
            self._open_work(self._calibration)

    def step(self, tokens: int = 0, slots: int | None = None) -> None:
        """Say that a step has been queued.

        Args:
            tokens: Real tokens trained in it.
            slots: Token slots, padding included; None where there is none.

        Raises:
            ConfigError: They are not whole numbers, or there are fewer slots than tokens.
        """
        slots = tokens if slots is None else slots
        # A call costs more than these comparisons.
        if type(tokens) is not int or type(slots) is not int or not 0 <= tokens <= slots:
            tokens = _whole("tokens", tokens)
            slots = _whole("slots", slots, least=tokens)
        self._queued_steps += 1
        if self._is_beside_host:
            self._step_of_device(tokens, slots)
        else:
            self._cut(self._phase, StepEnd(tokens, slots))
        if self._chain.is_long:
            self._resolve()
            self._compiler.attach()

    def find_waits(self, steps: int = 1) -> None:
        """Find the lines that wait for a GPU in the next steps, which do not count; where a spin
        shows that there are any, the meter does so by itself, once."""
        steps = _whole("steps", steps, least=1)
        if self._clock.is_beside_host:
            self._waits.begin(steps)

    def read(self) -> StallReading:
        """What is known now, without waiting for the device."""
        self._resolve()
        return self._ledger.read()

    def latest_steps(self) -> StepSeconds | None:
        """How long the steps took since this was asked before."""
        self._resolve()
        return self._ledger.step_times.take()

    def report(self, earlier: StallReport | None = None) -> StallReport:
        """The same as a report, without waiting for the device.

        Args:
            earlier: The report of an earlier part of the same run, which was resumed since. The
                report is then about both.
        """
        return make_report(
            self.read(),
            self._ledger,
            self._machine,
            method=self.method,
            events=self._events(),
            ranks=self._ranks.latest,
            queued_steps=self._queued_steps,
            core_wait=self._core_wait.share() if self._core_wait else None,
            loader=self._loader,
            remedies=self._remedies,
            earlier=earlier,
        )

    def gather(self, exchange: Exchange | None = None) -> None:
        """Exchange readings with the meters of the other ranks, for the next reports. All ranks
        have to call it, now and then and at the end. A single process need not.

        Args:
            exchange: Returns the arguments of all ranks, in order; None for `torch.distributed`.
        """
        if exchange is not None and not callable(exchange):
            raise checks.refusal("exchange", exchange, "a function of a list of numbers, or None")
        is_alone = exchange is None and not is_distributed()
        with contextlib.nullcontext() if is_alone else self.cause("communication"):
            self._ranks.tell(self.read(), exchange)

    def write(self, folder: Path | str) -> Path:
        """Write the report so far and return its page; see `StallReport.write`."""
        _check_folder(folder)
        return self.report().write(folder)

    def write_trace(self, folder: Path | str) -> Path:
        """Write the latest segments of device time as trace.json, for perfetto.dev."""
        _check_folder(folder)
        self._resolve()
        return self._timeline.write(Path(folder))

    def close(self) -> None:
        """Stop watching the program; a meter that nothing refers to does so by itself."""
        self._collector.close()
        self._compiler.close()
        self._waits.close()

    def interrupt(self, cause: Cause) -> bool:
        """Begin an interruption, at any place of the program; return False if no mark can be set:
        in another thread, or in a forked worker of a loader, which has no device."""
        is_ours = threading.get_ident() == self._thread and os.getpid() == self._process
        if self._is_busy or not is_ours or not self._clock.takes_marks():
            return False
        self._cut(self._phase)
        self._interrupted, self._phase = self._phase, cause
        return True

    def resume(self) -> None:
        """It goes on."""
        self._cut(self._phase)
        self._phase = self._interrupted

    def _step_of_device(self, tokens: int, slots: int) -> None:
        calibration, waits = self._calibration, self._waits
        self._cut(self._phase, StepEnd(tokens, slots, not waits.is_looking, self._blamed()))
        self._count(tokens)
        waits.end_step()
        if self._ledger.waits_inside and not waits.has_looked:
            self.find_waits()
        if calibration is not None:
            calibration.end_step(self._clock.now(), self._ledger.behind_share)

    def _count(self, tokens: int) -> None:
        """Energy counts from the end of the warm-up, too."""
        self._machine.add(tokens)
        self._left_to_skip -= 1
        if self._left_to_skip == 0:
            self._machine.begin()

    def _events(self) -> dict[str, Any]:
        allocations = self._allocator.counts()
        happened = {"collections": self._collector.count, "compilations": self._compiler.count}
        return happened | allocations | {"waits": self._waits.found()}

    def _blamed(self) -> Cause | None:
        if self._compiler.is_blamed:
            self._compiler.is_blamed = False
            return "recompilation"
        return "allocator" if self._allocator.poll(self._clock.now()) else None

    def _close_work(self, calibration: Calibration) -> None:
        if self._phase == "work":
            calibration.close(self._clock.now())

    def _open_work(self, calibration: Calibration) -> None:
        spin = calibration.open(self._clock.now()) if self._phase == "work" else 0.0
        if spin and self._clock.spin(spin):
            self._cut("calibration")
        elif spin:
            self._calibration = None  # of a device that cannot be held up

    def _cut(self, phase: Phase, end: StepEnd | None = None, is_inside: bool = False) -> None:
        """End a segment with a mark. Python's collector may come at any line, and is put off."""
        self._is_busy = True
        self._append((self._mark(), phase, end, is_inside))
        self._is_busy = False

    def _resolve(self) -> None:
        """Add up the segments whose marks have passed."""
        self._is_busy = True
        self._chain.add_up()
        self._is_busy = False


def _whole(name: str, value: object, *, least: int = 0) -> int:
    """Return a whole number. Reject tensors: reading one would wait for its device."""
    if not isinstance(value, Integral):
        raise checks.refusal(name, value, "a whole number; of a tensor `int(...)`, which waits")
    return checks.whole(name, value, least=least)


def _operations(value: object) -> float | None:
    """Operations of a token, where they are known."""
    if value is not None and (not isinstance(value, Real) or not 0 < float(value) < math.inf):
        raise checks.refusal("operations_per_token", value, "a finite number above 0, or None")
    return None if value is None else float(value)


def _remedies(value: object) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise checks.refusal("remedies", value, "a dict of advice by cause, or None")
    if unknown := value.keys() - REMEDIES.keys():
        known = ", ".join(REMEDIES)
        raise ConfigError(f"`remedies` has {min(map(str, unknown))!r}: expected names of {known}.")
    return value


def _check_cause(call: str, name: object) -> None:
    if name not in CAUSES:
        raise ConfigError(f"`{call}({name!r})`: expected one of {', '.join(CAUSES)}.")


def _check_folder(folder: object) -> None:
    if not isinstance(folder, str | PathLike):
        raise checks.refusal("folder", folder, "a path")
