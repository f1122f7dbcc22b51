"""The accounts of the stall: from segments of device time to idle time by cause. Pure.

Segments come in order and tile the time. In a gap nothing of the training was queued: all of it is
idle, by a cause, as far as no one else owes it. Work is taken as whole stretches, up to the next
gap or mark; what of them was idle is known from references, in sum.
"""

from typing import NamedTuple, cast

from tokenfeed.trainer.stall.batches import Batches
from tokenfeed.trainer.stall.causes import ABOUT, Cause, Phase
from tokenfeed.trainer.stall.clock import Moment
from tokenfeed.trainer.stall.clock_map import ClockMap
from tokenfeed.trainer.stall.debts import Debt
from tokenfeed.trainer.stall.histogram import Histogram
from tokenfeed.trainer.stall.reading import StallReading, Sums
from tokenfeed.trainer.stall.step_times import StepTimes
from tokenfeed.trainer.stall.work import (
    Kind,
    Line,
    OpenStep,
    Payment,
    Stretch,
    WorkSums,
    idle_seconds,
)

__all__ = ["Ledger", "StepEnd"]

_SLACK_SECONDS = 50e-6
"""Two launches differ by less: what a batch is late beyond it, it was copied."""
_LEAST_LEAD_SECONDS = 30e-6
_SETTLED = 0.05
"""So much of a spin's lead may be left when steps count again, which they do after so many:"""
_SETTLING_STEPS = 20
_FEW_REFERENCES = 8
_SHARE_OF_REFERENCES = 0.02


class StepEnd(NamedTuple):
    """What the program says of a step."""

    tokens: int
    slots: int
    is_measured: bool = True
    """False where the meter itself took time of it."""
    blamed: Cause | None = None
    """What happened in it, at a time that no mark shows."""


class Ledger:
    """Adds up segments to steps, and steps to what is known of a run."""

    def __init__(self, *, is_beside_host: bool, skipped_steps: int) -> None:
        self._is_beside_host = is_beside_host
        self._skipped_steps = skipped_steps
        self._map, self._debt = ClockMap(), Debt()
        self._open, self._sums = OpenStep(), Sums()
        self._spin = 0.0
        """How far the next stretch is made to begin behind the host."""
        self._step_lead = 0.0
        """The host's when the first stretch of the latest step began."""
        self._settled_lead: float | None = None
        """After a spin: steps count again once the lead at their beginning is no longer."""
        self._unsettled = 0
        """Steps since then."""
        self._host_seconds: dict[Kind, float] = {}
        """What the host usually takes for a stretch."""
        self._waiting: set[Kind] = set()
        """Stretches inside which the host waits for the device."""
        self._ordinary: dict[Kind, Line] = {}
        """What stretches of all steps that count take, waits included."""
        self.behind_share = 0.0
        """Of late, the share of time in which nobody knows whether the device was idle."""
        self.batches = Batches()
        self.histograms: dict[Cause, Histogram] = {}
        self.step_times = StepTimes()

    @property
    def waits_inside(self) -> bool:
        """Whether the host was seen to wait for the device inside the work."""
        return bool(self._waiting)

    def add(self, phase: Phase, start: Moment, end: Moment) -> None:
        """Add a segment."""
        seconds = end.device - start.device
        self._open.seconds += seconds
        if not self._is_beside_host:
            if phase not in ("work", "calibration"):
                self._open.gaps[cast(Cause, phase)] += seconds
            return
        self._map.add(end.device, end.before)
        self._debt.see(self._lead(start))
        if phase == "work":
            self._work(start, end)
        elif phase == "calibration":
            self._spin = seconds
        else:
            self._gap(phase, start, end)
        self._debt.see(self._lead(end))

    def mark(self) -> None:
        """The segment before ended with a mark inside the work."""
        self._open.marks += 1
        name = f"mark {self._open.marks}"
        self._close_stretch(name)
        self._open.opener = name

    def end_step(self, step: StepEnd) -> None:
        """The segment before ended a step."""
        self._close_stretch("step")
        self._share(step.slots)
        if step.blamed is not None:
            self._blame(step.blamed)
        if self._skipped_steps:
            self._skipped_steps -= 1
            self._learn_references()
        elif not step.is_measured or not self._is_settled():
            self._learn_references()
        else:
            self._record(step)
        if not step.is_measured:
            spun = sum(stretch.spin for stretch in self._open.stretches)
            self._settled_lead = self._step_lead + max(_LEAST_LEAD_SECONDS, _SETTLED * spun)
            self._unsettled = 0
        self._open = OpenStep()

    def read(self) -> StallReading:
        """All whole steps so far."""
        return self._sums.read()

    def _lead(self, moment: Moment) -> float:
        """How long after it was queued the device passed."""
        return self._map.host(moment.device) - moment.before

    def _gap(self, cause: Cause, start: Moment, end: Moment) -> None:
        if not ABOUT[cause].interrupts:
            self._close_stretch(cause)
            self._open.has_batch |= cause == "data"
            is_talk = cause == "communication" and not self._open.has_batch
            self._open.opener = "step" if is_talk else cause
        idle = end.device - start.device
        copied = 0.0
        if cause == "data":
            copied = min(idle, max(0.0, self._lead(end) - _SLACK_SECONDS))
        paid = 0.0 if cause == "communication" else self._debt.pay(idle - copied)
        if paid:
            self._open.gaps[self._debt.owner] += paid
        if copied:
            self._open.gaps["copy"] += copied
        self._open.gaps[cause] += idle - copied - paid
        if ABOUT[cause].drains:
            self._debt.lose(cause, self._lead(start), self._lead(end))

    def _work(self, start: Moment, end: Moment) -> None:
        seconds = end.device - start.device
        stretch = self._open.stretch
        if stretch is None:
            lead = self._lead(start)
            stretch = Stretch(self._open.opener, start.after, end, self._spin)
            stretch.is_ahead = lead > _LEAST_LEAD_SECONDS
            self._open.stretch, self._spin = stretch, 0.0
            if not self._open.stretches and self._open.opener == "step":
                self._step_lead = lead
        stretch.seconds += seconds
        stretch.bound += min(max(0.0, end.after - self._map.host(start.device)), seconds)
        stretch.end = end

    def _close_stretch(self, closer: str) -> None:
        stretch, self._open.stretch = self._open.stretch, None
        if stretch is None:
            return
        stretch.kind = kind = Kind(stretch.opener, closer)
        lead = self._lead(stretch.end)
        stretch.is_ahead &= lead > max(_LEAST_LEAD_SECONDS, 0.01 * stretch.seconds)
        stretch.is_ahead |= stretch.bound <= 0.01 * stretch.seconds
        self._find_payer(stretch)
        self._watch_host(stretch, stretch.end.before - stretch.opened, lead)
        if kind in self._waiting and not stretch.is_ahead:
            self._debt.lose("wait", self._hidden_by_wait(stretch), lead)
        self._open.stretches.append(stretch)

    def _find_payer(self, stretch: Stretch) -> None:
        """Who lost the lead that this stretch began without."""
        if stretch.kind.is_between:
            stretch.payer = "other"
        if stretch.is_ahead or self._debt.seconds < 0.5 * stretch.bound or not stretch.bound:
            return
        stretch.payer = self._debt.owner
        self._debt.pay(max(0.0, min(self._longer(stretch), stretch.bound)))

    def _longer(self, stretch: Stretch) -> float:
        """How much longer than its reference it took."""
        reference = self._sums.references.get(stretch.kind)
        if reference is None:
            return stretch.bound if stretch.kind.is_between else 0.0
        return stretch.seconds - reference.total(1, stretch.slots)

    def _watch_host(self, stretch: Stretch, host: float, lead: float) -> None:
        """A host that takes longer by the time the device was held up has waited for it."""
        usual = self._host_seconds.get(stretch.kind, host)
        if not stretch.spin:
            self._host_seconds[stretch.kind] = min(host, 1.1 * usual)
            return
        if host - usual > 0.5 * stretch.spin and lead <= _LEAST_LEAD_SECONDS:
            self._waiting.add(stretch.kind)
            stretch.is_ahead = True  # up to the wait
        else:
            self._waiting.discard(stretch.kind)

    def _hidden_by_wait(self, stretch: Stretch) -> float:
        """The lead that a host had at the end, did it not wait: none, where it is the slower."""
        return 0.0 if self._longer(stretch) > 0.1 * stretch.seconds else stretch.seconds

    def _share(self, slots: int) -> None:
        """The stretches of a step are taken for equal."""
        working = [stretch for stretch in self._open.stretches if not stretch.kind.is_between]
        for stretch in working:
            stretch.slots = slots / len(working)

    def _learn_references(self) -> None:
        """Of a step that does not count, only what a spin has put behind the host."""
        for stretch in self._open.stretches:
            if stretch.spin and stretch.is_ahead:
                self._reference(stretch)

    def _reference(self, stretch: Stretch) -> None:
        self._sums.references.setdefault(stretch.kind, Line()).add(stretch.slots, stretch.seconds)

    def _blame(self, cause: Cause) -> None:
        """Charge what the stretches of this step took longer than usual."""
        for stretch in self._open.stretches:
            usual = self._ordinary.get(stretch.kind)
            if usual is None:
                continue
            longer = stretch.seconds - usual.total(1, stretch.slots)
            longer = min(max(0.0, longer), stretch.bound)
            stretch.seconds -= longer
            stretch.bound -= longer
            self._open.gaps[cause] += longer

    def _is_settled(self) -> bool:
        """Whether the lead that a spin gave the host is gone."""
        if self._settled_lead is None:
            return True
        self._unsettled += 1
        is_gone = self._step_lead <= self._settled_lead
        if is_gone or self._unsettled >= _SETTLING_STEPS:
            self._settled_lead = None
        return self._settled_lead is None

    def _record(self, step: StepEnd) -> None:
        sums, seconds, gaps = self._sums, self._open.seconds, self._open.gaps
        sums.steps += 1
        sums.tokens += step.tokens
        sums.slots += step.slots
        sums.seconds += seconds
        for cause, idle in gaps.items():
            sums.gaps[cause] += idle
        behind = sum(map(self._record_stretch, self._open.stretches))
        if seconds:
            self.behind_share += 0.1 * (behind / seconds - self.behind_share)
        self.batches.add(seconds, gaps)
        self.step_times.add(seconds)
        for cause, idle in gaps.items():
            self.histograms.setdefault(cause, Histogram()).add(idle)

    def _record_stretch(self, stretch: Stretch) -> float:
        """Add it to its sums, and say how long it may have been idle for all that is known."""
        self._ordinary.setdefault(stretch.kind, Line()).add(stretch.slots, stretch.seconds)
        if stretch.is_ahead:
            self._reference(stretch)
            return 0.0
        payment = Payment(stretch.kind, stretch.payer)
        self._sums.work[payment].add(stretch)
        alone = WorkSums()
        alone.add(stretch)
        reference = self._sums.references.get(stretch.kind)
        self._open.gaps[stretch.payer] += idle_seconds(alone, reference, stretch.payer)
        return stretch.bound if self._needs_reference(payment) else 0.0

    def _needs_reference(self, payment: Payment) -> bool:
        if payment.kind.is_between:
            return False
        reference = self._sums.references.get(payment.kind)
        known = reference.count if reference else 0
        return known < _FEW_REFERENCES + _SHARE_OF_REFERENCES * self._sums.work[payment].count
