"""What tests of commands share: running them, and the folders they leave.

`run` runs a command within this process: its arguments, what it prints, its exit code. `start`
starts it as a process, which costs half a second; for what only a process can show.
"""

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support import process_state, warm
from tokenfeed.pipeline import processes
from tokenfeed.tools import pretokenize
from tokenfeed.tools.shell import console

COMMAND = [sys.executable, "-m", "tokenfeed.tools.pretokenize"]
SMALL = """
from support.processes import FORKING
from tokenfeed.pipeline import processes
from tokenfeed.tools.encoding import training
from tokenfeed.trainer.models.gpt import SIZES, ModelSize
from tokenfeed.trainer.data import recommended
processes.subprocess = FORKING
training._MIN_FREQUENCY = 20
recommended._LEAST_STEPS = 20
SIZES["tiny"] = SIZES["shallow"] = ModelSize(layers=1, width=32, heads=2)
"""
"""Makes vocabularies, the default model and the default steps of `train` smaller, and forks loader
workers."""


def start(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """What a process of `pretokenize` printed, and its exit code."""
    result = warm.run([*COMMAND[1:], *arguments], env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == expect, result.stderr
    return result


def ended_by(
    number: signal.Signals, units: int, *arguments: object, group: bool = False, **options: Any
) -> tuple[warm.Popen, str]:
    """Run `pretokenize`, which sends itself a signal when it has recorded so many units. Return
    the process when it has ended, and what it printed to stderr; its workers may still run.

    Args:
        number: The signal.
        units: Units that this process has recorded.
        arguments: The arguments of `pretokenize`.
        group: Send the signal to all processes of the session, as a terminal does.
        options: Of `warm.Popen`.
    """
    code = f"""
import os
from tokenfeed.tools.jobs.run_records import RunRecords
append, left = RunRecords.append, [{units}]
def counted(records, result):
    append(records, result)
    left[0] -= 1
    if left[0] == 0:
        os.{"killpg" if group else "kill"}(os.getpid(), {int(number)})
RunRecords.append = counted
from tokenfeed.tools.pretokenize import main
main()
"""
    with tempfile.TemporaryFile("w+") as errors:
        process = warm.Popen(
            ["-c", code, *arguments], stderr=errors, start_new_session=True, **options
        )
        process.wait(300)
        errors.seek(0)
        return process, errors.read()


def run(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """The same of `pretokenize` within this process."""
    return call(pretokenize.main, *arguments, expect=expect)


def call(
    main: Callable[[], None], *arguments: object, expect: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run the function of a command within this process, and leave the process as it was. Workers
    of `pretokenize` are forks of the warm process. `expect` None takes any exit code."""
    words = [main.__module__.rpartition(".")[2], *map(str, arguments)]
    output, errors = io.StringIO(), io.StringIO()
    code: Any = None
    with _undone(words), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    result = subprocess.CompletedProcess(words, code or 0, output.getvalue(), errors.getvalue())
    assert expect in (result.returncode, None), result.stderr
    return result


@contextlib.contextmanager
def _undone(words: list[str]) -> Iterator[None]:
    """Take back what a command does to its process."""
    with (
        process_state.kept(),
        mock.patch("gc.freeze"),
        mock.patch.object(processes, "subprocess", warm.PROGRAMS),
        mock.patch.object(console, "_said", False),
    ):
        sys.argv, logging.getLogger("tokenfeed").handlers = words, []
        os.environ["HF_HUB_OFFLINE"] = "1"
        yield


def run_json(*arguments: object) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return summary


def error_of(*arguments: object, expect: int = 1) -> str:
    """The one line that a run ends with."""
    lines = run(*arguments, expect=expect).stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:], lines
    assert "Traceback" not in "".join(lines)
    return errors[0]


def records_in(out: Path) -> list[Path]:
    """The records of the finished units of an unfinished run."""
    return sorted((out / ".parts").glob("[0-9]*.json"))


def kill_at(moment: int, command: str, *arguments: object) -> bool:
    """Run a command, and kill it when it has renamed, synced, linked or deleted `moment` files.
    Return False if it ended before."""
    code = f"""
import os, signal
left = [{moment}]
def counted(function):
    def call(*arguments, **options):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*arguments, **options)
    return call
os.fsync = lambda descriptor: None  # no kill loses what the system has
for name in ("replace", "fsync", "link", "unlink", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
from tokenfeed.tools.{command} import main
main()
"""
    result = warm.run(["-c", code, *map(str, arguments)])
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode != 0
