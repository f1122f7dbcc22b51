"""What the shell around every command makes of an error, an interruption, a bug."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm


def run_body(body: str) -> subprocess.CompletedProcess[str]:
    script = (
        "import errno, logging, os, signal\n"
        "from tokenfeed.pipeline.errors import *\n"
        "from tokenfeed.tools.shell.console import print_json, run_command\n"
        f"def body():\n    {body}\n"
        "run_command(body)\n"
    )
    return warm.run(["-c", script])


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise CorpusError('a.txt: is gone.\\n Go on.')", 1, "error: a.txt: is gone.  Go on."),
        ("raise ConfigError('`--x` 0')", 2, "error: `--x` 0"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("raise KeyboardInterrupt('all is kept')", 130, "interrupted: all is kept"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "interrupted"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "interrupted"),
        (
            "raise OSError(errno.EMFILE, 'Too many open files', 'a')",
            1,
            "error: a: Too many open files. Close some, or raise the limit (ulimit -n).",
        ),
        (
            "raise OSError(errno.ENOSPC, 'No space left on device', 'a')",
            1,
            "error: a: No space left on device. Free space there, and run the command again.",
        ),
        (
            "raise OSError(errno.EROFS, 'Read-only file system', 'a')",
            1,
            "error: a: Read-only file system. Use another folder, or mount this one for writing.",
        ),
        (
            "raise MemoryError('Unable to allocate 9 GiB')",
            1,
            "error: there is not enough memory (Unable to allocate 9 GiB). Raise its limit, or use "
            "fewer processes.",
        ),
        ("logging.getLogger('tokenfeed.x').warning('odd'); return 3", 3, "warning: odd"),
        ("logging.getLogger('tokenfeed.x').info('so far')", 0, "so far"),
        (
            "import tokenfeed, warnings; warnings.warn_explicit('odd key=1', UserWarning, "
            "tokenfeed.__file__, 1)",
            0,
            "warning: odd key=1",
        ),
        ("raise BrokenPipeError", 141, None),
        ("raise OSError(errno.EINVAL, 'Invalid argument')", 1, "error: Invalid argument"),
        (
            "raise RuntimeError('can\\'t start new thread')",
            1,
            "error: the system refuses to start another thread. Raise the limit on processes "
            "(ulimit -u, or the container's), or use fewer processes.",
        ),
    ],
)
def test_every_end_is_one_line_and_a_code(body: str, code: int, line: str | None) -> None:
    result = run_body(body)
    assert (result.returncode, result.stderr.splitlines()) == (code, [line] if line else [])


def test_a_second_signal_waits_for_nothing() -> None:
    result = run_body(
        "try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except KeyboardInterrupt:\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        finally:\n"
        "            print('what takes long')\n"
    )
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_python_ends_prints_nothing(number: signal.Signals) -> None:
    interrupt = f"import atexit; atexit.register(os.kill, os.getpid(), {int(number)})"
    result = run_body(f"{interrupt}; print('done')")
    assert (result.returncode, result.stdout, result.stderr) == (-number, "done\n", "")


@pytest.mark.parametrize("command", ["train", "pretokenize", "shards", "report", "main"])
def test_ctrl_c_before_a_command_has_imported_itself_prints_nothing(command: str) -> None:
    script = Path(sys.executable).with_name(command.replace("main", "tokenfeed"))
    interrupt = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'tokenfeed.pipeline.errors':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.meta_path.insert(0, Finder); sys.argv = [{str(script)!r}]\n"
        f"from tokenfeed.tools.{command} import main\n"
    )
    result = subprocess.run([sys.executable, "-c", interrupt], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    ["--version", "train --help", "train --help-all", "shards cat --help", "stall --help"],
)
def test_full_stdout_is_named(words: str, unbuffered: str) -> None:
    command = [sys.executable, "-m", "tokenfeed", *words.split()]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    remedy = "Free space there, and run the command again."
    line = f"error: stdout: No space left on device. {remedy}\n"
    assert (result.returncode, result.stderr) == (1, line)


def test_warning_of_a_users_script_names_its_line() -> None:
    result = run_body("import warnings; warnings.warn_explicit('odd', UserWarning, 'own.py', 7)")
    assert result.stderr == "own.py:7: UserWarning: odd\n"


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    result = run_body("raise KeyError('x')")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_json_goes_to_stdout_on_one_line() -> None:
    assert run_body("print_json({'a': [1, 'ü']})").stdout == '{"a": [1, "\\u00fc"]}\n'
