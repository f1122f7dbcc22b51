"""What benchmarks/scenarios/ sees of a loop, of theirs and of `train` alike."""

import os
import time
from dataclasses import dataclass, field

from tokenfeed.trainer.stall import StallMeter, warmup_steps

__all__ = ["Marks", "Watch"]

SKIPPED = 10
"""Steps before the first that is timed, or a quarter; the last is left out too, for `train` saves
after it."""


@dataclass(slots=True)
class Marks:
    """The end of every step: seconds of the clock and of the processor, tokens and slots so far."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def end_step(self) -> None:
        """A step has ended."""
        self.wall.append(time.perf_counter())
        self.cpu.append(sum(os.times()[:4]))  # processes that have ended too

    def count(self, tokens: int, slots: int) -> None:
        """So many were trained in all, with the last step."""
        self.tokens.append(tokens)
        self.slots.append(slots)

    @property
    def padding(self) -> float:
        """The share of all slots that are padding."""
        return 1 - self.tokens[-1] / self.slots[-1]

    def speed(self) -> dict[str, float]:
        """Steps and real tokens a second, and the share of slots that are padding."""
        first, last = min(SKIPPED, len(self.wall) // 4), -2
        tokens = self.tokens[last] - self.tokens[first]
        seconds = self.wall[last] - self.wall[first]
        return {
            "steps_s": (len(self.wall) - 2 - first) / seconds,
            "tokens_s": tokens / seconds,
            "tokens_cpu_s": tokens / (self.cpu[last] - self.cpu[first]),
            "padding": self.padding,
        }


class Watch:
    """The stall meter of a loop that has none of its own, and the marks of its steps."""

    def __init__(self, steps: int) -> None:
        self.marks = Marks()
        self.meter = StallMeter("cpu", skipped_steps=warmup_steps(steps))
        self._tokens = self._slots = 0

    def step(self, tokens: int, slots: int) -> None:
        """A step has ended."""
        self.meter.step(tokens, slots)
        self._tokens += tokens
        self._slots += slots
        self.marks.end_step()
        self.marks.count(self._tokens, self._slots)
