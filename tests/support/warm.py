"""Python processes that start warm: forks of one that has imported what tokenfeed builds on.

Imports take four seconds of a core, for an optimizer imports the compiler, and tests start hundreds
of processes. What such a process does is its own: memory, descriptors, signals, environment, exit
code. Two things differ from `python` on a command line, and tests of these start one: torch
is there already, and the interpreter is not taken down at the end (exit functions run; what is left
sees no `__del__`).
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

__all__ = ["run"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
        *("numpy", "pyarrow.ipc", "msgspec", "safetensors.torch", "tokenizers", "tyro", "yaml"),
        *("transformers.trainer", "transformers.models.llama.modeling_llama"),
    ]
)


class _Inherited:
    """A descriptor on its way to another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


def run(
    words: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 200.0,
) -> subprocess.CompletedProcess[str]:
    """What `python WORDS...` prints, and its exit code.

    Args:
        words: `-c CODE` or the path of a program, and what is given to it.
        env: Its environment; None for that of this process.
        cwd: Its folder; None for that of this process.
        timeout: Seconds.

    Raises:
        subprocess.TimeoutExpired: It was killed after that time.
    """
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):  # which is read by an import
        forkserver.ensure_running()
    given = [str(word) for word in words]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        streams = _Inherited(output.fileno()), _Inherited(errors.fileno())
        place = str(cwd or Path.cwd())
        process = _context.Process(
            target=_become, args=(given, dict(env or os.environ), place, *streams)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(given, timeout)
        said = []
        for stream in (output, errors):
            stream.seek(0)
            said.append(stream.read().decode())
        return subprocess.CompletedProcess([sys.executable, *given], process.exitcode, *said)


def _become(
    words: list[str], env: dict[str, str], cwd: str, output: _Inherited, errors: _Inherited
) -> None:
    for number, stream in enumerate((output, errors), 1):
        os.dup2(stream.number, number)
        os.close(stream.number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    try:
        _execute(words)
    finally:
        atexit._run_exitfuncs()


def _execute(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
