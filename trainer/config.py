"""Everything a run is told, in one frozen dataclass: the command line and config.yaml.

The field order is the help's order, and each field's docstring is its help text. What contradicts
itself is refused by `check`, before any file is read or written.
"""

import dataclasses
import datetime
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import yaml

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.remote.address import public
from tokenfeed.trainer.setting_checks import (
    bounds,
    check_pattern,
    keeps,
    require,
    require_multiple,
    traced_steps,
)
from tokenfeed.trainer.settings import Bytes, read_settings

__all__ = [
    "ALL_LINEAR",
    "CHECKPOINTS_FOLDER",
    "CONFIG_FILE",
    "METRICS_FILE",
    "OF_ONE_COMMAND",
    "PAGE_FILE",
    "REPORT_FILE",
    "AttentionName",
    "BatchingName",
    "ObjectiveName",
    "OptimizerName",
    "PhaseSettings",
    "Positive",
    "PrecisionName",
    "RecomputeName",
    "Resume",
    "ScheduleName",
    "Shards",
    "TrackerName",
    "TrainConfig",
]

Resume = bool | Literal["auto"]
ObjectiveName = Literal["auto", "masked"]
BatchingName = Literal["auto", "packed", "padded"]
AttentionName = Literal["auto", "documents", "rows"]
OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
RecomputeName = Literal["none", "selective", "full"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
CHECKPOINTS_FOLDER = "checkpoints"
ALL_LINEAR = "all-linear"
"""A --lora-target: every linear layer but the head."""
OF_ONE_COMMAND = ("resume", "json", "export")
"""Settings that config.yaml of a run leaves out: they were for the command that began it."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
Shards = str | dict[str, AboveZero]
"""The folder of a data set, or several with their weights."""


_ADDRESSES = ("shards", "upload")


def _public(setting: Shards) -> Shards:
    if isinstance(setting, str):
        return public(setting)
    return {public(address): weight for address, weight in setting.items()}


def _new_run_dir() -> Path:
    now = datetime.datetime.now(datetime.UTC)
    return Path("runs") / now.strftime("%Y-%m-%dT%H-%M-%SZ")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSettings:
    """What a phase says of itself; all else is as the run says."""

    steps: Positive
    """Of this phase alone."""
    trainable: str | None = None
    learning_rate: AboveZero | None = None
    schedule: ScheduleName | None = None
    """From the phase's first step to its last, as is its warm-up."""
    warmup_steps: NotNegative | None = None
    shards: Shards | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The settings of one training run."""

    shards: Shards
    """Output folder of `pretokenize`; or several with their weights, like a=0.7 b=0.3."""
    objective: ObjectiveName = "auto"
    """auto: what the shards are for; masked: fill gaps in documents."""
    model: str = "tiny"
    """words (regardless of case), shallow, tiny, mini, small, gpt2 (0, 0.4, 1, 11, 25, 85 M
    parameters + embedding); hf:FOLDER or hf:ID, of transformers; MODULE:FACTORY, of your own."""
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    """Share of values set to 0; by default none in built-in models, and what an hf: model's config
    says."""
    from_scratch: bool = False
    """Of an hf: model take the config only, and draw weights anew."""
    lora: Positive | None = None
    """Train adapters of this rank, and leave an hf: model's weights as they are."""
    lora_target: str = ALL_LINEAR
    """Layers that get adapters: all-linear, or names like q_proj,v_proj."""
    trainable: str | None = None
    """Train the weights whose names this regular expression finds; the others stay as they are."""
    init_from: str | None = None
    """A run, or an exported folder, to take weights from; what does not fit starts fresh."""
    steps: Positive = 200
    """Optimizer steps, earlier ones included."""
    phases: tuple[PhaseSettings, ...] = ()
    """In a file: parts of the steps, each with what it trains, its rate and its shards."""
    sequence_length: Annotated[int, msgspec.Meta(ge=2)] = 256
    """Tokens of a row; longer ones are cut, or refused where a row has one label."""
    batching: BatchingName = "auto"
    """auto: padded where rows or words have labels, else packed."""
    attention: AttentionName = "auto"
    """Of packed rows: within documents, or over the row; auto: rows for lm, else documents."""
    micro_batch_tokens: Positive | Literal["auto"] = 2048
    """Tokens of one forward and backward; auto: as many as fit, found by trying."""
    step_tokens: Positive = 2048
    """Tokens of one optimizer step, padding included."""
    step_rows: Positive | None = None
    """Rows of one optimizer step, instead of tokens."""
    optimizer: OptimizerName = "adamw"
    """muon: for matrices of hidden layers; AdamW for the rest."""
    learning_rate: AboveZero = 2e-3
    """Peak of the schedule."""
    learning_rate_reference_tokens: Positive | None = None
    """Step tokens that --learning-rate is for; scaled to yours by the square root."""
    schedule: ScheduleName = "cosine"
    """How the learning rate falls: cosine and linear to a tenth; wsd in the last fifth."""
    warmup_steps: NotNegative = 20
    """Steps until the learning rate's peak."""
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    """On matrices only."""
    clip_norm: AboveZero = 1.0
    """Largest norm of a step's gradient."""
    seed: NotNegative = 0
    """Decides initial weights and order."""
    device: str = "auto"
    """cpu, cuda; auto: cuda where there is one."""
    precision: PrecisionName = "auto"
    """auto: bf16 or fp16 on cuda, fp32 on cpu."""
    shard_model: bool = False
    """Under torchrun: each rank keeps a share of weights and moments (FSDP2); else all."""
    recompute: RecomputeName = "none"
    """What layers compute again in the backward pass to save memory: what is cheap, or all."""
    compile: bool = False
    """Slow start, then faster; for cuda."""
    num_workers: NotNegative | None = None
    """Loader processes; by default cuda 2, cpu 0."""
    cache_dir: Path | None = None
    """Folder for what comes from a store; by default $TOKENFEED_CACHE or a temporary one."""
    cache_bytes: Bytes | None = None
    """Its bound, like 50GB; by default 10 GB or 5 % of the free disk; 0: memory alone."""
    eval_every: Positive = 100
    """Steps between validation losses."""
    eval_tokens: Positive | None = None
    """Most tokens of an evaluation, the same ones each time; `train` chooses eval_every and
    eval_tokens so that evaluations take about 5 % of a run."""
    save_every: Positive = 100
    """Steps between checkpoints."""
    keep: Positive = 2
    """Latest checkpoints that are kept, besides the best that was evaluated."""
    log_every: Positive = 10
    """Steps between progress lines."""
    track: tuple[TrackerName, ...] = ()
    """Services that are told what metrics.jsonl is told; several are welcome."""
    profile: str | None = None
    """Steps A:B to trace, into profile/trace.json of the run, for perfetto.dev."""
    run_dir: Path = field(default_factory=_new_run_dir)
    """Folder of the run."""
    export: Path | None = None
    """Folder to make at the end: the best weights, their config and tokenizer."""
    upload: str | None = None
    """URL where the run is copied to meanwhile: s3://..., file://..., all that fsspec knows."""
    resume: Resume = False
    """Go on from --run-dir, with its settings; auto: if there is a run, in it or at --upload."""
    json: bool = False
    """Print the report as one line of JSON."""

    def check(self) -> None:
        """Raise a ConfigError for the first setting that cannot work."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if limits := bounds(hint):
                require(self, name, *keeps(getattr(self, name), limits))
            if isinstance(value := getattr(self, name), int):
                require(self, name, value < 1 << 63, "below 2**63")
        require(self, "learning_rate", math.isfinite(self.learning_rate), "a finite number")
        check_pattern(self.trainable)
        if self.step_rows is None and self.micro_batch_tokens != "auto":
            require_multiple(self, "step_tokens", "micro_batch_tokens")
        _ = self.profiled_steps  # raises where they are none
        if self.phases:
            total = sum(phase.steps for phase in self.phases)
            require(self, "steps", self.steps == total, f"the {total} steps of all phases, or none")
            for stage in self.stages:
                stage.check()

    def check_packed(self) -> None:
        """The same for settings that matter where rows are packed."""
        require_multiple(self, "micro_batch_tokens", "sequence_length")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name, as YAML and JSON hold them: without secrets in addresses,
        and without `step_tokens` where `step_rows` replaces it."""
        found: dict[str, Any] = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }
        phases = [{k: v for k, v in phase.items() if v is not None} for phase in found["phases"]]
        for settings in (found, *phases):
            settings |= {k: _public(settings[k]) for k in _ADDRESSES if settings.get(k)}
        if self.step_rows is not None:
            del found["step_tokens"]
        return found | {"phases": phases}

    def changes(self, begun: "TrainConfig") -> list[str]:
        """One line for each setting that differs from those that a run was begun with."""
        before, now = begun.as_dict(), self.as_dict()
        return [
            f"{name} was {before.get(name)}, is {now.get(name)} from now on"
            for name in before | now
            if name not in OF_ONE_COMMAND and before.get(name) != now.get(name)
        ]

    def write(self) -> None:
        """Write config.yaml into the run's folder, atomically."""
        kept = {k: v for k, v in self.as_dict().items() if k not in OF_ONE_COMMAND}
        content = yaml.safe_dump(kept, sort_keys=False)
        atomic_write(self.run_dir / CONFIG_FILE, content.encode())

    @classmethod
    def of_run(cls, run_dir: Path) -> "TrainConfig | None":
        """The settings that a run was begun with, set to resume it; None if it left none."""
        path = run_dir / CONFIG_FILE
        if not path.is_file():
            return None
        try:
            values = read_settings(path, get_type_hints(cls, include_extras=True))
            return cls(**values | {"run_dir": run_dir, "resume": True})
        except (ConfigError, TypeError) as error:  # a TypeError: it says nothing of the shards
            raise ConfigError(
                f"{error} {path} is not the config.yaml of a run: restore it, or delete it and "
                "give all settings."
            ) from error

    @property
    def profiled_steps(self) -> range:
        """The steps to trace."""
        return traced_steps(self.profile) if self.profile else range(0)

    @property
    def reads_again(self) -> bool:
        """Whether weights that are never trained are those of the model's name, and are read from
        there again where a run goes on; else a checkpoint has them too."""
        is_given = self.model.startswith("hf:") and not self.from_scratch
        return is_given and (self.lora is not None or self.chooses)

    @property
    def chooses(self) -> bool:
        """Whether patterns say what is trained."""
        return any(stage.trainable is not None for stage in self.stages)

    @property
    def stages(self) -> "tuple[TrainConfig, ...]":
        """The settings of each phase, and its steps alone; a run without phases is one."""
        return tuple(self._of_phase(phase) for phase in self.phases) or (self,)

    def _of_phase(self, phase: PhaseSettings) -> "TrainConfig":
        said = {f.name: getattr(phase, f.name) for f in dataclasses.fields(phase)}
        given = {name: value for name, value in said.items() if value is not None}
        return dataclasses.replace(self, **given, phases=())

    @property
    def rows(self) -> int:
        """Rows of a micro-batch that has a fixed number of them: packed, or by --step-rows."""
        fitting = max(1, self.micro_batch_slots // self.sequence_length)
        if self.step_rows is None:
            return fitting
        return max(rows for rows in range(1, fitting + 1) if self.step_rows % rows == 0)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        if self.step_rows is not None:
            return self.step_rows // self.rows
        return self.step_tokens // self.micro_batch_slots

    @property
    def micro_batch_slots(self) -> int:
        """Token slots of a micro-batch, once `auto` is decided."""
        assert self.micro_batch_tokens != "auto"
        return self.micro_batch_tokens

    @property
    def step_slots(self) -> int:
        """About the token slots of a step."""
        return self.accumulation * self.micro_batch_slots
