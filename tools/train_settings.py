"""The settings of `train`, from four sources: defaults that suit the data and the GPU, a preset, a
YAML file, the command line. Later sources override earlier ones. A resumed run has its saved
settings instead of the defaults.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from msgspec import Meta

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.feeding.placement import first_number
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import column_of
from tokenfeed.pipeline.text import count_of
from tokenfeed.tools.shell.command_line import Page, read_command_line, text
from tokenfeed.trainer.config.run_config import (
    BY_NUMBERS,
    CONFIG_FILE,
    MODEL_NUMBERS,
    Settle,
    TrainConfig,
    phase_folders,
    refuse_phases,
)
from tokenfeed.trainer.config.values import (
    OF_GPU,
    Positive,
    Tokens,
    checked_settings,
    flag_of,
    kinds_of,
    preset_names,
    preset_of,
    read_preset,
    read_settings,
)
from tokenfeed.trainer.data.datasets import is_packed, read_manifest
from tokenfeed.trainer.data.recommended import (
    Choice,
    data_defaults,
    default_epochs,
    gpu_default,
    scaling,
    schedule_defaults,
    size_defaults,
    step_bound,
    steps_of_epochs,
    tuning_defaults,
)

_log = logging.getLogger(__name__)

_DESCRIPTION = """Train a model on the shards of `pretokenize`: documents, conversations,
completions, classes, scores or tags. Report metrics and how long the device waits for data.
Options you leave out get values that suit the data and the GPU. `train` prints these values;
--print-config prints all settings. --dry-run tries three steps and prints how long a run takes.
--no-NAME turns off a switch that a file or a preset turned on."""
_FIRST = (
    *("shards", "model", "preset", "precision", "epochs", "learning_rate"),
    *("run_dir", "resume", "export", "monitor_only"),
)
"""The options that --help shows."""
_EXAMPLES = """examples:
  documents, on any device:       train --shards out/
  conversations, with LoRA:       train --shards chat/ --model hf:Qwen/Qwen3-0.6B --lora 16
  classes, for the GPU at hand:   train --shards reviews/ --preset auto --epochs 3
"""

GROUPS = {
    "data": ("shards", "sequence_length", "seed"),
    "model": (
        *("model", "layers", "width", "heads", "kv_heads"),
        *("dropout", "from_scratch", "lora", "trainable", "init_from"),
    ),
    "duration and batch size": (
        *("epochs", "tokens", "steps", "step_tokens", "step_rows", "micro_batch_tokens"),
    ),
    "optimizer": (
        *("learning_rate", "scale_learning_rate", "reference_step_tokens", "reference_step_rows"),
        *("min_learning_rate", "schedule", "warmup_steps", "weight_decay", "optimizer"),
    ),
    "device": ("device", "precision", "compile", "recompute", "shard_model"),
    "evaluation and checkpoint": (
        *(
            "eval_every",
            "eval_tokens",
            "eval_micro_batch_tokens",
            "patience",
            "samples",
            "save_every",
            "keep",
        ),
        *("compress_checkpoints", "upload", "log_every", "track", "profile"),
    ),
    "output": ("run_dir", "resume", "export", "json"),
    "configuration and planning": (
        *("config", "phase", "preset", "print_config", "dry_run", "monitor_only"),
    ),
    "rarely needed": (
        *("targets", "batching", "attention", "balance_attention"),
        *("lora_alpha", "lora_target", "clip_norm", "beta1", "beta2", "epsilon"),
        *("num_workers", "prefetch", "order", "cache_dir", "cache_bytes"),
    ),
}
"""The options by the title of their group in the help."""

Phases = tuple[Annotated[dict[str, Any], Meta(description="settings")], ...]
_OF_ADAPTERS = ("lora_alpha", "lora_target")
_BUDGETS = ("steps", "epochs", "tokens")
_PAIRS = (
    ("steps", "epochs", "how long to train"),
    ("steps", "tokens", "how long to train"),
    ("epochs", "tokens", "how long to train"),
    ("step_tokens", "step_rows", "what a step is"),
    ("reference_step_tokens", "reference_step_rows", "the step that the rate is for"),
)
"""Two settings that exclude each other, and their common meaning."""
_STEPS = ("step_tokens", "step_rows")
_OF_STEP = (
    *("steps", "epochs", "tokens", "warmup_steps", "eval_every", "eval_tokens", "save_every"),
    *("log_every", "learning_rate", "scale_learning_rate"),
    *("reference_step_tokens", "reference_step_rows"),
)
"""Settings that depend on the size of a step."""
_OTHER_NAMES = {
    "": "--shards",
    "--batch-size": "--step-rows (rows of a step) or --micro-batch-tokens (memory)",
    "--block-size": "--sequence-length",
    "--epoch": "--epochs",
    "--gradient-accumulation-steps": "--step-tokens or --step-rows (a step has as many "
    "micro-batches as fill it)",
    "--lora-rank": "--lora",
    "--lr": "--learning-rate",
    "--max-steps": "--steps",
    "--mixed-precision": "--precision",
    "--num-train-epochs": "--epochs",
    "--output-dir": "--run-dir",
    "--per-device-train-batch-size": "--micro-batch-tokens",
    "--task": "--shards? The shards decide the task: it is an option of pretokenize",
}
"""Options by their names in other trainers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(TrainConfig):
    """The command line: settings, sources of other settings, and what to do instead of training."""

    epochs: Positive | None = None
    """Passes over the train split, instead of --steps."""
    tokens: Tokens | None = None
    """Tokens to train on, like 500M or 10B, instead of --steps."""
    config: Path | None = None
    """YAML file whose keys are the names of options, like the config.yaml of a run. Options on the
    command line override the file."""
    preset: Annotated[str, text("NAME,...")] | None = None
    """Settings for a GPU and a purpose, like t4,production; later ones override earlier ones. GPUs:
    t4, v100, rtx4090, a100, h100, or auto for the GPU of this machine. Purposes: quick, test,
    production, gpt2. --config and options override presets."""
    step_tokens: Positive | Literal["auto"] = 2048  # type: ignore[assignment]
    """Tokens of one optimizer step, padding included. auto: one micro-batch, as large as fits, up
    to a bound. Default: 2048; auto for documents on a GPU."""
    step_rows: Positive | Literal["auto"] | None = None  # type: ignore[assignment]
    """Rows of one optimizer step, instead of --step-tokens. auto: one micro-batch, as large as
    fits, up to a bound."""
    scale_learning_rate: Literal["sqrt", "linear"] | None = None
    """How a --learning-rate that you or a preset gave follows the size of the step. Rates that
    `train` chooses are scaled already."""
    reference_step_tokens: Positive | None = None
    """Tokens of the step that --learning-rate is for."""
    reference_step_rows: Positive | None = None
    """Rows of the step that --learning-rate is for, instead of --reference-step-tokens."""
    print_config: bool = False
    """Print all settings as a file for --config, and exit."""
    dry_run: bool = False
    """Try three steps, and print the memory and time of the run."""
    monitor_only: bool = False
    """Show the load of GPUs and host live, and what to change. Takes --run-dir."""
    phases: Phases = ()
    """Only in a file: runs one after the other, each with a name and the settings in which it
    differs, like trainable, lora, learning_rate or steps. A phase starts from the weights of the
    one before."""

    def settings(self) -> TrainConfig:
        """The settings alone."""
        return TrainConfig(**_values(self))


Start = Literal["last", "best"]
"""The weights of the phase before from which a phase starts."""
_ACTIONS = ("config", "preset", "print_config", "dry_run", "monitor_only")
FILE_KINDS = {
    name: kind
    for name, kind in get_type_hints(Command, include_extras=True).items()
    if name not in _ACTIONS
}
"""The types of the settings that a file may have."""
_PAGE = Page(
    about=_DESCRIPTION,
    common=_FIRST,
    groups=GROUPS,
    examples=_EXAMPLES,
    reversible=[name for name, kind in FILE_KINDS.items() if bool in kinds_of(kind)],
    other_names=_OTHER_NAMES,
)
_OF_THE_RUN = ("phases", "phase", "run_dir", "upload", "resume", "json", "device", "init_from")
PHASE_KINDS = {name: kind for name, kind in FILE_KINDS.items() if name not in _OF_THE_RUN} | {
    "name": Annotated[str, Meta(description="text")],
    "from": Start,
}
"""The types of the settings that a phase may have."""
_PHASE_NAME = re.compile(r"(?!\d+$)[\w.-]+")


class Parsed(NamedTuple):
    """A command line."""

    command: Command
    settle: Settle | None = None
    """Returns the settings for the size of a step that fits the GPU; None if the size is known."""
    left_open: Mapping[str, Any] = {}
    """Settings that depend on the GPU: their values as given, or None."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name as --config takes them, without those that `train` chooses
        when the size of a step is known."""
        content = self.command.settings().as_dict() | dict(self.left_open)
        return {k: v for k, v in content.items() if v is not None or k not in self.left_open}


def read_command() -> Parsed:
    """Read the command line and the files that it names, and choose what they leave open. The
    phases of a run are left as they are given."""
    given = _given()
    if "phases" in given:
        settings: dict[str, Any] = {"shards": ""} | given
        return Parsed(Command(**settings))
    return chosen_command(given)


def chosen_command(given: dict[str, Any]) -> Parsed:
    """Return given settings and, for those that are left open, settings that suit the data."""
    given = dict(given)
    begun = _begun(given)
    if begun is None:
        manifest = _manifest(given)
        # Imports torch, and so comes after the manifest.
        on_gpu = _is_on_gpu(Command(**given))
        if manifest is not None:
            given = _with_auto_step(manifest, given, on_gpu=on_gpu)
        auto = next((name for name in _STEPS if given.get(name) == "auto"), None)
        if auto is None or manifest is None:
            return Parsed(_chosen(manifest, given, on_gpu=on_gpu))
        return _filling(auto, manifest, given, on_gpu=on_gpu)
    _check_start(given.get("init_from"), begun)
    given = {k: v for k, v in given.items() if not (k in _STEPS and v == "auto")}
    command = Command(**layered(_values(begun), given))
    command = dataclasses.replace(command, **_scaled(command, given, None))
    if command.epochs is not None or command.tokens is not None:
        command.check()
        manifest, on_gpu = read_manifest(command.shards), _is_on_gpu(command)
        budget = _budget(command, command.epochs, manifest, on_gpu=on_gpu)
        command = dataclasses.replace(command, **budget.settings)
    return Parsed(command)


def _check_start(source: Path | None, begun: TrainConfig) -> None:
    """Reject other initial weights for a run that has begun: it would not read them."""
    before = begun.init_from
    if source is None or (before is not None and source.resolve() == before.resolve()):
        return
    raise ConfigError(
        f"`--init-from`={source}: the run in {begun.run_dir} has begun from "
        f"{before or 'other weights'}, and goes on from its checkpoint. Leave --init-from out, or "
        "start a new run in another --run-dir."
    )


def _is_on_gpu(command: Command) -> bool:
    """Return whether the run is on a GPU. Imports torch: a second."""
    from tokenfeed.trainer.distributed.world import device_named

    return device_named(command.device).type != "cpu"


def read_options() -> dict[str, Any]:
    """Return the options on the command line."""
    return read_command_line(Command, "train", page=_PAGE)


def _given() -> dict[str, Any]:
    """Return the settings of the command line, which override its file and its preset."""
    options = read_options()
    _check_pairs(options)
    path = options.get("config") or _config_of_phases(options)
    if path and str(path) in preset_names() and not path.exists():
        raise ConfigError(f"`--config`={path}: no such file. Did you mean --preset {path}?")
    file = read_settings(path, FILE_KINDS) if path else {}
    phases = file.pop("phases", None)
    if phases == ():
        raise ConfigError(f"{path}: phases is empty. Add a phase, or leave it out.")
    _check_pairs(file, f"{path}: ")
    names = _presets_of(options)
    if "preset" in options:
        options["preset"] = ",".join(names)
    base = layered(*(read_preset(name, FILE_KINDS) for name in names), file)
    given = _with_model(layered(base, options))
    if phases:
        given["phases"] = tuple(_phases(phases, base, options, f"{path}: phases"))
    elif "phase" in options and not given.get("resume"):
        raise ConfigError(
            f"`--phase`={options['phase']}: needs a file with a list `phases` for --config."
        )
    return given


def _with_model(given: dict[str, Any]) -> dict[str, Any]:
    is_by_numbers = any(given.get(name) is not None for name in MODEL_NUMBERS)
    return {"model": BY_NUMBERS} | given if is_by_numbers else given


def _config_of_phases(options: dict[str, Any]) -> Path | None:
    """Return config.yaml of a run with phases that is to be resumed."""
    folder = options.get("run_dir") if options.get("resume") else None
    return folder / CONFIG_FILE if folder and phase_folders(folder) else None


def _phases(
    phases: Phases, base: dict[str, Any], options: dict[str, Any], where: str
) -> Iterator[dict[str, Any]]:
    """Yield all given settings of each phase, with its `name` and `from`.

    Settings of a phase override `base`, the settings of the file. The command line overrides both,
    with --phase only in the phase that it names.
    """
    of_run = {name: value for name, value in options.items() if name not in PHASE_KINDS}
    names: set[str] = set()
    for number, content in enumerate(phases, 1):
        phase = checked_settings(content, PHASE_KINDS, f"{where} {number}:")
        _check_pairs(phase, f"{where} {number}: ")
        name = phase.get("name", "")
        if not _PHASE_NAME.fullmatch(name) or name in names:
            raise ConfigError(
                f"{where} {number}: expected a name of its own, of letters, digits, dots, hyphens "
                f"and underscores, got {name!r}."
            )
        names.add(name)
        if number == 1 and "from" in phase:
            raise ConfigError(f"{where} 1: has no phase before it. Leave `from` out.")
        is_meant = options.get("phase") in (None, str(number), name)
        found = _with_model(layered(base, phase, options if is_meant else of_run))
        if "export" in phase or number < len(phases):  # the run exports its last phase
            found["export"] = phase.get("export")
        if number > 1:  # it starts from the phase before
            found.pop("init_from", None)
        if found.get("lora") is None:  # of phases with adapters
            found = {k: v for k, v in found.items() if k in phase or k not in _OF_ADAPTERS}
        yield found


def _presets_of(options: Mapping[str, Any]) -> list[str]:
    """Return the names of presets, with the preset of this machine's GPU in place of auto."""
    names = [name.strip() for name in options["preset"].split(",")] if "preset" in options else []
    if OF_GPU not in names:
        return names
    from tokenfeed.pipeline.feeding.devices import cuda  # torch
    from tokenfeed.trainer.distributed.world import device_named

    found, reason = None, "there is no GPU"
    if device_named(options.get("device", "auto")).type != "cpu":
        gpu = cuda.get_device_properties(cuda.current_device())
        found = preset_of(gpu.name, (gpu.major, gpu.minor), gpu.total_memory)
        reason = f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.1f} GB"
    _log.info("--preset %s: %s (%s)", OF_GPU, found or "the defaults", reason)
    return [each for name in names if (each := found if name == OF_GPU else name)]


def _check_pairs(settings: Mapping[str, Any], file: str = "") -> None:
    """Reject two settings of a file, or of the command line, that contradict each other."""
    for one, other, meaning in _PAIRS:
        if settings.get(one) is not None and settings.get(other) is not None:
            first, second = (other, one) if file else (flag_of(other), flag_of(one))
            raise ConfigError(f"{file}`{first}` and {second} both say {meaning}. Leave one out.")


def layered(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sources of settings. Later sources override earlier sources. A setting of a pair also
    removes the other setting."""
    found: dict[str, Any] = {}
    for source in sources:
        for one, other, _ in _PAIRS:
            if source.get(one) is not None or source.get(other) is not None:
                found = {name: found[name] for name in found if name not in (one, other)}
        found |= source
    return found


def _begun(given: dict[str, Any]) -> TrainConfig | None:
    """Return the saved settings of the run that continues: of its copy if that is ahead. Replace
    `auto` by whether there is a run."""
    is_auto, address = given.get("resume") == "auto", given.get("upload")
    if given.get("resume") and "run_dir" not in given:
        shown = " auto" if is_auto else ""
        raise ConfigError(f"`--resume`{shown} needs --run-dir: the folder of the run.")
    if not _resumes(given):
        return None
    run_dir = given["run_dir"]
    refuse_phases(run_dir)
    if is_auto or address:  # torch, as training needs it
        from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
        from tokenfeed.trainer.loop.uploads import is_ahead, settings_there

        if address and is_ahead(address, run_dir):
            given["resume"] = True
            return settings_there(address, run_dir)
        given["resume"] = not is_auto or Checkpoints.of_run(run_dir).latest() is not None
    return TrainConfig.of_run(run_dir) if given["resume"] else None


def _resumes(given: dict[str, Any]) -> bool:
    return given.get("resume", False) and "run_dir" in given


def _manifest(given: dict[str, Any]) -> Manifest | None:
    """Return the manifest of the data sets; None if they have no train split: the run then reports
    this. With --print-config, the data sets may also be unreadable.

    Raises:
        TokenfeedError: A data set cannot be read. This comes before torch is imported.
    """
    if "shards" not in given:
        if _resumes(given):
            folder = given["run_dir"]
            raise ConfigError(f"`--run-dir`: {folder} holds no run. Give the folder of one.")
        raise ConfigError("`--shards` is needed: the folder that `pretokenize` made.")
    with contextlib.suppress(*[TokenfeedError] if given.get("print_config") else []):
        manifest = read_manifest(given["shards"])
        return manifest if "train" in manifest.splits else None
    return None


def _with_auto_step(manifest: Manifest, given: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """Return the given settings, with a step that fills the GPU for documents without a size."""
    sizes = (*_STEPS, "micro_batch_tokens", "shard_model")
    if not on_gpu or any(given.get(name) for name in sizes) or data_defaults(manifest, given):
        return given
    return given | {"step_tokens": "auto"}


def _filling(name: str, manifest: Manifest, given: dict[str, Any], *, on_gpu: bool) -> Parsed:
    """Return the settings of a run whose step is to fill the GPU, at first with the largest step
    that suits the data. `name` is the setting that is auto."""
    if given.get("shard_model"):
        raise ConfigError(
            f"`{flag_of(name)}`=auto does not work with --shard-model. Give a number."
        )
    fixed = {k: v for k, v in given.items() if k != name}
    length = _chosen(manifest, fixed, on_gpu=on_gpu, quiet=True).sequence_length
    bound, micro = step_bound(manifest, given, length), given.get("micro_batch_tokens", "auto")
    if name == "step_tokens":
        bound *= length
        bound = max(1, bound // micro) * micro if isinstance(micro, int) else bound

    def with_step(step: int, micro_batch_tokens: object, *, quiet: bool = False) -> Command:
        sizes = {name: step, "micro_batch_tokens": micro_batch_tokens}
        return _chosen(manifest, fixed | sizes, on_gpu=on_gpu, quiet=quiet)

    command = with_step(bound, micro, quiet=True)

    def settle(config: TrainConfig, step: int, micro_batch_tokens: int) -> TrainConfig:
        found, before = _values(with_step(step, micro_batch_tokens)), _values(command)
        of_step = {k: v for k, v in found.items() if v != before[k] and k != "run_dir"}
        return dataclasses.replace(config, **of_step)

    left_open = dict.fromkeys(_OF_STEP) | {k: given[k] for k in _OF_STEP if k in given}
    return Parsed(
        command,
        settle,
        left_open | {name: "auto", "micro_batch_tokens": micro},
    )


def _scaled(
    command: Command, given: Mapping[str, Any], manifest: Manifest | None, *, quiet: bool = False
) -> dict[str, Any]:
    """Return the settings that --scale-learning-rate changes: a rate that is given follows the
    size of the step."""
    by, config = command.scale_learning_rate, command.settings()
    tokens, rows = command.reference_step_tokens, command.reference_step_rows
    reference = "reference_step_rows" if tokens is None else "reference_step_tokens"
    size = tokens or rows
    if by is None and size is None:
        return {}
    if by is None:
        raise ConfigError(f"`{flag_of(reference)}`={size}: needs --scale-learning-rate.")
    if size is None:
        raise ConfigError(
            f"`--scale-learning-rate`={by}: needs the size of the step that the rate is for. Give "
            "--reference-step-tokens or --reference-step-rows."
        )
    names = ("scale_learning_rate", "reference_step_tokens", "reference_step_rows")
    done: dict[str, Any] = dict.fromkeys(names)
    rate = given.get("learning_rate")
    if rate is None:
        _log.info(
            "--scale-learning-rate %s changes nothing: it is for a --learning-rate that you give",
            by,
        )
        return done
    of_rows = tokens is None
    if is_packed(config, manifest or read_manifest(config.shards)):
        step = config.step_slots // config.sequence_length if of_rows else config.step_slots
    elif of_rows == (config.step_rows is None):
        other = "tokens" if of_rows else "rows"
        raise ConfigError(
            f"`{flag_of(reference)}`={size}: the step is a number of {other}, and padded rows have "
            f"any length. Give --reference-step-{other}."
        )
    else:
        step = config.step_rows or config.step_tokens
    power = 0.5 if by == "sqrt" else 1.0
    if not quiet:
        _log.info("--learning-rate: %s", scaling(rate, step, size, power))
    return done | {"learning_rate": rate * (step / size) ** power}


def _chosen(
    manifest: Manifest | None, given: dict[str, Any], *, on_gpu: bool, quiet: bool = False
) -> Command:
    """Return the settings of a new run: the given settings, and defaults that suit the data and the
    device. Log the chosen defaults, unless `quiet`."""
    choices: list[Choice] = []
    presets = given.get("preset") or ""

    def command() -> Command:
        return Command(**layered(*(choice.settings for choice in choices), given))

    if manifest is not None:
        longest_input = _longest_input(manifest, given.get("model", ""))
        choices += data_defaults(manifest, given, longest_input)
        length = command().sequence_length
        choices += tuning_defaults(manifest, given | {"sequence_length": length})
    packed = manifest is None or is_packed(command(), manifest)
    if on_gpu and "micro_batch_tokens" not in given:
        choices += filter(None, [gpu_default(command(), packed=packed)])
    ranks = first_number("WORLD_SIZE")[1] or 1
    choices += size_defaults(command(), given, ranks, packed=packed)
    given = given | _scaled(command(), given, manifest, quiet=quiet)
    if manifest is not None:
        suited = command()
        suited.check()
        epochs = suited.epochs
        if not any(given.get(name) is not None for name in _BUDGETS):
            epochs = default_epochs(manifest, given, on_gpu=on_gpu)
        if epochs is not None or suited.tokens is not None:
            choices.append(_budget(suited, epochs, manifest, on_gpu=on_gpu))
            given = {k: value for k, value in given.items() if k not in ("epochs", "tokens")}
        for_gpu = on_gpu or "gpt2" in presets
        choices += schedule_defaults(manifest, command(), given, for_gpu=for_gpu)
    if on_gpu and packed and given.get("dropout") is None and _drops_attention(command().model):
        choices.append(Choice({"dropout": 0.0}, "packed rows on a GPU drop no attention weights"))
    found = command()
    if quiet:
        return found
    names = filter(None, presets.split(","))
    known = [Choice(read_preset(name, FILE_KINDS), f"preset {name}") for name in names]
    left_open = [choice.without(given) for choice in choices]
    for line in filter(None, (choice.line(found) for choice in [*known, *left_open])):
        _log.info("%s", line)
    return found


def _budget(command: Command, epochs: int | None, manifest: Manifest, *, on_gpu: bool) -> Choice:
    """Return the number of steps for `epochs`, or else for --tokens."""
    if epochs is not None:
        steps = steps_of_epochs(epochs, command, manifest, on_gpu=on_gpu)
        return Choice({"steps": steps}, count_of(epochs, "epoch"))
    assert command.tokens is not None
    share = command.tokens / manifest.split("train").tokens
    steps = steps_of_epochs(share, command, manifest, on_gpu=on_gpu)
    return Choice({"steps": steps}, f"{command.tokens:,} tokens, {share:.3g} epochs")


def _longest_input(manifest: Manifest, model: str) -> int | None:
    """Return the longest input of an hf: model, if the data set has contexts; else None."""
    if not model.startswith("hf:") or column_of(manifest.columns, "context") is None:
        return None
    from tokenfeed.trainer.models.hf_model import read_config  # transformers, seconds

    described = read_config(model)
    return described and getattr(described.get_text_config(), "max_position_embeddings", None)


def _drops_attention(model: str) -> bool:
    """Return whether an hf: model sets attention weights to 0 at random."""
    if not model.startswith("hf:"):
        return False
    from tokenfeed.trainer.models.hf_model import dropout_shares, read_config

    described = read_config(model)
    shares = dropout_shares(described) if described else {}
    return any(share for name, share in shares.items() if "att" in name)


def _values(config: TrainConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
