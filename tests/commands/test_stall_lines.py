"""Lines of the loop: found by samples, and timed exactly on Python 3.12 and later."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tokenfeed.trainer.watch import lines
from tokenfeed.trainer.watch.lines import HostLines, LineTimer, share_of

PROGRAM = """
import importlib.util, json, sys, threading, time
spec = importlib.util.spec_from_file_location("lines", sys.argv[1])
lines = sys.modules["lines"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lines)
known, slept, marks, is_inside = 0.0, 0.0, [], False

def nap(seconds):
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began

def get_batch():
    global slept
    slept += nap(0.004)

def evaluate():
    global known, is_inside
    is_inside = True
    known += nap(0.002)
    is_inside = False

def loop(steps):
    for step in range(steps):
        get_batch()
        nap(0.008)
        evaluate()
        found.end_step()
        marks.append((time.perf_counter(), slept))

found = lines.HostLines(
    threading.get_ident(), lambda: is_inside, lambda: known, "/nowhere/"
)
loop(400)
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
    assert found["timed"] in (20, 40)
    share, error, calls = shares[2]
    assert calls == "get_batch"
    assert share == pytest.approx(found["truth"], abs=0.02)
    assert 0 < error < 0.1
    assert 4 not in shares, "an evaluation is known"
    assert found["tools"] == [None] * 6, "nothing stays on"


def test_sampler_finds_the_loop_and_its_line() -> None:
    steps = []

    def wait_for_batch() -> None:
        time.sleep(0.02)

    def loop() -> None:
        found = HostLines(threading.get_ident(), lambda: False, lambda: 0.0, "/nowhere/")
        for _ in range(40):
            wait_for_batch()
            time.sleep(0.02)
            found.end_step()
        time.sleep(0.3)  # after the last step
        found.close()
        steps.append(found.lines())

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    begin = loop.__code__.co_firstlineno
    found = {(each.line - begin, each.calls) for each in steps[0]}
    assert found == {(3, "wait_for_batch"), (4, "")}


def test_line_timer_is_off_before_python_3_12() -> None:
    def loop() -> None: ...

    timer = LineTimer(loop.__code__, lambda: 0.0)
    assert timer.start() is hasattr(sys, "monitoring")
    timer.close()


def test_share_of_a_line_has_an_error() -> None:
    steps = [(1.0, {3: 0.2}), (1.0, {3: 0.4}), (2.0, {3: 0.6})]
    share, error = share_of(3, steps)
    assert share == pytest.approx(0.3)
    assert error == pytest.approx(1.96 * (0.02 * 3 / 2) ** 0.5 / 4)
    assert share_of(5, steps) == (0.0, 0.0)
