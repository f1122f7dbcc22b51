"""Stall: time in which the device has nothing of the training to run, by cause, with an error bar.

    causes        what a device may wait for                 meter       StallMeter: marks of a loop
    clock         the protocol; the host's clock             events      the clock of a GPU
    ledger        segments to idle time by cause: pure       work        stretches and references
    clock_map     host time of device time                   debts       who lost the host's lead
    calibration   when to let the host get ahead             waits       lines that wait
    watchers      collector, compiler, memory                machine     the device
    batches       error bars; histogram: percentiles         reading     sums, and their differences
    reporting, report, table, advice                         ranks       the slowest of several
    chain         marks, one after the other                 told        what a loop may say
    watched       a loader whose batches are waited for      step_times  how long steps take
    timeline      the latest segments, for Perfetto          exchange     from rank to rank
    warmup        steps that are left out

Nothing here imports torch before a meter is made.
"""

from tokenfeed.trainer.stall.causes import CAUSES, Cause
from tokenfeed.trainer.stall.meter import StallMeter
from tokenfeed.trainer.stall.reading import StallReading
from tokenfeed.trainer.stall.report import CauseReport, StallReport
from tokenfeed.trainer.stall.warmup import warmup_steps

__all__ = [
    "CAUSES",
    "Cause",
    "CauseReport",
    "StallMeter",
    "StallReading",
    "StallReport",
    "warmup_steps",
]
