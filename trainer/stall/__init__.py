"""Stall: time in which the device has no training work to run, by cause, with an error bar.

    meter         StallMeter: what a loop calls
    marks         clocks, and the chain of marks in the device's queue
    traces        when to trace kernels, and how busy the device is in a trace
    kineto        traces of a GPU by torch.profiler
    idle          steps and traces to idle seconds with an interval, without side effects
    cpu_work      where the work of a step begins on a CPU
    waits         source lines that wait for a GPU
    watchers      loader, collector, compiler, memory and cores
    reading       readings of a meter
    causes        what a device may wait for, with thresholds and remedies
    ranks         the ranks of a run, compared
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
