"""Stall: time in which the device has no training work to run, by cause, with an error bar.

    meter        StallMeter: the marks of a loop
    causes       what a device may wait for, with thresholds and remedies
    device       the device, and the clock of a GPU
    marks        the chain of marks; the latest segments, for Perfetto
    accounts     segments to idle seconds by cause, without side effects
    reading      spans of work, running sums, and readings of these sums
    calibration  when to delay the device, so that the host gets ahead
    watchers     loader, collector, compiler, memory, and waits for the GPU
    statistics   percentiles, step times, error bars
    ranks        the exchange between ranks, and the slowest rank
    make_report  the report from the accounts, with advice
    report       report.json, lines of text, and page.html

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
