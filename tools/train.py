"""The `train` command: shards in, a trained model and a report out.

Ctrl-C and SIGTERM end the run after the step under way, with a checkpoint and a report, so nothing
is lost and `--resume` goes on from there. A second Ctrl-C ends it at once. SIGUSR1 saves, and the
run goes on.
"""

import argparse
import dataclasses
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import tyro

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.tools.console import print_json, run_command
from tokenfeed.trainer.config import TrainConfig

__all__ = ["main", "parse_config"]

_log = logging.getLogger(__name__)

_DESCRIPTION = """Train a language model on the shards of `pretokenize`, and report the stall.
Without options: a minute on a CPU. For a GPU of 80 GB: --model gpt2 --sequence-length 1024
--micro-batch-tokens 65536 --step-tokens 524288 --learning-rate 6e-4 --compile; with less
memory a smaller --micro-batch-tokens, and the training stays the same."""


class Wishes:
    """Turns the first SIGINT or SIGTERM, and every SIGUSR1, into a wish that the loop asks for."""

    def __init__(self) -> None:
        self.ended_by: int | None = None
        """The signal that came to stop."""
        self._save = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop_later)
        signal.signal(signal.SIGUSR1, self._save_later)

    def should_stop(self) -> bool:
        """Whether to save and end."""
        return self.ended_by is not None

    def should_save(self) -> bool:
        """Whether to save and go on; a wish is told once."""
        if not self._save:
            return False
        self._save = False
        return True

    def _stop_later(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = number
        os.write(sys.stderr.fileno(), b"stopping after this step; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _save_later(self, number: int, frame: FrameType | None) -> None:
        self._save = True
        os.write(sys.stderr.fileno(), b"saving after this step\n")


def main() -> None:
    """Entry point of the `train` script."""
    run_command(_run)


def parse_config() -> TrainConfig:
    """Read the command line; with --resume, on top of the settings the run was begun with."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--run-dir", "--run_dir")
    first.add_argument("--resume", action="store_true")
    asked, _ = first.parse_known_args()
    if asked.run_dir == "":  # as a path it would be the working directory
        raise ConfigError("`--run-dir` is empty: expected a folder. Is a shell variable unset?")
    begun = TrainConfig.of_run(Path(asked.run_dir)) if asked.resume and asked.run_dir else None
    config = tyro.cli(
        TrainConfig,
        prog="train",
        description=_DESCRIPTION,
        default=tyro.MISSING_NONPROP if begun is None else begun,
        config=(tyro.conf.FlagCreatePairsOff,) if begun is None else (),  # --no-compile as well
    )
    if begun is not None:
        for name, value in dataclasses.asdict(config).items():
            if name != "json" and value != getattr(begun, name):
                _log.info("%s was %s, is %s from now on", name, getattr(begun, name), value)
    return config


def _run() -> int:
    config = parse_config()
    from tokenfeed.trainer.run import train  # torch takes seconds to load; --help needs none

    wishes = Wishes()
    report = train(config, wishes.should_stop, wishes.should_save)
    if config.json:
        print_json(dataclasses.asdict(report))
    else:
        print(report.summary())
    return 0 if wishes.ended_by is None else 128 + wishes.ended_by


if __name__ == "__main__":
    main()
