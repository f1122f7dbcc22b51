"""Finds the lines that wait for a GPU, by torch's own warnings about them, for some steps.

Torch tells of each operator that waits when it is asked to, and says the line of Python that called
it. It costs some microseconds a wait and nothing else, but warnings belong to the whole process: so
it is for some steps, which are not measured.
"""

import sys
import warnings
from collections import Counter
from typing import Any

__all__ = ["WaitFinder"]

_MESSAGE = "called a synchronizing CUDA operation"


class WaitFinder:
    """Counts waits by their lines."""

    def __init__(self) -> None:
        self._lines: Counter[str] = Counter()
        self._left = self._steps = 0
        self._caught: Any = None
        self._mode_before: Any = None

    @property
    def is_looking(self) -> bool:
        """Whether this step is looked at."""
        return self._left > 0

    @property
    def has_looked(self) -> bool:
        """Whether any step was looked at."""
        return self._steps + self._left > 0

    def begin(self, steps: int) -> None:
        """Look at so many steps from here on."""
        self._left = steps
        if self._caught is not None:
            return
        self._set_mode("warn")
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.filterwarnings("always", message=_MESSAGE)  # also where warnings are errors
        self._show = warnings.showwarning
        warnings.showwarning = self._shown  # type: ignore[assignment]  # a method

    def end_step(self) -> None:
        """A step is over."""
        if not self._left:
            return
        self._left -= 1
        self._steps += 1
        if not self._left:
            self.close()

    def found(self) -> dict[str, float]:
        """Waits a step by `file:line`, the most frequent first."""
        return {line: count / self._steps for line, count in self._lines.most_common()}

    def close(self) -> None:
        """Leave torch and its warnings as they were."""
        if self._caught is None:
            return
        self._caught.__exit__(None, None, None)
        self._caught, self._left = None, 0
        self._set_mode(self._mode_before)

    def _shown(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if _MESSAGE in str(message):
            self._lines[f"{filename}:{lineno}"] += 1
        else:
            self._show(message, category, filename, lineno, *rest)

    def _set_mode(self, mode: Any) -> None:
        cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
        if cuda is None or not cuda.is_initialized():
            return
        try:
            self._mode_before = cuda.get_sync_debug_mode()
            cuda.set_sync_debug_mode(mode)
        except (AttributeError, RuntimeError):  # a build of torch without it
            self._mode_before = None
