"""Stall: time in which the device has no training work to run, by cause, with an error bar.

    meter         StallMeter: the marks of a loop, and their chain
    causes        what a device may wait for, with thresholds and remedies
    device        the device, and the clock of a GPU
    accounts      segments to idle seconds by cause, without side effects
    reading       spans of work, running sums, readings of these sums, and the slowest rank
    calibration   when to delay the device, so that the host gets ahead
    watchers      loader, collector, compiler, memory, and waits for the GPU
    statistics    percentiles, step times, error bars
    make_report   the report from the accounts, with advice
    stall_report  report.json, lines of text, and page.html

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
