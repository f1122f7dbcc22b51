"""The accounts of the stall: from segments of device time to idle seconds by cause. Pure.

Segments come in order and tile the time. In a gap, no work of the training was queued, so all of
the gap is idle. Work counts in whole stretches, up to the next gap or mark. References show in sum
how long the stretches were idle.

The cause of idle time is not always the one during which the device idles. A host that is ahead
hides the time of its loader. A host that waits for a value, or stops to log, loses its lead, and
the next batch is late, although the loader is fast. So the cause that lost the lead pays for idle
time until the lead is as long again.

Example: the host is 5 ms ahead, and `.item()` takes all of the 5 ms. The next batch takes 2 ms, in
which the device idles. `wait` pays these 2 ms, and has 3 ms left to pay. Once the host is 4 ms
ahead again, 1 ms is left.
"""

from typing import NamedTuple, cast

from tokenfeed.trainer.stall.causes import ABOUT, Cause, Phase
from tokenfeed.trainer.stall.clocks import ClockMap, Moment
from tokenfeed.trainer.stall.reading import StallReading, Sums
from tokenfeed.trainer.stall.statistics import Batches, Histogram, StepTimes
from tokenfeed.trainer.stall.work import (
    Kind,
    Line,
    OpenStep,
    Payment,
    Stretch,
    WorkSums,
    idle_seconds,
)

__all__ = ["Ledger", "LostLead", "StepEnd"]


class LostLead:
    """The lead that a cause has lost, and not yet won back."""

    def __init__(self) -> None:
        self.owner: Cause = "wait"
        self.seconds = 0.0
        self._lead_before = 0.0

    def lose(self, owner: Cause, before: float, after: float) -> None:
        """The host's lead shrank during `owner`; the larger debt stays."""
        lost = before - max(0.0, after)
        if lost > self.seconds:
            self.owner, self.seconds, self._lead_before = owner, lost, before

    def see(self, lead: float) -> None:
        """The host's lead is this now."""
        if self.seconds:
            self.seconds = min(self.seconds, max(0.0, self._lead_before - lead))

    def pay(self, idle: float) -> float:
        """Seconds of `idle` that the owner pays."""
        paid = min(idle, self.seconds)
        self.seconds -= paid
        return paid


_SLACK_SECONDS = 50e-6
"""Two launches differ by less: what a batch is late beyond it, it was copied."""
_LEAST_LEAD_SECONDS = 30e-6
_PYTHON_SECONDS = 12e-6
"""Host seconds of the meter's Python around a mark; `benchmarks/stall.py` measured 11.4 µs."""
_WAITED = 1.5
"""A host that takes so many times as long as usual for a stretch has waited in it."""
_QUEUED = 0.002
"""The share of a reference that may pass before all of it is queued."""
_AHEAD = 0.25
"""A host that is ahead by this share of a stretch at both its ends was so in between."""
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
        self._map, self._debt = ClockMap(), LostLead()
        self._passed = float("-inf")
        """The earliest host time at which the device passed the latest mark."""
        self._lead = float("-inf")
        """How much later than the host had queued it, at least."""
        self._lent = 0.0
        """The part of the lead that the host has only because spins held the device up."""
        self._open, self._sums = OpenStep(), Sums()
        self._spin = 0.0
        """How far the next stretch is made to begin behind the host."""
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
        if not self._is_beside_host:
            self._open.seconds += seconds
            if phase not in ("work", "calibration"):
                self._open.gaps[cast(Cause, phase)] += seconds
            return
        began, lead = self._passed, self._lead
        self._passed = self._map.add(end.device, end.earliest)
        self._lead = self._passed - end.after
        self._open.marking += end.taken + _PYTHON_SECONDS
        if phase == "work":
            self._work(start, end, began, lead)
        elif phase == "calibration":
            self._spin = seconds
            self._lent += seconds
        else:
            self._gap(phase, start, end, lead)
        self._debt.see(self._lead - self._lent)

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
        elif not step.is_measured:
            self._learn_references()
        else:
            self._record(step)
        self._open = OpenStep()

    def read(self) -> StallReading:
        """All whole steps so far."""
        return self._sums.read()

    def _gap(self, cause: Cause, start: Moment, end: Moment, lead: float) -> None:
        """Charge a gap that began with this lead of the host."""
        about, seconds = ABOUT[cause], end.device - start.device
        if not about.interrupts:
            self._close_stretch(cause)
            self._open.has_batch |= cause == "data"
            is_talk = cause == "communication" and not self._open.has_batch
            self._open.opener = "step" if is_talk else cause
        lead -= self._lent
        regained = self._regain(self._lead)
        if not about.drains or about.interrupts:  # else the host may have waited for the device
            seconds += regained
        self._open.seconds += seconds
        copied = 0.0
        if cause == "data":
            copied = min(end.device - start.device, max(0.0, self._lead - _SLACK_SECONDS))
        paid = 0.0 if cause == "communication" else self._debt.pay(seconds - copied)
        if paid:
            self._open.gaps[self._debt.owner] += paid
        if copied:
            self._open.gaps["copy"] += copied
        self._open.gaps[cause] += seconds - copied - paid
        if about.drains:
            self._debt.lose(cause, lead, self._lead - self._lent)

    def _work(self, start: Moment, end: Moment, began: float, lead: float) -> None:
        """Add work that the device began at a host time, with this lead of the host."""
        seconds = end.device - start.device
        stretch = self._open.stretch
        if stretch is None:
            stretch = Stretch(self._open.opener, start.after, end, self._spin)
            stretch.lead_before = lead
            self._open.stretch, self._spin = stretch, 0.0
        stretch.seconds += seconds
        stretch.bound += min(max(0.0, end.after - began), seconds)
        stretch.end, stretch.lead = end, self._lead

    def _close_stretch(self, closer: str) -> None:
        stretch, self._open.stretch = self._open.stretch, None
        if stretch is None:
            return
        stretch.kind = kind = Kind(stretch.opener, closer)
        lead = stretch.lead
        least = max(_LEAST_LEAD_SECONDS, _AHEAD * stretch.seconds)
        stretch.is_ahead = min(stretch.lead_before, lead) > least
        stretch.is_queued = stretch.bound <= _QUEUED * stretch.seconds
        stretch.is_queued |= stretch.is_ahead and stretch.spin > 0  # as far as the queue holds
        waited = self._watch_host(stretch, stretch.end.after - stretch.opened, lead)
        stretch.regained = max(0.0, self._regain(lead) - waited)
        self._open.seconds += stretch.seconds + stretch.regained
        self._find_payer(stretch)
        if kind in self._waiting and not stretch.is_known:
            self._debt.lose("wait", self._hidden_by_wait(stretch), lead - self._lent)
        self._open.stretches.append(stretch)

    def _regain(self, lead: float) -> float:
        """Return the seconds that the device would have idled, had no spin lent the host a lead.

        Without the spin the lead would be shorter by what was lent, and the device would idle
        where that is less than nothing. If the host has waited for the device instead, as in a
        queue that is full, less was lost.
        """
        lost = max(0.0, self._lent - max(0.0, lead))
        self._lent -= lost
        return lost

    def _find_payer(self, stretch: Stretch) -> None:
        """Who lost the lead that this stretch began without."""
        if stretch.kind.is_between:
            stretch.payer = "other"
        if stretch.is_known or self._debt.seconds < 0.5 * stretch.bound or not stretch.bound:
            return
        stretch.payer = self._debt.owner
        self._debt.pay(max(0.0, min(self._longer(stretch), stretch.bound)))

    def _longer(self, stretch: Stretch) -> float:
        """How much longer than its reference it took."""
        reference = self._sums.reference(stretch.kind)
        if reference is None:
            return stretch.bound if stretch.kind.is_between else 0.0
        return stretch.seconds - reference.total(1, stretch.slots)

    def _watch_host(self, stretch: Stretch, host: float, lead: float) -> float:
        """Return for how long the host waited for the device in a stretch that took it `host`.

        A host that takes longer by the time that the device was held up waits there each time.
        """
        usual = self._host_seconds.setdefault(stretch.kind, host)
        if not stretch.spin:
            self._host_seconds[stretch.kind] = min(host, 1.1 * usual)
        elif host - usual > 0.5 * stretch.spin and lead <= _LEAST_LEAD_SECONDS:
            self._waiting.add(stretch.kind)
            stretch.is_queued = True  # up to the wait
        else:
            self._waiting.discard(stretch.kind)
        if stretch.kind in self._waiting:
            return host
        return host - usual if host > _WAITED * usual else 0.0

    def _hidden_by_wait(self, stretch: Stretch) -> float:
        """The lead that a host had at the end, did it not wait: none, where it is the slower."""
        return 0.0 if self._longer(stretch) > 0.1 * stretch.seconds else stretch.seconds

    def _share(self, slots: int) -> None:
        """The stretches of a step are taken for equal."""
        working = [stretch for stretch in self._open.stretches if not stretch.kind.is_between]
        for stretch in working:
            stretch.slots = slots / len(working)

    def _learn_references(self) -> None:
        """Learn from a step that does not count: only what was queued behind a spin."""
        for stretch in self._open.stretches:
            if stretch.spin and stretch.is_queued:
                line = self._sums.queued.setdefault(stretch.kind, Line())
                line.add(stretch.slots, stretch.seconds)

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

    def _record(self, step: StepEnd) -> None:
        sums, seconds, gaps = self._sums, self._open.seconds, self._open.gaps
        sums.steps += 1
        sums.tokens += step.tokens
        sums.slots += step.slots
        sums.seconds += seconds
        if self._lead < seconds:  # a host that is a whole step ahead loses nothing by its marks
            sums.marking_seconds += self._open.marking
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
        if stretch.is_known:
            lines = self._sums.queued if stretch.is_queued else self._sums.ahead
            lines.setdefault(stretch.kind, Line()).add(stretch.slots, stretch.seconds)
        if stretch.is_queued and not stretch.regained:
            return 0.0
        payment = Payment(stretch.kind, stretch.payer)
        self._sums.work[payment].add(stretch)
        alone = WorkSums()
        alone.add(stretch)
        reference = self._sums.reference(stretch.kind)
        self._open.gaps[stretch.payer] += idle_seconds(alone, reference, stretch.payer)
        return 0.0 if stretch.is_known or not self._needs_reference(payment) else stretch.bound

    def _needs_reference(self, payment: Payment) -> bool:
        if payment.kind.is_between:
            return False
        queued = self._sums.queued.get(payment.kind)
        known = queued.count if queued else 0
        return known < _FEW_REFERENCES + _SHARE_OF_REFERENCES * self._sums.work[payment].count
