"""What `train` is told, from all places: what suits the data set and the GPU, below a preset, below
a YAML file, below the command line; where a run goes on, all above the settings it was begun with.
"""

import contextlib
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import column_of
from tokenfeed.tools.flags import read_flags
from tokenfeed.trainer.config import Positive, TrainConfig
from tokenfeed.trainer.data_sets import read_manifest
from tokenfeed.trainer.defaults import Asked, Choice, epochs_of, lasting, steps_of, suited
from tokenfeed.trainer.machine import Machine, able, machine_of, sized
from tokenfeed.trainer.presets import PRESETS, PresetName
from tokenfeed.trainer.ranks.launch import Launch
from tokenfeed.trainer.settings import flag_of, read_settings

__all__ = ["Command", "parse_config", "read_command"]

_log = logging.getLogger(__name__)

_DESCRIPTION = """Learn what the shards of `pretokenize` are for: documents, completions, classes,
scores or tags; report the metrics and the stall. What is not said suits the data set and the GPU,
and is printed; --print-config shows all. On documents without options: a minute on a CPU. On a GPU
of 80 GB: --preset h100; with less memory a smaller --micro-batch-tokens, and the training stays the
same. --no-compile turns a switch off that a file or preset has turned on; so for every switch."""

_GROUPS = {
    "shards": "what to train on",
    "model": "model",
    "steps": "batches and steps",
    "optimizer": "optimizer",
    "device": "memory, precision, speed",
    "eval_every": "when to evaluate, save and log",
    "run_dir": "output",
    "epochs": "settings from elsewhere, and plans",
}
_EITHER = (("steps", "epochs", "how long to train"), ("step_tokens", "step_rows", "what a step is"))
"""Settings of which one is enough, and what they say."""


_OF_GPUS = ("t4", "rtx4090", "h100")
"""Presets for training on documents."""
_OTHER_NAMES = {
    "": "--shards",
    "--batch-size": "--step-rows (rows of a step) or --micro-batch-tokens (memory)",
    "--lr": "--learning-rate",
    "--max-steps": "--steps",
    "--output-dir": "--run-dir",
}
"""What other trainers call our options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(TrainConfig):
    """What the command line says: settings, where others come from, and what to do with them."""

    epochs: Positive | None = None
    """Passes over the train split, instead of --steps."""
    config: Path | None = None
    """YAML file of settings by these names; options come before it. Also config.yaml of a run."""
    preset: PresetName | None = None
    """Settings that go together: quick, a look at everything in a minute; t4, rtx4090, h100, learn
    documents on that GPU; production, a run of days."""
    print_config: bool = False
    """Print the settings that would be in force, as --config takes them. Trains nothing."""
    dry_run: bool = False
    """Say what the run will take: steps, memory, time, disk. Trains nothing, and needs no GPU."""
    gpu: str | None = None
    """The GPU that --dry-run is for: a name like H100, or its memory in GiB."""
    monitor_only: bool = False
    """Show what GPUs and host are doing, live, with a line of advice. Needs no shards."""

    def settings(self) -> TrainConfig:
        """The settings alone."""
        return TrainConfig(**_values(self))

    def as_yaml(self) -> str:
        """The settings as --config takes them."""
        return yaml.safe_dump(self.settings().as_dict(), sort_keys=False)


_ACTIONS = ("config", "preset", "print_config", "dry_run", "gpu", "monitor_only")
_KINDS = {
    name: kind
    for name, kind in get_type_hints(Command, include_extras=True).items()
    if name not in _ACTIONS
}
"""What a file may say."""


def parse_config() -> TrainConfig:
    """The settings that are in force."""
    return read_command().settings()


def read_command() -> Command:
    """Read the command line, and what it refers to."""
    said = _said()
    if "run_dir" not in said and Launch.of_environment().may_restart:
        raise ConfigError(
            "`--run-dir`: torchrun may restart the run, which goes on only where it finds its "
            "folder. Give one."
        )
    if said.get("resume") == "auto":
        said["resume"] = _finds_run(said)
    begun = TrainConfig.of_run(said["run_dir"]) if _resumes(said) else None
    manifest = _manifest(said) if begun is None else None
    plain = Command(**_over({} if begun is None else _values(begun), said))
    machine = machine_of(plain, plain.gpu)  # imports torch, and so comes after the manifest
    if begun is not None:
        command = _resumed(plain, machine)
    else:
        choices = [] if manifest is None else _suited(manifest, said, machine)
        choices += sized(_laid(choices, said), machine, said)
        command = _laid(choices, said)
        _tell(choices, command)
    for lack in able(command, machine):
        _log.warning("%s", lack.reason)
        command = dataclasses.replace(command, **lack.settings)
    return command


def _finds_run(said: dict[str, Any]) -> bool:
    """Whether there is a run to go on with; then its folder has the newest checkpoint, and the
    settings that this was made with."""
    if "run_dir" not in said:
        raise ConfigError("`--resume` auto needs --run-dir: the folder where the run goes on.")
    begun = TrainConfig.of_run(said["run_dir"])
    if said.get("dry_run") or said.get("print_config"):
        return begun is not None
    from tokenfeed.trainer.checkpoints.newest import bring_newest  # torch, as training needs it

    return bring_newest(said["run_dir"], said.get("upload", begun.upload if begun else None))


def _resumes(said: dict[str, Any]) -> bool:
    return said.get("resume", False) and "run_dir" in said


def _said() -> dict[str, Any]:
    """What the command line says, and below it the file and the preset that it names."""
    flags = read_flags(Command, _GROUPS, "train", _DESCRIPTION, _OTHER_NAMES)
    _check_either(flags, {name: flag_of(name) for name in flags})
    preset = PRESETS[flags["preset"]] if flags.get("preset") else {}
    return _with_steps(_over(_over(preset, _file(flags.get("config"))), flags))


def _check_either(said: dict[str, Any], written: dict[str, str], where: str = "") -> None:
    """Refuse two settings of one source that contradict each other.

    Args:
        said: The settings by name.
        written: How each one is written there.
        where: The file, for the message.
    """
    for one, other, meaning in _EITHER:
        if said.get(one) is not None and said.get(other) is not None:
            raise ConfigError(
                f"{where}`{written[other]}` and {written[one]} both say {meaning}. Leave one out."
            )


def _with_steps(said: dict[str, Any]) -> dict[str, Any]:
    """With those of the phases, where nothing else is said of steps."""
    if not said.get("phases"):
        return said
    if said.get("epochs") is not None:
        raise ConfigError("`--epochs`: phases say how many steps they have. Leave it out.")
    return {"steps": sum(phase.steps for phase in said["phases"])} | said


def _file(path: Path | None) -> dict[str, Any]:
    found = read_settings(path, _KINDS) if path else {}
    _check_either(found, {name: name for name in found}, f"{path}: ")
    return found


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Settings with others laid over them; of two that say the same, the upper one counts."""
    kept = dict(below)
    if above.get("phases"):  # they have steps of their own
        kept = {name: value for name, value in below.items() if name not in _EITHER[0]}
    for one, other, _ in _EITHER:
        for said, replaced in ((one, other), (other, one)):
            if above.get(said) is not None and above.get(replaced) is None:
                kept.pop(replaced, None)
    return kept | above


def _manifest(said: dict[str, Any]) -> Manifest | None:
    """The manifest of the data sets; None if they have nothing to train on, which the run reports.
    With --print-config they may also be unreadable.

    Raises:
        TokenfeedError: A data set cannot be read. This comes before torch is imported.
    """
    if "shards" not in said:
        if _resumes(said):
            folder = said["run_dir"]
            raise ConfigError(f"`--run-dir`: {folder} holds no run. Give the folder of one.")
        raise ConfigError("`--shards` is needed: the folder that `pretokenize` made.")
    with contextlib.suppress(*[TokenfeedError] if said.get("print_config") else []):
        manifest = read_manifest(said["shards"])
        return manifest if "train" in manifest.splits else None
    return None


def _suited(manifest: Manifest, said: dict[str, Any], machine: Machine) -> list[Choice]:
    """What suits the data sets, and what was said."""
    asked = Asked(
        objective=said.get("objective", "auto"),
        model=said.get("model"),
        from_scratch=said.get("from_scratch", False),
        step_tokens=said.get("step_tokens") is not None and said.get("step_rows") is None,
        longest_input=_longest_input(manifest, said.get("model", "")),
        for_gpu=said.get("preset") in _OF_GPUS,
    )
    choices = suited(manifest, asked)
    begun = _laid(choices, said)
    begun.check()
    epochs = begun.epochs or (None if "steps" in said else epochs_of(manifest, asked))
    on_gpu = machine.gpu is not None
    return choices + lasting(manifest, begun, asked, epochs, said=said, on_gpu=on_gpu)


def _longest_input(manifest: Manifest, model: str) -> int | None:
    """Tokens that an hf: model reads at most; only completions are as long as a model allows."""
    if not model.startswith("hf:") or column_of(manifest.columns, "context") is None:
        return None
    from tokenfeed.trainer.models.hub import longest_input  # transformers, seconds

    return longest_input(model)


def _laid(choices: list[Choice], said: dict[str, Any]) -> Command:
    chosen: dict[str, Any] = {}
    for choice in choices:
        chosen |= choice.settings
    steps = {"steps": chosen["steps"]} if "epochs" in said and "steps" in chosen else {}
    return Command(**_over(chosen, said) | steps)


def _tell(choices: list[Choice], command: Command) -> None:
    if command.preset is not None:
        choices = [Choice(PRESETS[command.preset], f"preset {command.preset}"), *choices]
    for line in filter(None, (choice.line(command) for choice in choices)):
        _log.info("%s", line)


def _resumed(command: Command, machine: Machine) -> Command:
    """The settings of a run that goes on."""
    if command.epochs is None:
        return command
    command.check()
    manifest, on_gpu = read_manifest(command.shards), machine.gpu is not None
    steps = steps_of(command.epochs, command, manifest, on_gpu=on_gpu)
    return dataclasses.replace(command, steps=steps)


def _values(config: TrainConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
