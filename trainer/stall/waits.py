"""Finds the source lines that wait for a GPU, from a trace with stacks."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenfeed.trainer.stall.kineto import is_wait, quiet

CALLS = "cuda_runtime"
"""Kineto's name for calls of the CUDA runtime."""
_LIBRARY = "torch/"
"""Files of torch, as its profiler names them. The line that calls torch is the one to change."""


class WaitFinder:
    """Counts the waits of some steps by source line."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._lines = Counter[str]()
        self._left = self._steps = 0

    @property
    def is_on(self) -> bool:
        """Whether the present step is examined."""
        return self._left > 0

    def begin(self, steps: int) -> None:
        """Examine this many steps from now on. Does nothing if torch cannot."""
        from torch.profiler import profile, supported_activities

        self.close()
        try:
            with quiet():
                activities = supported_activities()  # type: ignore[no-untyped-call]
                self._profiler = profile(activities=activities, with_stack=True)
                self._profiler.start()
        except Exception:  # no training fails by its meter
            self._profiler = None
        self._left = steps if self._profiler else 0

    def end_step(self) -> None:
        """Count an examined step. After the last one, stop."""
        self._left -= 1
        self._steps += 1
        if not self._left:
            self.close()

    def found(self) -> dict[str, float]:
        """Return the waits per step by `file:line`, most frequent first."""
        return {line: count / self._steps for line, count in self._lines.most_common()}

    def close(self) -> None:
        """Stop, and read what was found."""
        profiler, self._profiler, self._left = self._profiler, None, 0
        if profiler is None:
            return
        try:
            profiler.stop()
            results = profiler.profiler.kineto_results
            moments = [
                event.start_ns()
                for event in results.events()
                if event.activity_type() == CALLS and is_wait(event.name())
            ]
            self._lines.update(lines_at(results.experimental_event_tree(), moments))
        except Exception:  # another profiler may have ended this one
            return


def lines_at(tree: Iterable[Any], moments: Iterable[int]) -> list[str]:
    """Return the line outside of torch that ran at each moment, as `file:line`.

    Args:
        tree: The roots of the event tree of Kineto, recorded with stacks.
        moments: Nanoseconds, by the clock of the tree.
    """
    roots = list(tree)
    return [line for moment in moments if (line := _line_at(roots, moment)) is not None]


def _line_at(roots: list[Any], moment: int) -> str | None:
    """Return the line of the latest call that was running. Other threads may run older calls."""
    latest, line, nodes = 0, None, [*roots]
    while nodes:
        node = nodes.pop()
        if not node.start_time_ns <= moment <= node.end_time_ns:
            continue
        nodes += node.children
        caller = _caller(node)
        if caller is None or caller.file_name.startswith(_LIBRARY):
            continue
        if node.start_time_ns >= latest:
            latest, line = node.start_time_ns, f"{caller.file_name}:{caller.line_number}"
    return line


def _caller(node: Any) -> Any:
    """Return the frame that made a call of Python; None for an operation of torch."""
    return getattr(node.typed[1], "caller", None)
