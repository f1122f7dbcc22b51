"""The command `tokenfeed`, with all commands of the package as subcommands.

This file imports nothing of a command until the command is known, so that --help takes no time.
"""

import signal
import sys
from importlib import import_module

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.text import facts
from tokenfeed.tools.shell.console import run_command, signals_held

_COMMANDS = {
    "pretokenize": "Tokenize a corpus once, into shards.",
    "train": "Train a model on shards, and report the stall of the device.",
    "report": "Print the report of a run, or compare two runs.",
    "shards": "Show, check, copy, reduce or export data sets.",
    "stall": "Measure where the time of any training script goes, without a change to it.",
    "doctor": "Print what a bug report needs: versions, devices, limits, and a test of the loader.",
}


def main() -> None:
    """Run the command that the first argument names."""
    name, *words = sys.argv[1:] or ["--help"]
    if name not in _COMMANDS:
        run_command(lambda: _without_command(name))
    sys.argv[1:] = words
    if name == "stall":  # runs a script of the user, whose signals and streams are its own
        stall = import_module("tokenfeed.tools.stall")
        if callable(signal.getsignal(signal.SIGINT)):  # not ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
        stall.main()
        return
    run_command(lambda: _start(name))


def _start(name: str) -> None:
    with signals_held():  # extension modules turn an interruption into an ImportError
        command = import_module(f"tokenfeed.tools.{name}")
    command.main()


def _without_command(name: str) -> None:
    if name == "--version":
        from importlib.metadata import version

        print(f"tokenfeed {version('tokenfeed')}")
    elif name in ("-h", "--help"):
        print(f"usage: tokenfeed COMMAND ...\n\n{facts(_COMMANDS)}\n")
        print("`tokenfeed COMMAND --help` describes a command. The first four are also programs of")
        print("their own: `pretokenize ...` is `tokenfeed pretokenize ...`.")
    else:
        commands = ", ".join(_COMMANDS)
        from tokenfeed.trainer.config.values import nearest

        hint = nearest(name, _COMMANDS) or f" The commands are {commands}."
        raise ConfigError(f"Unknown command `{name}`.{hint} See tokenfeed --help.")


if __name__ == "__main__":
    main()
