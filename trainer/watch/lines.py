"""Host code that no hook sees: which lines of the loop it is, and what share they take.

A thread reads the stack of the training thread now and then. This finds the function of the loop in
any framework, and its lines outside of training work. The number of samples of a line is no measure
of its time: a thread that needs the interpreter wakes best while the loop sleeps. So a line timer
measures the time of each line of that one function in a few steps (Python 3.12 and later).
"""

import inspect
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

_SECONDS = 0.03
"""Seconds between two samples, in the first minute."""
_LATER_SECONDS = 0.3
"""Seconds between two samples later."""
_FIRST_SAMPLES = 2_000
"""Samples of the first minute."""
_MOST_STACKS = 1_000
"""Most different stacks to keep. Samples of further ones are not counted."""
_LOOP_SHARE = 0.9
"""The function of the loop is in the stack of this share of the samples."""
_LEAST_SHARE = 0.01
"""Smallest share of the time of a line that is shown."""
_LEAST_SAMPLES = 3
"""Fewest samples of a line that is shown."""
_TIMED_STEPS, _EVERY_STEPS = 20, 200
"""Steps with a line timer, and steps from its start to its next start."""
_FIRST_TIMED = 30
"""Samples before the first steps with a line timer."""

_WORK = {
    ("torch.nn.modules.module", "_wrapped_call_impl"),
    ("torch.nn.modules.module", "_call_impl"),
    ("torch._tensor", "backward"),
    ("torch.autograd", "backward"),
    ("torch._dynamo.eval_frame", "compile_wrapper"),
}
"""Functions that train, by module and name."""
_OPTIMIZERS = "torch.optim."
"""Modules of which all functions train. One of them calls the `step` of every optimizer."""
_COMPUTE = ("torch.nn.functional", "torch.nn.utils.", "torch.functional", "torch._tensor")
"""Modules whose functions train from the forward pass to the step: losses, clipping, norms. Between
two steps, they may prepare a batch."""
_OWN = "tokenfeed.trainer.watch."
"""The modules of hooks. What they call is not the script's."""
_BELOW = (f"{_OWN}launch", f"{_OWN}children")
"""The modules whose frames are below those of the script."""

_Line = tuple[CodeType, int]
_Stack = tuple[_Line, ...]
Activity = Literal["training", "known", "in the work", "between"]
"""What a thread does in a sample: a function of torch trains; a hook knows its cause; or it runs
code of the script, between the first forward pass and the end of a step, or outside of that."""


class Line(NamedTuple):
    """A line of the loop, or of a function that it calls, that takes time and does not train."""

    file: str
    line: int
    calls: str
    """The function that the line waits in; empty for the line itself, or if its name is unknown."""
    is_between: bool
    """Whether it runs between two steps. The time of other lines counts as work."""
    share: float | None
    """Share of the time of a step; None without a line timer."""
    error: float | None


class Sampler:
    """Reads the stack of a thread.

    Args:
        thread: The thread to read.
        activity: Returns what the thread does now, as far as hooks know.
        steps: Returns the number of steps so far.
    """

    def __init__(
        self, thread: int, activity: Callable[[], Activity], steps: Callable[[], int]
    ) -> None:
        self._thread, self._activity, self._steps = thread, activity, steps
        self.pending: Counter[tuple[_Stack, Activity]] = Counter()
        """Samples since the step below."""
        self._step = 0
        self.samples: Counter[tuple[_Stack, Activity]] = Counter()
        self._lock = threading.Lock()
        self._end = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="tokenfeed-stall").start()

    def count(self, stack: _Stack, activity: Activity) -> None:
        """Count a sample of the present step."""
        with self._lock:
            self._keep()
            _add(self.pending, (stack, activity), 1)

    def kept(self) -> Counter[tuple[_Stack, Activity]]:
        """Return the samples up to the latest step: those after the last step do not count."""
        with self._lock:
            self._keep()
            return Counter(self.samples)

    def _keep(self) -> None:
        if (step := self._steps()) != self._step:
            self._step = step
            for key, count in self.pending.items():
                _add(self.samples, key, count)
            self.pending.clear()

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()

    def loop(self) -> tuple[int, CodeType] | None:
        """Return the deepest function that is in nearly all samples, and its depth."""
        depths: Counter[tuple[int, CodeType]] = Counter()
        samples = self.kept()
        for (stack, _), count in samples.items():
            depths.update({(depth, code): count for depth, (code, _) in enumerate(stack)})
        least = _LOOP_SHARE * samples.total()
        return max((key for key, n in depths.items() if n >= least), key=_depth, default=None)

    def lines(self) -> dict[tuple[CodeType, int, str, bool], float]:
        """Return lines that do not train with what they call, and whether they run between steps,
        by their share of the samples. If a line of the loop trains, lines of the functions that it
        calls stand for it. Lines around the loop run between steps of a loop that runs twice."""
        loop, samples, found = self.loop(), self.kept(), Counter[tuple[CodeType, int, str, bool]]()
        if loop is None:
            return {}
        depth, code = loop
        train = {line for (stack, kind) in samples if kind == "training" for line in stack}
        for (stack, kind), count in samples.items():
            is_in_loop = len(stack) > depth and stack[depth][0] is code
            if kind in ("training", "known") or not (is_in_loop or kind == "between"):
                continue
            rest = stack[depth:] if is_in_loop else stack
            at = next((at for at, line in enumerate(rest) if line not in train), None)
            if at is not None:
                found[(*rest[at], _called(rest[at + 1 :]), kind == "between")] += count
        total = samples.total()
        return {key: count / total for key, count in found.most_common() if count >= _LEAST_SAMPLES}

    def _run(self) -> None:
        seconds, taken = _SECONDS, 0
        while not self._end.wait(seconds):
            activity, frame = self._activity(), sys._current_frames().get(self._thread)
            stack, is_training = self._read(frame, activity)
            del frame  # or the locals of the script would live longer
            if stack:
                self.count(stack, "training" if is_training and activity != "known" else activity)
                taken += 1
                seconds = _SECONDS if taken < _FIRST_SAMPLES else _LATER_SECONDS

    def _read(self, frame: FrameType | None, activity: Activity) -> tuple[_Stack, bool]:
        """Return the stack down to the training work or to a hook, outermost function first."""
        stack: list[_Line] = []
        is_training = False
        while frame is not None:
            module = str(frame.f_globals.get("__name__"))
            if module in _BELOW:
                break
            if module.startswith(_OWN):
                stack.clear()
            elif is_work(frame) or (
                activity == "in the work" and f"{module}.".startswith(_COMPUTE)
            ):
                stack.clear()
                is_training = True
            else:
                stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return tuple(reversed(stack)), is_training


def _called(stack: _Stack) -> str:
    """Return the name of the outermost function. Wrappers of decorators, and the functions that
    Python makes for comprehensions, have names of no use."""
    for code, _ in stack:
        takes_all = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
        is_wrapper = "<locals>" in code.co_qualname and code.co_flags & takes_all == takes_all
        if not is_wrapper and not code.co_name.startswith("<"):
            return code.co_name
    return ""


def is_work(frame: FrameType) -> bool:
    """Return whether a function of torch that trains runs in a frame."""
    module = str(frame.f_globals.get("__name__"))
    return module.startswith(_OPTIMIZERS) or (module, frame.f_code.co_name) in _WORK


def _add(
    samples: Counter[tuple[_Stack, Activity]], key: tuple[_Stack, Activity], count: int
) -> None:
    if key in samples or len(samples) < _MOST_STACKS:
        samples[key] += count


def _depth(key: tuple[int, CodeType]) -> int:
    return key[0]


class LineTimer:
    """Measures the time of each line of one function, by `sys.monitoring` of Python 3.12 and later.

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
        """Begin to measure. Return whether no other tool is in the way."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        free = [tool for tool in (4, 3, 5) if monitoring.get_tool(tool) is None]
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
            monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
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
    """The sampler of a training thread, and the line timer in some of its steps.

    Args:
        thread: The thread to read.
        activity: Returns what the thread does now, as far as hooks know.
        known: Returns the seconds that belong to causes so far.
        steps: Returns the number of steps so far.
    """

    def __init__(
        self,
        thread: int,
        activity: Callable[[], Activity],
        known: Callable[[], float],
        steps: Callable[[], int],
    ) -> None:
        self._sampler, self._known = Sampler(thread, activity, steps), known
        self._timer: LineTimer | None = None
        self._steps = steps
        self._next: float = 0 if hasattr(sys, "monitoring") else math.inf
        """The step after which a line timer starts."""
        self._timed: dict[CodeType, list[tuple[float, Mapping[int, float]]]] = {}

    def look(self) -> bool:
        """After a step of the training thread, time its lines or end that. Return whether this must
        be called after the next step, too."""
        if self._timer is not None:
            self._timer.end_step()
            if len(self._timer.steps) >= _TIMED_STEPS:
                self._end_timer(self._timer)
        elif self._steps() >= self._next and self._sampler.kept().total() >= _FIRST_TIMED:
            self._next, loop = self._steps() + _EVERY_STEPS, self._sampler.loop()
            timer = LineTimer(loop[1], self._known) if loop else None
            self._timer = timer if timer and timer.start() else None
        return self._timer is not None

    def close(self) -> None:
        """Stop the thread and the timer."""
        self._sampler.close()
        if self._timer is not None:
            self._end_timer(self._timer)

    def lines(self, most: int = 3) -> list[Line]:
        """Return the lines that take most time and do not train, those between steps first."""
        by_line: dict[tuple[CodeType, int, bool], Line] = {}
        for (code, line, calls, is_between), share in self._sampler.lines().items():
            steps = self._timed.get(code)
            exact, error = share_of(line, steps) if steps else (None, None)
            key = code, line, is_between
            if (share if exact is None else exact) >= _LEAST_SHARE and key not in by_line:
                by_line[key] = Line(code.co_filename, line, calls, is_between, exact, error)
        found = sorted(by_line.values(), key=lambda each: (not each.is_between, -(each.share or 0)))
        return found[:most]

    def _end_timer(self, timer: LineTimer) -> None:
        timer.close()
        self._timed.setdefault(timer.code, []).extend(timer.steps)
        self._timer = None
