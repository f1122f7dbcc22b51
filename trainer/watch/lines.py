"""Host code that no hook sees: which lines of the loop it is, and what share they take.

A thread reads the stack of the training thread now and then. This finds the function of the loop in
any framework, and its lines outside of training work. The number of samples of a line is no measure
of its time: a thread that needs the interpreter wakes best while the loop sleeps. So a line timer
measures the time of each line of that one function in a few steps (Python 3.12 and later).
"""

import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

_SECONDS = 0.03
"""Between samples, in the first minute."""
_LATER_SECONDS = 0.3
_FIRST_SAMPLES = 2_000
_MOST_STACKS = 10_000
_LOOP_SHARE = 0.9
"""Share of the samples that have the function of the loop in their stack."""
_LEAST_SHARE = 0.01
_WORK = {"_wrapped_call_impl", "_call_impl", "backward", "compile_wrapper"}
"""Functions of torch that train."""
_TIMED_STEPS, _EVERY_STEPS = 20, 200
_FIRST_TIMED = 30
"""Samples before the first steps with a line timer."""

_BELOW = ("tokenfeed.trainer.watch.launch", "tokenfeed.trainer.watch.children")
"""The modules whose frames are below those of the script."""

_Stack = tuple[tuple[CodeType, int], ...]


class Line(NamedTuple):
    """A line of the loop that takes time outside of work and causes."""

    file: str
    line: int
    calls: str
    """The function that the line waits in; empty for the line itself."""
    share: float | None
    """Share of the time of a step; None without a line timer."""
    error: float | None


class Sampler:
    """Reads the stack of a thread.

    Args:
        thread: The thread to read.
        is_inside: Returns whether a hook knows what the thread does now.
        own: The folder of the hooks. What they call is not the script's.
    """

    def __init__(self, thread: int, is_inside: Callable[[], bool], own: str) -> None:
        self._thread, self._is_inside, self._own = thread, is_inside, own
        self._pending: Counter[tuple[_Stack, bool]] = Counter()
        self.samples: Counter[tuple[_Stack, bool]] = Counter()
        self._end = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="tokenfeed-stall").start()

    def keep(self) -> None:
        """End a step: samples after the last step do not count."""
        pending, self._pending = self._pending, Counter()
        if len(self.samples) < _MOST_STACKS:
            self.samples.update(pending)

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()

    def loop(self) -> tuple[int, CodeType] | None:
        """Return the deepest function that is in nearly all samples, and its depth."""
        depths: Counter[tuple[int, CodeType]] = Counter()
        for (stack, _), count in self.samples.items():
            depths.update({(depth, code): count for depth, (code, _) in enumerate(stack)})
        least = _LOOP_SHARE * self.samples.total()
        return max((key for key, n in depths.items() if n >= least), key=_depth, default=None)

    def lines(self) -> dict[tuple[int, str], float]:
        """Return the loop's lines outside of work and causes with what they call, by their share
        of the samples."""
        loop, found = self.loop(), Counter[tuple[int, str]]()
        if loop is None:
            return {}
        depth, code = loop
        for (stack, is_known), count in self.samples.items():
            if not is_known and len(stack) > depth and stack[depth][0] is code:
                below = stack[depth + 1][0].co_name if len(stack) > depth + 1 else ""
                found[stack[depth][1], below] += count
        total = self.samples.total()
        return {key: count / total for key, count in found.most_common()}

    def _run(self) -> None:
        seconds, taken = _SECONDS, 0
        while not self._end.wait(seconds):
            is_inside, frame = self._is_inside(), sys._current_frames().get(self._thread)
            stack, is_work = self._read(frame)
            del frame  # or the locals of the script would live longer
            if stack:
                self._pending[stack, is_work or is_inside] += 1
                taken += 1
                seconds = _SECONDS if taken < _FIRST_SAMPLES else _LATER_SECONDS

    def _read(self, frame: FrameType | None) -> tuple[_Stack, bool]:
        """Return the stack down to the training work or to a hook, outermost function first."""
        stack: list[tuple[CodeType, int]] = []
        is_work = False
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self._own):
                if frame.f_globals.get("__name__") in _BELOW:
                    break
                stack.clear()
            elif _is_work(code):
                stack.clear()
                is_work = True
            else:
                stack.append((code, frame.f_lineno))
            frame = frame.f_back
        return tuple(reversed(stack)), is_work


def _depth(key: tuple[int, CodeType]) -> int:
    return key[0]


def _is_work(code: CodeType) -> bool:
    file = code.co_filename
    return "torch" in file and (code.co_name in _WORK or "optim" in file)


class LineTimer:
    """Measures the time of each line of one function, by `sys.monitoring`.

    Args:
        code: The function. It may be running.
        known: Returns the seconds that belong to causes so far. Lines do not count these.
    """

    def __init__(self, code: CodeType, known: Callable[[], float]) -> None:
        self.code, self._known, self._thread = code, known, threading.get_ident()
        self._line, self._since, self._began = 0, self._now(), time.perf_counter()
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self.steps: list[tuple[float, Mapping[int, float]]] = []
        """Seconds of each step, and of its lines."""
        self._tool: int | None = None

    def start(self) -> bool:
        """Begin to measure. Return whether this is possible."""
        monitoring: Any = getattr(sys, "monitoring", None)  # Python 3.12 and later
        free = [tool for tool in (4, 3, 5) if monitoring and monitoring.get_tool(tool) is None]
        if not free:
            return False
        self._tool, event = free[0], monitoring.events.LINE
        monitoring.use_tool_id(self._tool, "tokenfeed stall")
        monitoring.register_callback(self._tool, event, self._on_line)
        monitoring.set_local_events(self._tool, self.code, event)
        return True

    def end_step(self) -> None:
        """End a step, in the middle of a line."""
        self._on_line(self.code, self._line)
        now = time.perf_counter()
        self.steps.append((now - self._began, self._seconds))
        self._seconds, self._began = defaultdict(float), now

    def close(self) -> None:
        """Stop to measure."""
        if self._tool is not None:
            monitoring: Any = getattr(sys, "monitoring", None)
            monitoring.set_local_events(self._tool, self.code, 0)
            monitoring.register_callback(self._tool, monitoring.events.LINE, None)
            monitoring.free_tool_id(self._tool)
            self._tool = None

    def _on_line(self, code: CodeType, line: int) -> None:
        if threading.get_ident() == self._thread:
            now = self._now()
            self._seconds[self._line] += now - self._since
            self._line, self._since = line, now

    def _now(self) -> float:
        return time.perf_counter() - self._known()


def share_of(line: int, steps: Sequence[tuple[float, Mapping[int, float]]]) -> tuple[float, float]:
    """Return the share of a line in the time of steps, and the half width of its 95 % interval."""
    total, count = sum(seconds for seconds, _ in steps), len(steps)
    share = sum(lines.get(line, 0.0) for _, lines in steps) / total
    squares = sum((lines.get(line, 0.0) - share * seconds) ** 2 for seconds, lines in steps)
    return share, 1.96 * math.sqrt(squares * count / max(1, count - 1)) / total


class HostLines:
    """The sampler of a training thread, and the line timer in some of its steps."""

    def __init__(
        self,
        thread: int,
        is_inside: Callable[[], bool],
        known: Callable[[], float],
        own: str,
    ) -> None:
        self._sampler, self._known = Sampler(thread, is_inside, own), known
        self._timer: LineTimer | None = None
        self._steps, self._next = 0, 0
        self._timed: dict[CodeType, list[tuple[float, Mapping[int, float]]]] = {}

    def end_step(self) -> None:
        """End a step of the training thread."""
        self._steps += 1
        self._sampler.keep()
        if self._timer is not None:
            self._timer.end_step()
            if len(self._timer.steps) >= _TIMED_STEPS:
                self._end_timer(self._timer)
        elif self._steps >= self._next and self._sampler.samples.total() >= _FIRST_TIMED:
            self._next, loop = self._steps + _EVERY_STEPS, self._sampler.loop()
            timer = LineTimer(loop[1], self._known) if loop else None
            self._timer = timer if timer and timer.start() else None

    def close(self) -> None:
        """Stop the thread and the timer."""
        self._sampler.close()
        if self._timer is not None:
            self._end_timer(self._timer)

    def lines(self, most: int = 3) -> list[Line]:
        """Return the lines that take most time outside of work and causes."""
        loop, found = self._sampler.loop(), self._sampler.lines()
        if loop is None:
            return []
        code, steps = loop[1], self._timed.get(loop[1])
        by_line: dict[int, Line] = {}
        for (line, calls), share in found.items():  # the largest first
            exact, error = share_of(line, steps) if steps else (None, None)
            if (share if exact is None else exact) >= _LEAST_SHARE and line not in by_line:
                by_line[line] = Line(code.co_filename, line, calls, exact, error)
        return sorted(by_line.values(), key=lambda each: -(each.share or 0.0))[:most]

    def _end_timer(self, timer: LineTimer) -> None:
        timer.close()
        self._timed.setdefault(timer.code, []).extend(timer.steps)
        self._timer = None
