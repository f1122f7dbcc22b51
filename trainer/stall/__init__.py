"""Stall: time in which the device has no training work to run, by cause, with an error bar.

    meter         StallMeter: the marks of a loop, and their chain
    causes        what a device may wait for, with thresholds and remedies
    device        the device, its clock, and when to delay it so that the host gets ahead
    accounts      segments to idle seconds by cause, without side effects
    reading       spans of work, running sums, readings with error bars
    ranks         the ranks of a run, compared
    watchers      loader, collector, compiler, memory, and waits for the GPU
    stall_report  report.json and lines of text
    verdict       verdict, reason, next step, and advice
    stall_page    report.html

Nothing here imports torch before a meter is made.
"""

from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.meter import StallMeter, warmup_steps
from tokenfeed.trainer.stall.reading import StallReading
from tokenfeed.trainer.stall.stall_report import CauseReport, StallReport

__all__ = [
    "CAUSES",
    "Cause",
    "CauseReport",
    "StallMeter",
    "StallReading",
    "StallReport",
    "warmup_steps",
]
