"""Axes: from values to places, and the round numbers between."""

import math
from dataclasses import dataclass

__all__ = ["Scale", "short"]

_LEAST_SPAN = 1e-12
"""Relative to the values. Over a smaller span, rounding would place them anywhere."""
_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to [start, end]; an axis that grows upwards ends above where it starts."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(
        cls, values: list[float], start: float, end: float, *, from_zero: bool = False
    ) -> "Scale":
        """The scale of some values, with room around them if they are equal or empty."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        low = min(0.0, low) if from_zero else low
        if high - low <= _LEAST_SPAN * max(abs(low), abs(high), _LEAST_SPAN):
            low, high = (2 * low, 0.0) if low < -_LEAST_SPAN else (0.0, max(high, 0.0) or 1.0)
        return cls(low, high, start, end)

    def __call__(self, value: float) -> float:
        """Where a value is."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About so many round numbers from `low` to `high`.

        Scale(0, 0.93, 0, 100).ticks() is [0, 0.2, 0.4, 0.6, 0.8]
        """
        rough = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(times * unit for times in _STEPS if times * unit >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few letters: 1.2M, 350k, 0.05."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
