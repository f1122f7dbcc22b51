"""The result of a watch: lines of text on stderr, and report.json with the page."""

import contextlib
import dataclasses
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import stdev
from typing import Any

from tokenfeed.pipeline.text import count_of, facts
from tokenfeed.trainer.stall.causes import REMEDIES, Cause
from tokenfeed.trainer.stall.stall_report import (
    RunTimes,
    StallReport,
    short,
)
from tokenfeed.trainer.stall.verdict import conclude
from tokenfeed.trainer.stall.watchers import Loader
from tokenfeed.trainer.watch.lines import Line
from tokenfeed.trainer.watch.places import FRAMEWORKS, Place, Site, interval_of
from tokenfeed.trainer.watch.ranks import RankFiles

_WAIT_S, _WAIT_AFTER_ERROR_S = 5.0, 1.0
"""Seconds that the first rank of a node waits for the readings of the others, at the end of the
script and after an error."""

_CLOSE = 1.2
"""If an ideal loader makes a loop more times as fast than the time without waiting allows, by this
factor, or less, something else has changed the steps."""


@dataclass(slots=True)
class Run:
    """What the hooks saw in one process. Times are those of the host."""

    place: tuple[int, int] | None = None
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    """When the first step ended."""
    last: float = 0.0
    ended: float = 0.0
    end: str = ""
    """What ended the script early; empty if it came to its end."""
    fault: str = ""
    """The error of a hook, which ended the watch."""
    steps: int = 0
    skipped: int = 0
    backwards: int = 0
    by_optimizer: bool = False
    """Whether steps are those of an optimizer, not backward passes."""
    optimizers: list[str] = field(default_factory=list)
    leader: int = 0
    """Index of the optimizer whose steps count."""
    loaders: dict[int, Loader] = field(default_factory=dict)
    """The loaders of the script, by the id of their data set. A ShardLoader has the id 0."""
    trained_on: int = 0
    """The id of the data set of the latest step."""
    children: int = 0
    """Processes that `mp.spawn` started."""
    parts: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of blocks by cause since the latest step, without data."""
    sites: dict[Cause, defaultdict[Site, float]] = field(default_factory=dict)
    """Seconds by cause and by source line, since the first step."""
    known: float = 0.0
    """Seconds in blocks so far."""
    known_before: float = 0.0
    """The same at the latest step."""
    other_seconds: float = 0.0
    """Seconds in blocks that are not data."""
    lines: list[Line] = field(default_factory=list)
    ideal_marks: list[tuple[float, float]] = field(default_factory=list)
    """Before and after each step with the loader, then before and after each step with replayed
    batches: the time, and `other_seconds`."""
    ideal_steps: int = 0
    replayed: int = 0
    """Batches that were replayed."""
    missing: list[int] = field(default_factory=list)
    """Ranks that left no reading."""
    lost: str = ""
    """Why a file was not written or read."""
    report: Any = None

    def spent(self, cause: Cause, seconds: float, site: Site | None) -> None:
        """Count a block of time."""
        self.known += seconds
        if cause != "data":
            self.other_seconds += seconds
            self.parts[cause] += seconds
        if site is not None and site.places:
            self.sites.setdefault(cause, defaultdict(float))[site] += seconds

    def restart(self) -> None:
        """Count steps anew."""
        self.steps = self.skipped = 0

    def times(self, measured: float) -> RunTimes:
        """Return the parts of the whole run."""
        now = self.ended or time.perf_counter()
        data = max(0.0, self.known - self.known_before - sum(self.parts.values()))
        before, steps = self.first - self.began, self.last - self.first
        return RunTimes(
            total=now - self.began,
            before=before,
            warmup=max(0.0, steps - measured),
            after=now - self.last,
            after_by_cause={**self.parts, "data": data},
            finished=bool(self.ended),
        )

    def step_words(self) -> str:
        """Describe what a step is."""
        if not self.by_optimizer:
            return f"{self.steps:,} steps, which are backward passes: no optimizer of torch stepped"
        steps, name = count_of(self.steps, "step"), self.optimizers[self.leader]
        text = f"{steps} of {name}"
        if (count := len(self.optimizers)) > 1:
            text = f"{steps}, at last of {name}, number {self.leader + 1} of {count} optimizers"
        if self.skipped:
            text += f"; the scaler skipped {self.skipped:,} of them"
        return text

    def unseen_words(self, has_torch: bool) -> str:
        """Explain why there is no step."""
        if not has_torch:
            return "the script did not import torch"
        seen = ", ".join(
            count_of(number, noun, plural)
            for number, noun, plural in (
                (len(self.optimizers), "optimizer step", ""),
                (self.backwards, "backward pass", "backward passes"),
                (len(self.loaders), "DataLoader", ""),
            )
        )
        return (
            f"{seen} in this process, and inference alone is not measured. Does a process that it "
            "started train?"
        )

    def missing_words(self) -> str:
        """Name the ranks that left no reading, and files that could not be used."""
        words = [self.lost] if self.lost else []
        if self.missing:
            ranks = ", ".join(map(str, self.missing))
            words.append(
                f"ranks {ranks} left no reading. Start all of them by "
                "`torchrun ... -m tokenfeed stall ...`"
            )
        return "\n".join(words)

    def line_words(self) -> str:
        """Describe host code that no hook sees."""
        found = []
        for line in self.lines:
            words = [str(Place(line.file, line.line))]
            words += [f"calls {line.calls}()"] * bool(line.calls)
            words += ["counts as work"] * (not line.is_between)
            words += [] if line.share is None else [f"{line.share:.1%} ±{line.error:.1%}"]
            found.append(", ".join(words))
        if found and not hasattr(sys, "monitoring"):
            found[-1] += " (shares of lines need Python 3.12)"
        return "\n".join(found)

    def ideal_words(self) -> str:
        """Compare steps with the loader and steps with replayed batches."""
        if not self.ideal_steps:
            return ""
        if not self.replayed:
            return "no batch of a DataLoader was seen, so none was replayed"
        count = self.ideal_steps
        halves = self.ideal_marks[: count + 1], self.ideal_marks[count + 1 :]
        (with_loader, spread), (ready, ready_spread) = map(_mean_step, halves)
        words = (
            f"{short(with_loader)} ±{spread / with_loader:.0%} a step with the loader, "
            f"{short(ready)} ±{ready_spread / ready:.0%} with batches that are ready: "
        )
        # How many times as fast, at least and at most; and what the time without waiting allows.
        least = (with_loader - spread) / (ready + ready_spread)
        most = (with_loader + spread) / max(1e-9, ready - ready_spread)
        waiting = sum(self.report.causes[cause].fraction for cause in ("data", "copy"))
        allowed = 1 / max(1e-3, 1 - waiting)
        if least > _CLOSE * allowed or most < allowed / _CLOSE:
            return words + (
                f"not comparable. The loop waited for batches for {waiting:.1%} of the time, which "
                f"makes it up to {allowed:.2f} times as fast. Other load of the machine, or loader "
                "workers on the same cores, changed the steps"
            )
        if least <= 1:
            return words + "no difference beyond the spread of the steps"
        return words + f"{least:.2f} to {most:.2f} times as fast"

    def remedies(self) -> dict[str, str]:
        """Return what to change, with the settings and lines of this script."""
        found = {
            "wait": "read values such as `loss.item()` a step later, or only when you log",
            "communication": "exchange gradients less often, or use a faster network. To find a "
            "late rank, start all of them by `torchrun ... -m tokenfeed stall ...`",
            "other": "do less between the steps",
            "steps": "train for more steps: the first ones are warm-up",
        }
        for cause, sites in self.sites.items():
            site = max(sites, key=sites.__getitem__)
            if cause == "data":
                place = site.places[0]
                found["data"] = f"make batches in more threads or workers than now ({place})"
            elif cause in ("evaluation", "checkpoint", "log"):
                found[cause] = _remedy(cause, site)
        if first := next((Place(*line[:2]) for line in self.lines if line.is_between), None):
            found["other"] = f"look at {first}, or let a worker do what it does"
        return found


def _mean_step(marks: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean seconds of a step without other causes than data, and the half width of its
    95 % interval."""
    steps = [
        ended - began - (after - before) for (began, before), (ended, after) in pairwise(marks)
    ]
    mean = sum(steps) / len(steps)
    return mean, 1.96 * stdev(steps) / len(steps) ** 0.5 if len(steps) > 1 else mean


def _remedy(cause: Cause, site: Site) -> str:
    """Return which setting to change, and at which line."""
    remedy, line = REMEDIES[cause], site.places[0]
    if site.framework:
        return f"{FRAMEWORKS[site.framework][cause]} ({site.places[-1]})"
    if (found := interval_of(site.places)) is not None:
        setting, line = found
        if not setting.isdigit():
            return f"raise `{setting}` ({line})"
        remedy = remedy.replace("often", f"often than every {setting} steps")
    return f"{remedy} ({line})"


class Summary:
    """Reports a run: prints it on rank 0, and writes it to a folder.

    Args:
        run: What the hooks saw.
        out: Folder of the report; None to write nothing.
        fail_above: Share of stall from which `exit_code` returns 3.
    """

    def __init__(self, run: Run, out: Path | None, fail_above: float | None) -> None:
        self._run, self._out, self._fail_above = run, out, fail_above
        self._rank, self._size = 0, 1
        self._files: RankFiles | None = None
        self._is_launched = run.place is not None or "WORLD_SIZE" in os.environ
        self._has_torch = self._has_said = False
        self._page: Path | None = None
        """The page, once it is written."""
        self._stream = sys.stderr  # the script may replace it

    def begin(self, torch: Any) -> None:
        """Find out the rank of this process, at its first step."""
        self._rank, self._size = self._run.place or (0, 1)
        group = torch.distributed
        if group.is_available() and group.is_initialized():
            self._rank, self._size = group.get_rank(), group.get_world_size()
        elif self._run.place is None:
            self._rank = int(os.environ.get("RANK", 0))
            self._size = int(os.environ.get("WORLD_SIZE", 1))
        if self._size > 1:
            self._files = RankFiles(self._rank, self._size, os.environ)

    def write_snapshot(self, meter: Any) -> None:
        """Write report.json of a run that still goes on."""
        self._write(self._read(meter), StallReport.write_data)

    def close(self, meter: Any, has_torch: bool, can_wait: bool) -> None:
        """Write and print the report. Nothing here may raise.

        Args:
            meter: The meter; None if no step was seen.
            has_torch: Whether the script imported torch.
            can_wait: Whether `say` is called if a signal ends the process while this waits for
                other ranks. Otherwise this prints the report of this rank before it waits.
        """
        self._has_torch = has_torch
        try:
            self._close(meter, can_wait)
        except Exception as error:
            self._run.fault = self._run.fault or f"{type(error).__name__}: {error}"
            self.say()

    def exit_code(self, code: Any) -> Any:
        """Return the exit code of the process, for the one of the script."""
        report, limit = self._run.report, self._fail_above
        is_above = limit is not None and report is not None and (report.stall or 0.0) > limit
        return _ABOVE if is_above and code in (None, 0) and self._prints else code

    def say(self) -> None:
        """Print the report, once."""
        if self._has_said or not self._prints:
            return
        self._has_said = True
        with contextlib.suppress(Exception):  # stderr may be closed
            self._stream.write(self._text() + "\n")
            self._stream.flush()

    @property
    def _prints(self) -> bool:
        return self._files.is_leader if self._files else self._rank == 0

    def _close(self, meter: Any, can_wait: bool) -> None:
        if meter is None:
            return self.say()
        run = self._run
        run.report = run.report or self._read(meter)  # an ideal loader ends the measured steps
        self._write(run.report)
        if self._files is None:
            return self.say()
        if not can_wait:
            self.say()
        files, seconds = self._files, _WAIT_S if can_wait else _WAIT_AFTER_ERROR_S
        meter.gather(lambda numbers: self._exchange(files, numbers, seconds), files.ranks[0])
        if self._prints:
            run.report = self._read(meter)
            self._write(run.report)
        return self.say()

    def _exchange(
        self, files: RankFiles, numbers: list[float], seconds: float
    ) -> list[list[float]]:
        try:
            files.write(numbers)
        except OSError as error:
            self._run.lost = str(error)
            return [numbers]
        if not files.is_leader:
            return [numbers]
        found = files.read(seconds if self._is_launched else 0.0)
        missing = [rank for rank in files.ranks if rank not in found]
        self._run.missing = missing
        return [found.get(rank, [0.0] * len(numbers)) for rank in files.ranks]

    def _read(self, meter: Any) -> StallReport:
        report: StallReport = meter.report()
        report = dataclasses.replace(
            report,
            run=self._run.times(report.seconds),
            rank=self._rank,
            world_size=self._size,
        )
        run = self._run
        loader = run.loaders.get(run.trained_on)
        return conclude(report, run.remedies(), loader and meter.measured(loader))

    def _write(
        self,
        report: StallReport,
        write: Callable[[StallReport, Path], Path | None] = StallReport.write,
    ) -> None:
        if self._out is None:
            return
        folder = self._out if self._prints else self._out / f"rank{self._rank}"
        try:
            self._page = write(report, folder)
        except OSError as error:
            self._page = None
            self._run.lost = f"{folder}: cannot be written ({error.strerror})"

    def _text(self) -> str:
        run = self._run
        if run.report is None and run.children:
            skipped = "; --fail-above does not count them" * (self._fail_above is not None)
            return facts({"watch": f"{run.children} processes of mp.spawn were measured{skipped}"})
        if run.report is None:
            seen = {"verdict": "NOT MEASURED", "reason": run.unseen_words(self._has_torch)}
            return facts(seen | {"watch": run.fault and f"ended by {run.fault}"})
        text: str = run.report.text(
            after={
                "missing": run.missing_words(),
                "steps": run.step_words(),
                "lines": run.line_words(),
                "ideal": run.ideal_words(),
                "end": run.end,
                "watch": run.fault and f"ended at step {run.steps} by {run.fault}",
                "page": str(self._page or ""),
            }
        )
        return text


_ABOVE = 3
"""Exit code if the stall is above the limit."""
