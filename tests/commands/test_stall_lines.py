"""Lines of the loop: found by samples, and timed exactly on Python 3.12 and later."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfeed.trainer.watch import lines
from tokenfeed.trainer.watch.lines import Activity, HostLines, Sampler, share_of
from tokenfeed.trainer.watch.summary import Run

pytestmark = pytest.mark.clock

PROGRAM = """
import importlib.util, json, sys, threading, time
spec = importlib.util.spec_from_file_location("lines", sys.argv[1])
lines = sys.modules["lines"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lines)
known, slept, marks, ends, is_inside = 0.0, 0.0, [], [], False
now = 0.0  # only naps move the clock, so that no load of the machine counts
time.perf_counter = lambda: now

def nap(seconds):
    global now
    time.sleep(seconds)
    now += seconds
    return seconds

def get_batch():
    global slept
    slept += nap(0.03 if len(ends) % 2 else 0.02)

def evaluate():
    global known, is_inside
    is_inside = True
    known += nap(0.01)
    is_inside = False

def loop(count):
    for _ in range(count):
        get_batch()
        nap(0.04)
        evaluate()
        ends.append(0)
        found.look()
        marks.append((time.perf_counter(), slept))

found = lines.HostLines(
    threading.get_ident(), lambda: "known" if is_inside else "between", lambda: known,
    lambda: len(ends),
)
loop(60)
found.close()
code = loop.__code__
(timed,) = found._timed.values()
print(json.dumps({
    "lines": [[each.line - code.co_firstlineno, each.share, each.error, each.calls]
              for each in found.lines()],
    "timed": len(timed),
    "truth": [(b[1] - a[1]) / (b[0] - a[0]) for a, b in [(marks[0], marks[-1])]][0],
    "tools": [sys.monitoring.get_tool(tool) for tool in range(6)],
}))
"""


def newer_python() -> str | None:
    """Return a Python that has `sys.monitoring`."""
    if sys.version_info >= (3, 12):
        return sys.executable
    names = [shutil.which(f"python3.{minor}") for minor in (12, 13, 14)]
    pyenv = sorted(Path.home().glob(".pyenv/versions/3.1[2-9].*/bin/python"))
    for name in [*map(str, pyenv), *filter(None, names)]:
        if subprocess.run([name, "-c", ""], check=False, capture_output=True).returncode == 0:
            return name
    return None


@pytest.mark.slow
def test_line_timer_agrees_with_stopwatch() -> None:
    """Without torch, which has no wheel for that Python here."""
    if (python := newer_python()) is None:
        pytest.skip("needs Python 3.12 or later")
    ended = subprocess.run(
        [python, "-c", PROGRAM, lines.__file__], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    shares = {line: (share, error, calls) for line, share, error, calls in found["lines"]}
    assert found["timed"] == 20
    share, error, calls = shares[2]
    assert calls == "get_batch"
    assert share == pytest.approx(found["truth"], abs=0.005)
    assert 0 < error < 0.1
    assert 4 not in shares, "an evaluation is known"
    assert found["tools"] == [None] * 6, "nothing stays on"


def in_a_thread(loop: Callable[[], None]) -> None:
    """Run a loop in a thread to its end."""
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


def test_sampler_finds_the_loop_and_its_line() -> None:
    ends, result = list[int](), []

    def wait_for_batch() -> None:
        time.sleep(0.02)

    def loop() -> None:
        found = HostLines(threading.get_ident(), lambda: "between", lambda: 0.0, lambda: len(ends))
        for step in range(40):
            wait_for_batch()
            time.sleep(0.02)
            ends.append(step)
        time.sleep(0.3)  # after the last step
        found.close()
        result.extend(found.lines())

    in_a_thread(loop)
    begin = loop.__code__.co_firstlineno
    found = {(each.line - begin, each.calls) for each in result}
    assert found == {(3, "wait_for_batch"), (4, "")}


def test_lines_that_train_are_left_out_and_wrappers_are_looked_through() -> None:
    names: dict[str, Any] = {"__name__": "torch.nn.functional", "time": time}
    exec("def cross_entropy(): time.sleep(0.02)", names)
    ends, result = list[int](), list[Any]()
    now: list[Activity] = ["between"]

    def as_torch_does(call: Any) -> Any:
        def _no_grad_wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        return _no_grad_wrapper

    @as_torch_does
    def save_norms() -> None:
        time.sleep(0.02)

    def loss() -> None:
        time.sleep(0.02)
        names["cross_entropy"]()

    def loop() -> None:
        found = HostLines(threading.get_ident(), lambda: now[0], lambda: 0.0, lambda: len(ends))
        for step in range(60):
            now[0] = "in the work"
            loss()
            now[0] = "between"
            save_norms()
            ends.append(step)
        found.close()
        result.extend(found.lines())

    in_a_thread(loop)
    begin = loop.__code__.co_firstlineno
    found = [(each.line - begin, each.calls, each.is_between) for each in result]
    assert found == [(6, "save_norms", True), (loss.__code__.co_firstlineno + 1 - begin, "", False)]
    run = Run(lines=result)
    assert f"test_stall_lines.py:{begin + 6}, calls save_norms()" in run.line_words()
    assert run.line_words().count(", counts as work") == 1
    assert run.remedies()["other"].startswith(f"look at test_stall_lines.py:{begin + 6}")
    assert "look at" not in Run(lines=result[1:]).remedies()["other"], "it may train"


def test_stacks_are_bounded() -> None:
    def loop() -> None: ...

    step = 0
    sampler = Sampler(threading.get_ident(), lambda: "between", lambda: step)
    sampler.close()
    for line in range(3_000):
        sampler.count(((loop.__code__, line),), "between")
        step += line % 2
    assert len(sampler.kept()) == 1_000
    sampler.count(((loop.__code__, 0),), "between")
    step += 1
    assert sampler.kept()[((loop.__code__, 0),), "between"] == 2, "known stacks still count"
    for line in range(3_000):
        sampler.count(((loop.__code__, line),), "known")
    assert len(sampler.pending) <= 1_000, "also within a step"


FRAME = """
import sys
def {name}():
    return sys._getframe()
"""


@pytest.mark.parametrize(
    ("module", "name", "file", "is_work"),
    [
        ("torch.nn.modules.module", "_wrapped_call_impl", "/x/module.py", True),
        ("torch._tensor", "backward", "/x/_tensor.py", True),
        ("torch.optim.optimizer", "wrapper", "/x/optimizer.py", True),
        ("torch._dynamo.eval_frame", "compile_wrapper", "/x/eval_frame.py", True),
        ("__main__", "backward", "/home/me/torch-optim/train.py", False),
        ("train", "step", "/home/me/torch/optim/train.py", False),
        ("torch.utils.data.dataloader", "__next__", "/x/torch/optim/dataloader.py", False),
        ("torchoptim", "_call_impl", "/x/torch/torchoptim.py", False),
    ],
)
def test_work_is_told_by_the_module(module: str, name: str, file: str, is_work: bool) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(compile(FRAME.format(name=name), file, "exec"), names)
    assert lines.is_work(names[name]()) is is_work


def test_share_of_a_line_has_an_error() -> None:
    steps = [(1.0, {3: 0.2}), (1.0, {3: 0.4}), (2.0, {3: 0.6})]
    share, error = share_of(3, steps)
    assert share == pytest.approx(0.3)
    assert error == pytest.approx(1.96 * (0.02 * 3 / 2) ** 0.5 / 4)
    assert share_of(5, steps) == (0.0, 0.0)
