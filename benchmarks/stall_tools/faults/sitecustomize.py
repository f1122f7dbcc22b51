"""Slows down and times functions of any script, which stays as it is.

Python imports this file when it starts, if its folder is in PYTHONPATH. any_script.py sets
STALL_FAULTS, a JSON list of [function, seconds, is timed], and STOPWATCH, the file that gets the
times of steps and of timed functions. A function of torch is patched at once; any other one after
the first step, when the script has imported or defined it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

timed: list[tuple[float, float]] = []
steps: list[float] = []
backwards: list[float] = []


class _Patches:
    def __init__(self, faults: list[tuple[str, float, bool]]) -> None:
        self.late = [fault for fault in faults if not fault[0].startswith("torch.")]
        self.is_inside = False
        for fault in faults:
            if fault not in self.late:
                self.patch(*fault)

    def patch(self, function: str, seconds: float, is_timed: bool) -> None:
        """Replace a function by one that sleeps first."""
        names = function.split(".")
        at = next(
            at
            for at in range(len(names) - 1, 0, -1)
            if ".".join(names[:at]) in sys.modules or is_module(".".join(names[:at]))
        )
        owner = sys.modules[".".join(names[:at])]
        for name in names[at:-1]:
            owner = getattr(owner, name)
        setattr(owner, names[-1], self.slow(getattr(owner, names[-1]), seconds, is_timed))

    def slow(self, call: Callable[..., Any], seconds: float, is_timed: bool) -> Callable[..., Any]:
        thread = threading.main_thread()

        @functools.wraps(call)
        def run(*arguments: Any, **named: Any) -> Any:
            outermost = is_timed and not self.is_inside and threading.current_thread() is thread
            self.is_inside = self.is_inside or outermost
            began = time.perf_counter()
            try:
                if seconds:  # a sleep of 0 seconds gives the core away
                    time.sleep(seconds)
                return call(*arguments, **named)
            finally:
                if outermost:
                    self.is_inside = False
                    timed.append((began, time.perf_counter()))

        # No line of the script is here.
        run.__code__ = run.__code__.replace(co_filename="<frozen stopwatch>")  # type: ignore[attr-defined]
        return run

    def step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Note the end of a step of the first optimizer."""
        global leader
        leader = leader or id(optimizer)
        if id(optimizer) == leader:
            self.after_step(steps)

    def after_step(self, ends: list[float]) -> None:
        late, self.late = self.late, []
        for fault in late:
            self.patch(*fault)
        ends.append(time.perf_counter())


leader = 0


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def begin() -> None:
    """Patch torch, and write the times when the process ends."""
    if "STALL_NAMED_CUDA" in os.environ:
        begin_named_cuda(Path(os.environ["STALL_NAMED_CUDA"]))
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    patches = _Patches([tuple(fault) for fault in json.loads(os.environ["STALL_FAULTS"])])
    register_optimizer_step_post_hook(patches.step)
    backward, process = torch.autograd.backward, os.getpid()

    def run_backward(*arguments: Any, **named: Any) -> None:
        backward(*arguments, **named)
        patches.after_step(backwards)

    def write() -> None:
        if os.getpid() == process and (steps or backwards):
            path = f"{os.environ['STOPWATCH']}.{os.environ.get('RANK', '0')}.json"
            found = {"timed": timed, "steps": steps or backwards}
            Path(path).write_text(json.dumps(found))

    torch.autograd.backward = run_backward
    atexit.register(write)


def without_values(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `torch.save` that saves tensors without values as zeros."""

    def run(*arguments: Any, **named: Any) -> None:
        import torch

        with torch.serialization.skip_data(materialize_fake_tensors=True):
            save(*arguments, **named)

    return run


def begin_named_cuda(library: Path) -> None:
    """Give the process a CUDA device in name only, whose work is done as soon as it is queued."""
    sys.path.append(str(Path(__file__).parents[3] / "tests/support"))
    import named_cuda
    import numpy as np

    class Event(named_cuda._Event):
        """Knows when it was recorded."""

        def record(self, stream: Any = None) -> None:
            self.moment = time.perf_counter()

        def elapsed_time(self, later: "Event") -> float:
            return (later.moment - self.moment) * 1e3

    named_cuda._Event, named_cuda.keeps_parameters = Event, True
    torch = named_cuda.begin(library)
    torch.utils.data._utils.pin_memory.pin_memory = lambda data, device=None: data
    torch.save = without_values(torch.save)
    with contextlib.suppress(ImportError):
        import safetensors.torch

        safetensors.torch._to_ndarray = lambda value: (np.zeros(value.nbytes, np.uint8), value)
    global device
    device = named_cuda.device()
    device.__enter__()
    gc.disable()  # tensors without values are many objects, which would take time of each cause


device: Any = None
if "STALL_FAULTS" in os.environ:
    begin()
