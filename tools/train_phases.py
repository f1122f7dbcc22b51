"""Run the phases of a training, one after the other: the list `phases` of a file for --config.

A phase is a run of its own in `run-dir/phase-N-NAME`, which starts from weights of the phase before
as --init-from does. A finished phase is skipped, and an unfinished phase is resumed.
"""

import dataclasses
import functools
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.tools.shell.console import print_json
from tokenfeed.tools.train_settings import FILE_KINDS, Command, Parsed, chosen_command
from tokenfeed.trainer.config.run_config import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    OF_ONE_COMMAND,
    PAGE_FILE,
    TrainConfig,
)
from tokenfeed.trainer.config.values import nearest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run."""

    number: int
    name: str
    start: str
    """`last` or `best`: the weights of the phase before from which this phase starts."""
    given: dict[str, Any]
    """Its settings, without the settings that `train` chooses."""
    parsed: Parsed
    """Its settings, for a new run."""

    @property
    def config(self) -> TrainConfig:
        """Its settings, for a new run."""
        return self.parsed.command.settings()

    @property
    def folder(self) -> Path:
        """The folder of the phase."""
        return self.config.run_dir

    def __str__(self) -> str:
        return f"phase {self.number} ({self.name})"


def read_phases(command: Command) -> list[Phase]:
    """Return the phases of a command line. Log the settings that are chosen for each.

    Raises:
        ConfigError: The settings of a phase are wrong.
    """
    phases = []
    for number, content in enumerate(command.phases, 1):
        given = dict(content)
        name, start = given.pop("name"), given.pop("from", "last")
        folder = f"phase-{number}-{name}"
        given |= {"run_dir": command.run_dir / folder, "phase": name, "resume": False}
        if given.get("upload"):
            given["upload"] = f"{given['upload'].rstrip('/')}/{folder}"
        _log.info("phase %d of %d: %s", number, len(command.phases), name)
        parsed = chosen_command(given)
        parsed.command.settings().check()
        phases.append(Phase(number, name, start, given, parsed))
    return phases


def check_later(phases: list[Phase]) -> None:
    """Check the phases after the first one, which begin when those before have trained.

    Raises:
        ConfigError: A phase could not begin.
    """
    from tokenfeed.trainer.loop.run import check_ahead

    for phase in phases[1:]:
        try:
            check_ahead(phase.config)
        except ConfigError as error:
            raise ConfigError(f"{phase}: {error}") from error


def as_yaml(command: Command, phases: list[Phase]) -> str:
    """Return the settings of all phases as --config takes them: first the common settings, then
    the differences of each phase."""
    found = [phase.parsed.as_dict() for phase in phases]
    common = {
        name: value
        for name, value in found[0].items()
        if name in FILE_KINDS and all(name in each and each[name] == value for each in found)
    }
    own = {"phase", "init_from", "run_dir", "upload", *OF_ONE_COMMAND} - {"export"}
    parts = [
        {"name": phase.name, **({"from": phase.start} if phase.number > 1 else {})}
        | {k: v for k, v in each.items() if k not in common and k not in own}
        for phase, each in zip(phases, found, strict=True)
    ]
    common |= {"run_dir": str(command.run_dir), "init_from": found[0]["init_from"]}
    common["upload"] = command.upload
    return yaml.safe_dump(
        {k: v for k, v in common.items() if k not in OF_ONE_COMMAND} | {"phases": parts},
        sort_keys=False,
    )


def run_phases(
    command: Command, should_stop: Callable[[], bool], should_save: Callable[[], bool]
) -> None:
    """Run the phases that are not finished, or the one that --phase names. Print their reports.

    Raises:
        TokenfeedError: Settings, shards, checkpoints or memory do not allow a phase.
    """
    from tokenfeed.trainer.distributed.world import join_world  # torch takes seconds to load
    from tokenfeed.trainer.loop.run import train
    from tokenfeed.trainer.loop.uploads import upload_report
    from tokenfeed.trainer.report.phases import PhasesReport

    world = join_world(command.device)
    # Without --run-dir each rank has chosen a folder of its own.
    command = dataclasses.replace(command, run_dir=world.from_rank_0(lambda: command.run_dir))
    phases = read_phases(command)
    chosen = named_phases(phases, command.phase)
    world.from_rank_0(lambda: check_later([each for each in chosen if not _is_finished(each)]))
    world.from_rank_0(lambda: _write_config(command, phases))
    for phase in chosen:
        before = phases[phase.number - 2] if phase.number > 1 else None
        due = functools.partial(_due, phase, before, is_named=command.phase is not None)
        decided = world.run_slow(due if world.is_main else lambda: None)  # it may download
        config = world.from_rank_0(lambda: decided)  # noqa: B023
        if config is None:
            continue
        _log.info("phase %d of %d: %s, in %s", phase.number, len(phases), phase.name, phase.folder)
        is_new = not config.resume
        settle = phase.parsed.settle if is_new else None
        report = train(config, should_stop, should_save, world, settle)
        gc.collect()  # the model is in reference cycles
        found = PhasesReport.of_run(command.run_dir)
        if world.is_main and found:
            found.write()
            if command.upload:
                upload_report(command.upload, command.run_dir)
            if not command.json:
                print(report.summary(), flush=True)
        if not report.finished:
            break
    world.close()
    found = PhasesReport.of_run(command.run_dir)
    if not world.is_main or found is None:
        return
    if command.json:
        print_json(dataclasses.asdict(found))
    else:
        print(found.summary())


def named_phases(phases: list[Phase], named: str | None) -> list[Phase]:
    """Return the phase that --phase names, or all phases."""
    if named is None:
        return phases
    found = [phase for phase in phases if named in (str(phase.number), phase.name)]
    if not found:
        names = [phase.name for phase in phases]
        raise ConfigError(
            f"`--phase`={named}: expected a number from 1 to {len(phases)}, or a name: "
            f"{', '.join(names)}.{nearest(named, names)}"
        )
    return found


def _write_config(command: Command, phases: list[Phase]) -> None:
    """Write config.yaml of the run, from which --resume reads the phases."""
    if (command.run_dir / "checkpoints").is_dir():
        raise ConfigError(
            f"`--run-dir`: {command.run_dir} holds a run without phases. Give another folder."
        )
    command.run_dir.mkdir(parents=True, exist_ok=True)
    named = {phase.folder.name for phase in phases}
    found = sorted(path.name for path in command.run_dir.glob("phase-*-*") if path.is_dir())
    if unknown := [name for name in found if name not in named]:
        _log.warning(
            "%s: no phase of this run has the folder %s. If you have renamed or moved a phase, "
            "rename its folder, or the phase starts anew",
            command.run_dir,
            ", ".join(unknown),
        )
    atomic_write(command.run_dir / CONFIG_FILE, as_yaml(command, phases).encode())


def _due(phase: Phase, before: Phase | None, *, is_named: bool) -> TrainConfig | None:
    """Return the settings with which a phase starts or is resumed; None if it is skipped.

    Raises:
        ConfigError: The phase before is not finished, or has no best weights.
    """
    from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
    from tokenfeed.trainer.loop.uploads import fetch_newest

    for each in filter(None, (before, phase)):
        fetch_newest(dataclasses.replace(each.config, resume="auto"))
    if before and not _is_finished(before):
        raise ConfigError(
            f"`--phase`: {phase} starts from {before}, which is not finished in {before.folder}. "
            f"Run --phase {before.number} first, or all phases without --phase."
        )
    exports = phase.config.export is not None and not phase.config.export.exists()
    if _is_finished(phase) and not is_named and not exports:
        _skip(phase)
        return None
    if Checkpoints.of_run(phase.folder).latest() is not None:
        config = chosen_command(phase.given | {"resume": "auto"}).command.settings()
        began = config.init_from
        is_best = began is not None and began.parent.name == CHECKPOINTS_FOLDER
        if before and is_best != (phase.start == "best"):
            _log.warning(
                "%s has begun from %s, so `from: %s` is not used", phase, began, phase.start
            )
        return config
    start = phase.given.get("init_from")
    if before:
        start = before.folder
        checkpoints = Checkpoints.of_run(before.folder)
        if phase.start == "best":
            best = checkpoints.best()
            if best is None:
                raise ConfigError(
                    f"{phase}: `from: best` needs a result of {before} on a split validation. Take "
                    "`from: last`, or `pretokenize --validation`."
                )
            start = checkpoints.path(best.step)
    return dataclasses.replace(phase.config, init_from=start)


def _is_finished(phase: Phase) -> bool:
    """Return whether a phase has done all, its page included, which it writes last."""
    from tokenfeed.trainer.report.run_files import Report

    report = Report.of_run(phase.folder)
    return report is not None and report.finished and (phase.folder / PAGE_FILE).exists()


def _skip(phase: Phase) -> None:
    """Log that a phase is finished, and which of its given settings it was not trained with."""
    begun = TrainConfig.of_run(phase.folder)
    saved = begun.as_dict() if begun else {}
    now = {name: value for name, value in phase.parsed.as_dict().items() if value != "auto"}
    if phase.given.get("scale_learning_rate"):  # the size of the step has changed the rate
        del now["learning_rate"]
    changed = [
        f"{name} was {saved[name]}, not {now[name]}"
        for name in phase.given
        if name in saved and name in now and name not in OF_ONE_COMMAND and saved[name] != now[name]
    ]
    _log.info("%s is finished, in %s", phase, phase.folder)
    if changed:
        _log.warning(
            "%s is finished, so its changed settings are not used: %s. Train it on by --phase %d",
            phase,
            "; ".join(changed),
            phase.number,
        )
