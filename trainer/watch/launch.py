"""Run a script or a module as `python` does, in this process.

The script gets a `__main__` module of its own, which stays in place at the end: exit functions,
threads and pickles need it.
"""

import os
import runpy
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.watch.watch import Watch

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun", "mpiexec", "horovodrun")
"""Programs that start other processes."""
_OWN = "tokenfeed.trainer.watch."
"""The modules of hooks, and this one."""
_IMPORTS = ("<frozen runpy", "<frozen importlib")
"""Files of Python's own frames, which it does not show when it runs a script by itself."""


def run_watched(words: list[str], running: Watch) -> int | str | None:
    """Run a script, or a module behind `-m`, and return the exit code of the process.

    Args:
        words: The script or `-m MODULE`, and its arguments.
        running: A watch to run it under.

    Raises:
        ConfigError: The words are another launcher, or name no file.
    """
    check_words(words)
    code: int | str | None = None
    end = ""
    running.start()
    try:
        _run_module(words[1:]) if words[0] == "-m" else _run_script(words)
    except SystemExit as exit_:
        code = exit_.code
        end = f"sys.exit({code!r})" if code else ""
    except KeyboardInterrupt as error:
        end = "KeyboardInterrupt"
        _show_only(_own_part(error.__traceback__))
        raise
    except BaseException as error:
        end, code = type(error).__name__, 1
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        if end != "KeyboardInterrupt":
            _wait_for(running.thread)
        running.finish(end)
    exit_code: int | str | None = running.exit_code(code)
    return exit_code


def check_words(words: list[str]) -> None:
    """Reject a launcher, with the command to use instead, and what is no Python script.

    Raises:
        ConfigError: The words are one of these.
    """
    name, rest = os.path.basename(words[0]), words[1:]
    if name == "-m":
        if not rest:
            raise ConfigError("`-m`: expected the name of a module.")
        name = "torchrun" if rest[0].startswith("torch.distributed.") else rest[0].split(".")[0]
        name, rest = name if name in _LAUNCHERS else "", rest[1:]
    elif _is_python(name):
        fixed = " ".join(["tokenfeed stall", *rest])
        raise ConfigError(f"`{words[0]}`: leave it out. Run `{fixed}`.")
    elif name not in _LAUNCHERS:
        _check_file(Path(words[0]))
    if name in _LAUNCHERS:
        fixed = " ".join(_relaunched(name, rest))
        raise ConfigError(
            f"`{name}` starts other processes, which would not be measured. Run `{fixed}`."
        )


def _check_file(path: Path) -> None:
    expected = "Expected a Python script, or `-m MODULE`."
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder. {expected}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. {expected}")
    if path.suffix == ".ipynb":
        raise ConfigError(f"{path}: is a notebook. Measure a cell by `with tokenfeed.watch():`.")


def _relaunched(name: str, words: list[str]) -> list[str]:
    """Return the command of a launcher whose processes are measured."""
    start = {"accelerate": ["accelerate", "launch"]}.get(name, [name])
    words = [word for word in words if word not in ("launch", "--module")]
    at = next(
        (at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words)
    )
    module = "--module" if name == "deepspeed" else "-m"
    return [*start, *words[:at], module, "tokenfeed", "stall", *words[at:]]


def _is_python(name: str) -> bool:
    return name.startswith("python") and not name.endswith(".py")


def _run_script(words: list[str]) -> None:
    path = os.path.abspath(words[0])
    main = _begin(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    sys.argv = [*words]
    exec(loader.source_to_code(Path(path).read_bytes(), path), main.__dict__)


def _run_module(words: list[str]) -> None:
    _begin(os.getcwd())
    sys.argv = [*words]
    runpy._run_module_as_main(words[0], alter_argv=True)  # type: ignore[attr-defined]


def _begin(folder: str) -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    if not sys.flags.safe_path:
        sys.path[0] = folder
    return main


def _wait_for(thread: int | None) -> None:
    """Wait for the thread that trains, as Python does when the main thread has ended."""
    for each in threading.enumerate():
        if each.ident == thread and not each.daemon and each is not threading.current_thread():
            each.join()


def _show_only(trace: TracebackType | None) -> None:
    """Let Python show this traceback of the exception that ends the process."""
    show = sys.excepthook
    sys.excepthook = lambda kind, error, _: show(kind, error.with_traceback(trace), trace)


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the launch, and of hooks that the script called."""
    while trace is not None and (_is_launch(trace) or _is_hook(trace)):
        trace = trace.tb_next
    kept = trace
    while kept is not None:
        after = kept.tb_next
        while after is not None and _is_hook(after):
            after = after.tb_next
        kept.tb_next = after
        kept = after
    return trace


def _is_launch(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.endswith("runpy.py") or file.startswith(_IMPORTS)


def _is_hook(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__")).startswith(_OWN)
