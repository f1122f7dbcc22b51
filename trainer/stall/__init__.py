"""Stall: time in which the device has nothing of the training to run, by cause, with an error bar.

    meter        StallMeter: the marks of a loop
    causes       what a device may wait for, with thresholds and advice
    clocks       the protocol of a clock; host time of device time
    device       the device, and the clock of a GPU
    marks        the chain of marks; the latest segments, for Perfetto
    accounts     segments to idle seconds by cause: pure
    work         spans of work and their references
    calibration  when to delay the device, so that the host gets ahead
    watchers     loader, collector, compiler, memory, lines that wait
    statistics   percentiles, step times, error bars
    reading      sums, and their differences
    ranks        the exchange between ranks, and the slowest rank
    report, make_report, page

Nothing here imports torch before a meter is made.
"""

from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.meter import StallMeter, warmup_steps
from tokenfeed.trainer.stall.reading import StallReading
from tokenfeed.trainer.stall.report import CauseReport, StallReport

__all__ = [
    "CAUSES",
    "Cause",
    "CauseReport",
    "StallMeter",
    "StallReading",
    "StallReport",
    "warmup_steps",
]
