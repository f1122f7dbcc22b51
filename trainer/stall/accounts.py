"""The stall accounts turn segments of device time into idle seconds by cause, without I/O.

Each segment starts where the previous segment ends. A segment is work, a calibration spin, or a
gap: a cause during which no work of the training was queued. All of a gap is idle time. Segments of
work are joined into spans, up to the next gap or mark. The idle time inside spans cannot be
measured directly. It is the time of all spans minus the time of their references (see `reading`).

The cause of idle time is not always the cause that is active while the device idles. A host that is
ahead of the device hides the time of its loader. A host that waits for a value, or stops to log,
loses its lead. Then the next batch is late, although the loader is fast. So idle time is charged to
the cause that lost the lead, until the lead is as long as before.

Example: the host is 5 ms ahead, and `.item()` takes all of the 5 ms. The next batch takes 2 ms,
during which the device idles. These 2 ms are charged to `wait`, and 3 ms of the lost lead remain.
Once the host is 4 ms ahead again, only 1 ms remains.
"""

import copy
import dataclasses
import math
from typing import Literal, NamedTuple, cast

from tokenfeed.trainer.stall.causes import ABOUT, Cause, Phase
from tokenfeed.trainer.stall.device import ClockMap, Moment
from tokenfeed.trainer.stall.reading import (
    BatchMeans,
    Charge,
    Histogram,
    LinearFit,
    OpenStep,
    SpanKind,
    StallReading,
    StepTimes,
    WorkSpan,
    WorkSums,
    idle_seconds,
)


class LostLead:
    """The part of the host's lead that a cause has lost and the host has not yet regained."""

    def __init__(self) -> None:
        self.cause: Cause = "wait"
        self.seconds = 0.0
        self._lead_before = 0.0

    def record(self, cause: Cause, before: float, after: float) -> None:
        """Record that the lead shrank during `cause`. Of two losses, the larger one is kept."""
        lost = before - max(0.0, after)
        if lost > self.seconds:
            self.cause, self.seconds, self._lead_before = cause, lost, before

    def update(self, lead: float) -> None:
        """Reduce the loss, now that the host has this lead again."""
        if self.seconds:
            self.seconds = min(self.seconds, max(0.0, self._lead_before - lead))

    def take(self, idle: float) -> float:
        """Return the part of `idle` seconds that the loss explains, and reduce the loss by it."""
        paid = min(idle, self.seconds)
        self.seconds -= paid
        return paid


_SLACK_SECONDS = 50e-6
"""Usual seconds between two kernel launches. A longer delay of a batch means that it was copied."""
_LEAST_LEAD_SECONDS = 30e-6
_PYTHON_SECONDS = 12e-6
"""Host seconds of the meter's Python around a mark; `benchmarks/stall/` measured 11.4 µs."""
_WAITED = 1.5
"""A host that takes this many times its usual time to queue a span has waited for the device."""
_QUEUED = 0.002
"""Largest share of a reference span that may run before the whole span is queued."""
_AHEAD = 0.25
"""A host that leads by this share of a span at both ends counts as ahead throughout the span."""
_MARGIN = 0.1
"""A host leads by this share of a span more than it could after a stop: then it did not stop."""
_WAKING_SECONDS = 10e-6
"""Seconds from the end of a wait to the mark after it: at least two latencies."""
_MIDWAY = 0.1
"""A wait for the device is in the middle of a step with more than this share of its work behind."""
_FEW = 3
"""References behind a full queue that are enough to ignore those of a host that is ahead."""
_FEW_REFERENCES = 8
_SHARE_OF_REFERENCES = 0.02
"""Calibration stops when the references reach this share of the spans, plus `_FEW_REFERENCES`."""


Divider = Literal["mark", "stop"]
"""What divides work: a mark of the program, or a wait for the device in an examined step."""


class StepEnd(NamedTuple):
    """What `StallMeter.step` records about a step."""

    tokens: int
    slots: int
    is_measured: bool = True
    """False if the meter itself slowed the step down."""
    blamed: Cause | None = None
    """An event that happened during the step, at an unknown time."""


class Accounts:
    """Adds up segments to steps, and steps to sums of the run."""

    def __init__(self, *, is_beside_host: bool, skipped_steps: int) -> None:
        self._is_beside_host = is_beside_host
        self._skipped_steps = skipped_steps
        self._map, self._lost_lead = ClockMap(), LostLead()
        self._passed = float("-inf")
        """The earliest host time at which the device can have passed the latest mark."""
        self._lead = float("-inf")
        """Lower bound of the host's lead: seconds from queueing the mark to `_passed`."""
        self._spin_lead = 0.0
        """The part of the lead that the host has only because spins delayed the device."""
        self._step, self._sums = OpenStep(), StallReading()
        self._queued: dict[SpanKind, LinearFit] = {}
        """References from spans whose kernels were all queued before they began. Includes steps
        that are not measured."""
        self._ahead: dict[SpanKind, LinearFit] = {}
        """References from spans with the host ahead of the device at both ends."""
        self._partly: dict[SpanKind, LinearFit] = {}
        """Upper bounds of references from spans behind a spin that were queued only in part, since
        the queue of a device is limited."""
        self._spin = 0.0
        """Length of a spin just before the next span; 0 without a spin."""
        self._host_seconds: dict[SpanKind, float] = {}
        """Usual host seconds to queue a span."""
        self._is_slower: dict[SpanKind, bool] = {}
        """Whether the host has no lead at the end of a span without a spin."""
        self._waiting: set[SpanKind] = set()
        """Kinds of spans inside which the host waits for the device."""
        self._divided: set[SpanKind] = set()
        """Kinds of spans with a wait in the middle. What follows the wait is queued late, so only
        examined steps have references."""
        self._host_alone: dict[SpanKind, LinearFit] = {}
        """Host seconds to queue such a span, without waits."""
        self.waits_inside = False
        """Whether a spin has shown that the host may wait for the device inside a span."""
        self._is_partly_queued = False
        """Whether the kernels after a stop of the host inside a span are queued late."""
        self._usual: dict[SpanKind, LinearFit] = {}
        """Usual device seconds of a span, waits included, in steps without a blamed event."""
        self.behind_share = 0.0
        """Share of the time in which the device may have been idle unseen; a moving average."""
        self.batches = BatchMeans()
        self.histograms: dict[Cause, Histogram] = {}
        self.step_times = StepTimes()

    def take_as_partly_queued(self) -> None:
        """Take it that spans behind a spin in which the host stops are queued in part.

        The host stops for the device in the middle of the work, or for a full queue: the rest of
        the span is queued while the device runs it. References so far become upper bounds. Later
        ones are from spans that were queued as a whole.
        """
        if self._is_partly_queued or not self._waiting:
            return
        self._is_partly_queued = True
        for kind in self._waiting:
            self._take_as_bound(kind)

    def _take_as_bound(self, kind: SpanKind) -> None:
        if (line := self._queued.pop(kind, None)) is not None:
            self._partly[kind] = line

    def add(self, phase: Phase, start: Moment, end: Moment) -> None:
        """Add a segment."""
        seconds = end.device - start.device
        if not self._is_beside_host:
            self._step.seconds += seconds
            if phase not in ("work", "calibration"):
                self._step.gaps[cast(Cause, phase)] += seconds
            return
        began, lead = self._passed, self._lead
        self._passed = self._map.add(end.device, end.earliest)
        self._lead = self._passed - end.after
        self._step.marking += end.taken + _PYTHON_SECONDS
        if phase == "work":
            self._work(start, end, began, lead)
        elif phase == "calibration":
            self._spin = seconds
            self._spin_lead += seconds
        else:
            self._gap(phase, start, end, lead)
        self._lost_lead.update(self._lead - self._spin_lead)

    def mark(self, divider: Divider) -> None:
        """Handle a mark inside the work, at the end of the latest segment."""
        name: str = divider
        if divider == "mark":
            self._step.marks += 1
            name = f"mark {self._step.marks}"
        self._close_span(name)
        self._step.opener = name

    def end_step(self, step: StepEnd) -> None:
        """Handle the end of a step, at the end of the latest segment."""
        self._close_span("step")
        self._join_parts()
        self._share(step.slots)
        if step.blamed is not None:
            self._blame(step.blamed)
        # A spin hides idle time before a wait, and the wait then uses up the lead.
        is_hidden = any(span.spin and span.kind in self._divided for span in self._step.spans)
        if self._skipped_steps or not step.is_measured or is_hidden:
            self._skipped_steps = max(0, self._skipped_steps - 1)
            self._add_references()
        else:
            self._record(step)
        self._step = OpenStep()

    def read(self) -> StallReading:
        """Return the sums of all whole steps so far. Later steps do not change the reading."""
        kinds = self._queued.keys() | self._ahead.keys()
        references = {kind: line for kind in kinds if (line := self._reference(kind)) is not None}
        bounds = {kind: line for kind, line in self._partly.items() if kind not in references}
        return copy.deepcopy(
            dataclasses.replace(self._sums, references=references, upper_references=bounds)
        )

    def _reference(self, kind: SpanKind) -> LinearFit | None:
        """Return the reference of a kind of spans, preferably from spans behind a full queue."""
        queued, ahead = self._queued.get(kind), self._ahead.get(kind)
        if queued is None or (queued.count < _FEW and ahead is not None):
            return ahead
        return queued

    def _gap(self, cause: Cause, start: Moment, end: Moment, lead: float) -> None:
        """Charge a gap. `lead` is the host's lead at its start."""
        about, seconds = ABOUT[cause], end.device - start.device
        if not about.interrupts:
            self._close_span(cause)
            self._step.has_batch |= cause == "data"
            # Ranks that talk before the first batch do so between steps, not inside the work.
            is_between_steps = cause == "communication" and not self._step.has_batch
            self._step.opener = "step" if is_between_steps else cause
        elif self._step.span is not None:
            self._step.span.is_interrupted = True
        lead -= self._spin_lead
        hidden_idle = self._idle_without_spins(self._lead)
        if not about.drains or about.interrupts:
            # Else the host may have waited for the device, which explains the lost lead.
            seconds += hidden_idle
        self._step.seconds += seconds
        copied = 0.0
        if cause == "data":
            # A batch that was ready, but reached the device late, was copied meanwhile.
            copied = min(end.device - start.device, max(0.0, self._lead - _SLACK_SECONDS))
        paid = 0.0 if cause == "communication" else self._lost_lead.take(seconds - copied)
        if paid:
            self._step.gaps[self._lost_lead.cause] += paid
        if copied:
            self._step.gaps["copy"] += copied
        self._step.gaps[cause] += seconds - copied - paid
        if about.drains:
            self._lost_lead.record(cause, lead, self._lead - self._spin_lead)

    def _work(self, start: Moment, end: Moment, began: float, lead: float) -> None:
        """Add work that the device started at host time `began`. `lead` is the host's lead then."""
        seconds = end.device - start.device
        span = self._step.span
        if span is None:
            span = WorkSpan(self._step.opener, start.after, end, self._spin)
            span.lead_before = lead
            self._step.span, self._spin = span, 0.0
        span.seconds += seconds
        # After the host has queued the whole span, the device cannot idle in it: hence the bound.
        span.bound += min(max(0.0, end.after - began), seconds)
        span.end, span.lead = end, self._lead

    def _close_span(self, closer: str) -> None:
        span, self._step.span = self._step.span, None
        if span is None:
            return
        span.kind = kind = SpanKind(span.opener, closer)
        lead = span.lead
        least = max(_LEAST_LEAD_SECONDS, _AHEAD * span.seconds)
        span.is_ahead = min(span.lead_before, lead) > least
        span.is_queued = span.bound <= _QUEUED * span.seconds
        # Behind a spin, all kernels are queued in time, up to the length of the device's queue.
        span.is_queued |= span.is_ahead and span.spin > 0
        span.host = span.end.after - span.opened
        if kind in self._divided:
            span.is_queued = span.is_ahead = False
        waited = self._watch_host(span, span.host, lead)
        span.hidden_idle = max(0.0, self._idle_without_spins(lead) - waited)
        self._step.seconds += span.seconds + span.hidden_idle
        self._find_cause(span)
        if kind in self._waiting and not span.is_known:
            self._lost_lead.record("wait", self._hidden_by_wait(span), lead - self._spin_lead)
        self._step.spans.append(span)

    def _idle_without_spins(self, lead: float) -> float:
        """Return the seconds that the device would have idled without spins.

        Without spins the lead would be shorter by `_spin_lead`. The device would idle where it
        would be negative. If the host has waited for the device instead, as with a full queue, less
        was lost.

        Example: spins gave the host 3 ms of its lead, and the lead is now 1 ms. Without spins the
        device would have idled for 2 ms. The other 1 ms is still to come.
        """
        lost = max(0.0, self._spin_lead - max(0.0, lead))
        self._spin_lead -= lost
        return lost

    def _find_cause(self, span: WorkSpan) -> None:
        """Charge a span to the cause that lost the lead, if the lost lead explains its idle
        time."""
        if span.kind.is_between_steps:
            span.cause = "other"
        if span.is_known or self._lost_lead.seconds < 0.5 * span.bound or not span.bound:
            return
        span.cause = self._lost_lead.cause
        self._lost_lead.take(max(0.0, min(self._longer(span), span.bound)))

    def _longer(self, span: WorkSpan) -> float:
        """Return how much longer than its reference a span took."""
        reference = self._reference(span.kind)
        if reference is None:
            return span.bound if span.kind.is_between_steps else 0.0
        return span.seconds - reference.total(1, span.slots)

    def _watch_host(self, span: WorkSpan, host: float, lead: float) -> float:
        """Return the seconds that the host waited for the device in a span.

        A spin shows whether the host waits there: then the host takes longer by the length of the
        spin.

        Args:
            span: The span.
            host: Host seconds to queue the span.
            lead: The host's lead at the end of the span.
        """
        if "stop" in span.kind:
            return 0.0
        usual = self._host_seconds.setdefault(span.kind, host)
        has_waited = span.spin > 0 and host - usual > 0.5 * span.spin
        # With a lead longer than the span, the host has waited for a full queue.
        self.waits_inside |= has_waited and lead < span.seconds and not span.is_interrupted
        if not span.spin:
            self._host_seconds[span.kind] = min(host, 1.1 * usual)
            self._is_slower[span.kind] = lead - self._spin_lead < _AHEAD * span.seconds
        elif has_waited and lead <= _LEAST_LEAD_SECONDS:
            if self._is_partly_queued and span.kind not in self._waiting:
                self._take_as_bound(span.kind)
            self._waiting.add(span.kind)
            # Its kernels were queued in time, up to the wait.
            span.is_queued = not self._is_partly_queued and span.kind not in self._divided
        else:
            self._waiting.discard(span.kind)
        if span.kind in self._waiting:
            return host
        return host - usual if host > _WAITED * usual else 0.0

    def _hidden_by_wait(self, span: WorkSpan) -> float:
        """Return the lead that the host would have had without the wait; 0 if the host is
        slower."""
        return 0.0 if self._longer(span) > 0.1 * span.seconds else span.seconds

    def _join_parts(self) -> None:
        """Join the parts of spans that waits divide in an examined step.

        Such a span is a reference if each of its parts was queued as a whole. If much of it follows
        a wait, spans of its kind in other steps are no references.
        """
        joined: list[WorkSpan] = []
        late = 0.0
        for part in self._step.spans:
            if part.kind.closer == "stop":
                part.seconds = max(0.0, part.seconds - _WAKING_SECONDS)
            late = late + part.seconds if part.opener == "stop" else 0.0
            if part.opener != "stop" or not joined:
                joined.append(part)
                continue
            span = joined[-1]
            span.kind = kind = SpanKind(span.opener, part.kind.closer)
            span.seconds += part.seconds
            span.bound += part.bound
            span.host += part.host
            span.is_queued &= part.is_queued and not part.is_interrupted
            span.is_ahead = False
            span.spin = min(span.spin, part.spin)
            if (
                kind.closer != "stop"
                and late > _MIDWAY * span.seconds
                and kind not in self._divided
            ):
                self._divided.add(kind)
                self._take_as_bound(kind)
                self._ahead.pop(kind, None)
        self._step.spans = joined

    def _share(self, slots: int) -> None:
        """Divide the slots of a step equally among its spans of work."""
        working = [span for span in self._step.spans if not span.kind.is_between_steps]
        for span in working:
            span.slots = slots / len(working)

    def _add_references(self) -> None:
        """Add references from a step that is not measured: only spans behind a spin."""
        for span in self._step.spans:
            if span.spin:
                fits = self._queued if span.is_queued else self._partly
                fits.setdefault(span.kind, LinearFit()).add(span.slots, span.seconds)
                if span.is_queued and span.kind in self._divided:
                    host = self._host_alone.setdefault(span.kind, LinearFit())
                    host.add(span.slots, span.host)

    def _blame(self, cause: Cause) -> None:
        """Charge a cause with the excess of this step's spans over their usual time.

        If every step so far had such an event, nothing is usual. Then all idle time of the spans is
        charged to the cause, unless the host is slower than the device. A span is a reference only
        if the host certainly did not stop for the device inside it.
        """
        if spans := self._step.spans:
            before = spans[0].lead_before - self._spin_lead
            self._lost_lead.record(cause, before, self._lead - self._spin_lead)
        for span in spans:
            if span.bound > _QUEUED * span.seconds and self._may_have_stopped(span):
                span.is_queued = span.is_ahead = False
            usual = self._usual.get(span.kind)
            if usual is None:
                reference = self._reference(span.kind)
                alone = reference.total(1, span.slots) if reference else math.inf
                if self._host_seconds.get(span.kind, 0.0) > alone:
                    continue
                span.cause = cause
                self._waiting.discard(span.kind)  # the event explains the wait
                lead = self._lead - self._spin_lead
                self._lost_lead.record(cause, self._hidden_by_wait(span), lead)
                continue
            longer = span.seconds - usual.total(1, span.slots)
            longer = min(max(0.0, longer), span.bound)
            span.seconds -= longer
            span.bound -= longer
            self._step.gaps[cause] += longer

    def _may_have_stopped(self, span: WorkSpan) -> bool:
        """Return whether the host may have stopped for the device inside a span.

        Behind a spin, such a host takes longer by the length of the spin, as with a full queue.
        Afterwards its lead is at most the difference between its time for the span and the
        device's.

        Example: the host takes 10 ms for a span, and the device 12 ms. After a stop the host leads
        by at most 2 ms at the end of the span. If it leads by 5 ms, it did not stop.
        """
        if not (span.spin and span.is_ahead):
            return True
        usual = self._host_seconds.get(span.kind, 0.0)
        has_waited = span.host - usual > 0.5 * span.spin
        if not self._is_slower.get(span.kind):  # its usual time may contain waits
            return has_waited
        return has_waited and span.lead + usual < (1 + _MARGIN) * span.seconds

    def _record(self, step: StepEnd) -> None:
        for span in self._step.spans:
            self._split_idle(span)
        sums, seconds, gaps = self._sums, self._step.seconds, self._step.gaps
        sums.steps += 1
        sums.tokens += step.tokens
        sums.slots += step.slots
        sums.seconds += seconds
        if self._lead < seconds:  # a host that leads by a whole step loses nothing to marks
            sums.marking_seconds += self._step.marking
        for cause, idle in gaps.items():
            sums.gaps[cause] = sums.gaps.get(cause, 0.0) + idle
        behind = sum(map(self._record_span, self._step.spans))
        if step.blamed is None:
            for span in self._step.spans:
                self._usual.setdefault(span.kind, LinearFit()).add(span.slots, span.seconds)
        if seconds:
            self.behind_share += 0.1 * (behind / seconds - self.behind_share)
        self.batches.add(seconds, gaps)
        self.step_times.add(seconds)
        for cause, idle in gaps.items():
            self.histograms.setdefault(cause, Histogram()).add(idle)

    def _split_idle(self, span: WorkSpan) -> None:
        """Charge to `wait` what a span with waits in the middle takes longer than without them.

        Without waits it takes as long as the slower of host and device.
        """
        host, device = self._host_alone.get(span.kind), self._queued.get(span.kind)
        if host is None or device is None:
            return
        queueing, alone = host.total(1, span.slots), device.total(1, span.slots)
        if queueing <= alone:
            span.cause = "wait"
            return
        waited = min(max(0.0, span.seconds - queueing), span.bound)
        span.seconds -= waited
        span.bound -= waited
        self._step.gaps["wait"] += waited

    def _record_span(self, span: WorkSpan) -> float:
        """Add a span to the sums. Return how many of its seconds may have been idle unseen."""
        if span.is_known:
            fits = self._queued if span.is_queued else self._ahead
            fits.setdefault(span.kind, LinearFit()).add(span.slots, span.seconds)
        elif span.spin:
            self._partly.setdefault(span.kind, LinearFit()).add(span.slots, span.seconds)
        if span.is_queued and not span.hidden_idle:
            return 0.0
        charge = Charge(span.kind, span.cause)
        self._sums.work.setdefault(charge, WorkSums()).add(span)
        alone = WorkSums()
        alone.add(span)
        reference = self._reference(span.kind) or self._partly.get(span.kind)
        self._step.gaps[span.cause] += idle_seconds(alone, reference, span.cause)
        return 0.0 if span.is_known or not self._needs_reference(charge) else span.bound

    def _needs_reference(self, charge: Charge) -> bool:
        if charge.kind.is_between_steps or charge.kind in self._divided:
            return False
        queued = self._queued.get(charge.kind)
        known = queued.count if queued else 0
        return known < _FEW_REFERENCES + _SHARE_OF_REFERENCES * self._sums.work[charge].count
