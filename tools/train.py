"""The `train` command: shards in, a trained model and a report out.

Ctrl-C and SIGTERM end the run after the step under way, with a checkpoint and a report, so nothing
is lost and `--resume` goes on from there. A second Ctrl-C ends it at once. SIGUSR1 saves, and the
run goes on.
"""

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tyro

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.tools.console import print_json, run_command
from tokenfeed.trainer.config import Positive, TrainConfig
from tokenfeed.trainer.defaults import Asked, Choice, epochs_of, lasting, steps_of, suited

__all__ = ["Command", "main", "parse_config"]

_log = logging.getLogger(__name__)

_DESCRIPTION = """Learn what the shards of `pretokenize` are for: documents, completions, classes,
scores or tags; report the metrics and the stall. What is not said suits the data set, and is
printed. On documents without options: a minute on a CPU. For a GPU of 80 GB: --model gpt2
--sequence-length 1024 --micro-batch-tokens 65536 --step-tokens 524288 --learning-rate 6e-4
--compile; with less memory a smaller --micro-batch-tokens, and the training stays the same."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(TrainConfig):
    """What the command line says: settings, epochs that become steps, and what to do with them."""

    epochs: Positive | None = None
    """Passes over the train split, instead of --steps."""
    dry_run: bool = False
    """Say what the run will take: steps, memory, time, disk. Trains nothing, and needs no GPU."""
    gpu: str | None = None
    """The GPU that --dry-run is for: a name like H100, or its memory in GiB."""

    def config(self) -> TrainConfig:
        """The settings alone."""
        return TrainConfig(**_values(self))


def parse_config() -> TrainConfig:
    """The settings on the command line."""
    return _read_command().config()


def _read_command() -> Command:
    """Read the command line, on top of the settings that suit the shards; with --resume, of those
    the run was begun with."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--run-dir", "--run_dir")
    first.add_argument("--resume", action="store_true")
    first.add_argument("--shards")
    first.add_argument("--objective", default="auto")
    first.add_argument("--model")
    first.add_argument("--from-scratch", "--from_scratch", action="store_true")
    first.add_argument("--step-tokens", "--step_tokens")
    first.add_argument("--step-rows", "--step_rows")
    first.add_argument("--steps")
    first.add_argument("--epochs")
    asked, _ = first.parse_known_args()
    if asked.run_dir == "":  # as a path it would be the working directory
        raise ConfigError("`--run-dir` is empty: expected a folder. Is a shell variable unset?")
    if asked.steps and asked.epochs:
        raise ConfigError("`--epochs` and --steps both say how long to train. Leave one out.")
    if asked.step_tokens and asked.step_rows:
        raise ConfigError("`--step-rows` and --step-tokens both say what a step is. Leave one out.")
    begun = TrainConfig.of_run(Path(asked.run_dir)) if asked.resume and asked.run_dir else None
    if begun is not None:
        return _resumed(begun)
    if asked.resume and asked.run_dir and not asked.shards:
        raise ConfigError(f"`--run-dir`: {asked.run_dir} holds no run. Give the folder of one.")
    manifest = _manifest_of(asked.shards)
    return _suited(asked, manifest) if manifest else _parse(tyro.MISSING_NONPROP)


def _parse(default: Any, *, resuming: bool = False) -> Command:
    command: Command = tyro.cli(
        Command,
        prog="train",
        description=_DESCRIPTION,
        default=default,
        config=() if resuming else (tyro.conf.FlagCreatePairsOff,),  # --no-compile as well
    )
    return command


def _manifest_of(shards: str | None) -> Manifest | None:
    """None where it cannot be read or has nothing to train on: the run says why."""
    with contextlib.suppress(TokenfeedError):
        manifest = Manifest.read(shards) if shards else None
        return manifest if manifest and "train" in manifest.splits else None
    return None


def _suited(words: argparse.Namespace, manifest: Manifest) -> Command:
    """Reads the command line twice: steps follow from other settings that are given there."""
    asked = Asked(
        objective=words.objective,
        model=words.model,
        from_scratch=words.from_scratch,
        step_tokens=words.step_tokens is not None,
    )
    choices = suited(manifest, asked)
    epochs = None if words.steps else epochs_of(manifest, asked)
    default = _with(Command(shards=words.shards), choices)
    given = _parse(_with(default, lasting(default, manifest, asked, epochs)))
    given.check()
    more = lasting(given, manifest, asked, given.epochs or epochs)
    command = _parse(_with(default, more))
    for line in filter(None, (choice.line(command) for choice in (*choices, *more))):
        _log.info("%s", line)
    return command


def _with(command: Command, choices: list[Choice]) -> Command:
    for choice in choices:
        command = dataclasses.replace(command, **choice.settings)
    return command


def _resumed(begun: TrainConfig) -> Command:
    """The settings of a run that goes on; those that differ from before are named."""
    command = _parse(Command(**_values(begun)), resuming=True)
    if command.epochs is not None:
        command.check()
        steps = steps_of(command.epochs, command, Manifest.read(command.shards))
        command = dataclasses.replace(command, steps=steps)
    for name, value in _values(command).items():
        if name != "json" and value != getattr(begun, name):
            _log.info("%s was %s, is %s from now on", name, getattr(begun, name), value)
    return command


def _values(config: TrainConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}


def _run() -> int:
    command = _read_command()
    config = command.config()
    if command.gpu is not None and not command.dry_run:
        raise ConfigError(f"`--gpu`={command.gpu}: is for --dry-run. Add it, or leave --gpu out.")
    if command.dry_run:
        return _plan(config, command.gpu)
    from tokenfeed.trainer.run import train  # torch takes seconds to load; --help needs none

    wishes = Wishes()
    report = train(config, wishes.should_stop, wishes.should_save)
    if config.json:
        print_json(dataclasses.asdict(report))
    else:
        print(report.summary())
    return 0 if wishes.ended_by is None else 128 + wishes.ended_by


def _plan(config: TrainConfig, gpu: str | None) -> int:
    from tokenfeed.trainer.dry_run import dry_run

    found = dry_run(config, gpu)
    if config.json:
        print_json(dataclasses.asdict(found))
    else:
        print(found.summary())
    return 0


if __name__ == "__main__":
    main()
