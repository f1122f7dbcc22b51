"""The settings of a training run, from the command line and config.yaml: one frozen dataclass.

Each field's docstring is its help text. `check` rejects settings that contradict each other, before
a run reads or writes any file.
"""

import dataclasses
import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from msgspec import Meta

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.text import is_address, public
from tokenfeed.trainer.config.values import (
    AboveZero,
    Bytes,
    NotNegative,
    Positive,
    Shards,
    Tokens,
    check_types,
    flag_of,
    read_settings,
)

MOST_SHAPES = 8
"""Shapes of batches that a compiled model is compiled for."""


Resume = bool | Literal["auto"]
RowRanges = Annotated[
    dict[str, tuple[tuple[int, int], ...]],
    Meta(description="ranges of rows by data set, like {out/: [[3, 5]]}"),
]
BatchingName = Literal["auto", "packed", "padded"]
OrderName = Literal["shuffled", "file"]
AttentionName = Literal["auto", "documents", "rows"]
OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]
PrecisionName = Literal["auto", "bf16", "fp16", "fp32"]
CompileMode = Literal["reduce-overhead", "max-autotune"]
TrackerName = Literal["wandb", "trackio", "tensorboard"]

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
CHECKPOINTS_FOLDER = "checkpoints"
ALL_LINEAR = "all-linear"
"""The --lora-target for every linear layer but the head."""
BY_NUMBERS = "qwen3"
"""The model that is described by `MODEL_NUMBERS`."""
MODEL_NUMBERS = ("layers", "width", "heads", "kv_heads")
OF_ONE_COMMAND = ("resume", "json", "export", "profile")
"""Settings that config.yaml of a run leaves out: they are for one command, not for the run."""

_ADDRESSES = ("shards", "to", "skip", "upload")
_LENGTHS = "a whole number of at least 2"
_NotBelow0 = Annotated[float, Meta(ge=0, title="X", description="a number of at least 0")]
_BelowOne = Annotated[
    float, Meta(ge=0, lt=1, title="X", description="a number of at least 0 and below 1")
]


def _shown(placeholder: str) -> Meta:
    """Metadata of a text: how the help shows its value."""
    return Meta(title=placeholder, description="text")


def _public(setting: Any) -> Any:
    if isinstance(setting, str):
        return public(setting)
    if isinstance(setting, tuple):
        return [public(address) for address in setting]
    return {public(address): weight for address, weight in setting.items()}


def _new_run_dir() -> Path:
    now = datetime.datetime.now(datetime.UTC)
    return Path("runs") / now.strftime("%Y-%m-%dT%H-%M-%SZ")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSettings:
    """A stage of the data of a run. See `tokenfeed.Stage`."""

    shards: Shards
    """Folders with their weights."""
    until_tokens: Tokens | None = None
    """Tokens of the run at which the stage ends. None for the last stage, which has no end."""
    sequence_length: Annotated[int, Meta(ge=2)] | None = None
    """Tokens of a row. None: the setting of the run, which is the largest."""
    targets: str | None = None
    """Tokens of conversations that the loss counts. None: the setting of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The settings of one training run."""

    shards: Shards
    """Output of `pretokenize`. Several folders are read as one, or by weights: a=0.7 b=0.3."""
    targets: Annotated[str, _shown("assistant|last|all|KINDS")] | None = None
    """Tokens of conversations that the loss counts. KINDS are kinds of tokens, like text,call.
    Default: assistant."""
    model: Annotated[str, _shown("NAME")] = "tiny"
    """words: embeddings of words and no layers, for rows with labels. shallow, tiny, mini, small,
    gpt2: Transformers with 0.4, 1, 11, 25 or 85 M parameters besides the embedding. qwen3: a new
    Qwen3 of the size that --layers, --width and --heads set. hf:ID, hf:FOLDER: a model of the
    library transformers. MODULE:FACTORY: your own."""
    layers: Positive | None = None
    """Layers of a new Qwen3. Implies --model qwen3. Default: 12."""
    width: Positive | None = None
    """Width of a new Qwen3. Implies --model qwen3. Default: 64 per layer."""
    heads: Positive | None = None
    """Attention heads of a new Qwen3. Implies --model qwen3. Default: width / 64."""
    kv_heads: Positive | None = None
    """Key and value heads of a new Qwen3. Implies --model qwen3. Default: as many as --heads."""
    dropout: _BelowOne | None = None
    """Dropout. With --lora, only in the adapters. Default: 0, or the config of an hf: model."""
    from_scratch: bool = False
    """Use only the config of an hf: model, and start from random weights."""
    lora: Positive | None = None
    """Train LoRA adapters of this rank, and freeze the weights of an hf: model."""
    lora_alpha: Positive | None = None
    """LoRA alpha: adapters are scaled by alpha / rank. Default: twice the rank."""
    lora_target: Annotated[str, _shown("NAMES")] = ALL_LINEAR
    """Layers that get adapters: all-linear, or names like q_proj,v_proj."""
    trainable: Annotated[str, _shown("PATTERNS")] | None = None
    """Train only parameters whose names match, like 'head.*,blocks.5.*'. With --lora: besides the
    adapters."""
    init_from: Path | None = None
    """Start from the weights of a run, a checkpoint, or an exported folder."""

    steps: Positive = 200
    """Optimizer steps, including those before a resume. Default: 200 for documents on a CPU, one
    epoch of them on a GPU, 3 to 10 epochs of other data."""

    mixing: tuple[StageSettings, ...] = ()
    """Only in a file: how the training data change, each stage with its shards, until_tokens,
    sequence_length and targets."""
    skip: RowRanges | None = None
    """Only in a file: rows that the loss ignores, as ranges by data set."""
    order: OrderName = "shuffled"
    """Order of the training rows. file: the order of the data set, for a curriculum."""
    sequence_length: Annotated[int, Meta(ge=2, title="N", description=_LENGTHS)] = 256
    """Tokens of a row. Longer rows are cut. A longer row with one label is rejected. Default: 256
    for documents; for other data the longest row, if the model takes it."""
    batching: BatchingName = "auto"
    """padded: one row per sequence; packed: several. auto: padded if rows or words have labels,
    else packed."""
    attention: AttentionName = "auto"
    """Attention in packed sequences. documents: only within documents; rows: across the sequence.
    auto: rows for lm, else documents."""
    balance_attention: bool = False
    """Packed rows on several ranks: deal the rows so that attention within documents takes all
    ranks the same time."""
    micro_batch_tokens: Positive | Literal["auto"] = 2048
    """Tokens of one forward and backward pass. auto: as many as fit in memory. Default on a GPU:
    auto, except with --shard-model, and for padded rows with --step-tokens. Default on a CPU:
    2048 for documents."""
    step_tokens: Positive = 2048
    """Tokens of one optimizer step, padding included."""
    step_rows: Positive | None = None
    """Rows of one optimizer step, instead of --step-tokens."""
    optimizer: OptimizerName = "adamw"
    """Optimizer. muon: Muon for matrices of hidden layers, AdamW for the rest."""
    learning_rate: AboveZero = 2e-3
    """Peak learning rate. Default: 2e-3 for new models of texts, 5e-5 for hf:, 2e-4 with LoRA."""
    schedule: ScheduleName = "cosine"
    """How the rate falls. cosine, linear: over the whole run; wsd: in the last fifth."""
    min_learning_rate: _NotBelow0 | None = None
    """Learning rate at the end. Default: a tenth of the peak; 0 for wsd."""
    warmup_steps: NotNegative = 20
    """Number of steps in which the learning rate rises. The last of them has the peak. Default: 20
    for documents on a CPU, 3.7 % of the steps on a GPU; 10 % for other data."""
    weight_decay: _NotBelow0 = 0.1
    """Weight decay of matrices."""
    beta1: _BelowOne = 0.9
    """Decay of AdamW's mean of gradients, per step."""
    beta2: _BelowOne = 0.95
    """Decay of AdamW's mean of squared gradients, per step."""
    epsilon: AboveZero = 1e-8
    """Added to the root of AdamW's mean of squared gradients."""
    clip_norm: AboveZero = 1.0
    """Largest norm of a step's gradient."""
    seed: NotNegative = 0
    """Seed of the initial weights and of the order of the data."""
    device: Annotated[str, _shown("NAME")] = "auto"
    """Where to train: cpu, cuda, or auto: cuda if available."""
    precision: PrecisionName = "auto"
    """Number format of the computation. fp16 scales the loss. auto: bf16 on GPUs of compute
    capability 8.0 and later, fp16 from 7.0 (V100, T4, RTX 20), fp32 on older GPUs and CPUs."""
    shard_model: bool = False
    """Under torchrun: divide weights and optimizer state among the ranks (FSDP2)."""
    recompute: bool = False
    """Compute the layers again in the backward pass, to save memory."""
    compile: bool | CompileMode = False
    """Compile the model with torch.compile: a slow start, then faster steps on cuda.
    reduce-overhead: with CUDA graphs, for small models. max-autotune: also try several kernels for
    each matrix product, which takes minutes longer."""
    num_workers: NotNegative | None = None
    """Loader processes. Default: 0 on cpu; on cuda the processors of this rank, at most 4."""
    prefetch: NotNegative | None = None
    """Batches in all that are ready on the device ahead of the step. Default: 2 on cuda, 0 on
    cpu."""
    cache_dir: Path | None = None
    """Folder that caches shards from a store. Default: $TOKENFEED_CACHE, or a temporary folder."""
    cache_bytes: Bytes | None = None
    """Size of the cache, like 50GB; 0: memory only. Default: 10 GB, at most 5 % of
    the free disk."""
    eval_every: Positive = 100
    """Steps between evaluations. Default: chosen so that evaluations take about 5 % of a run."""
    eval_tokens: Positive | None = None
    """Largest number of tokens of an evaluation, from --sequence-length on. Every evaluation reads
    the same tokens."""
    eval_micro_batch_tokens: Positive | Literal["auto"] = "auto"
    """Tokens of one forward pass of an evaluation. auto: twice --micro-batch-tokens."""
    samples: NotNegative = 0
    """Number of validation rows whose beginnings the model continues at each evaluation."""
    patience: NotNegative = 0
    """End the run after N evaluations without a better result. 0: never. For rows with labels,
    `train` sets 8 by itself."""
    save_every: Positive = 100
    """Steps between checkpoints. A step with the best evaluation so far is saved too, and a step
    after 15 minutes without a checkpoint."""
    keep: Positive = 2
    """Number of latest checkpoints to keep. The best one is always kept."""
    compress_checkpoints: bool = False
    """Compress checkpoints with zstd. Exports are not compressed."""
    upload: Annotated[str, _shown("PLACE")] | None = None
    """Folder or bucket, like s3://BUCKET/RUN, that gets a copy of checkpoints and report during the
    run. --resume auto continues from it if it is ahead."""
    log_every: Positive = 10
    """Steps between progress lines."""
    track: tuple[TrackerName, ...] = ()
    """Tracker that receives every record of metrics.jsonl. Can be given several times."""
    profile: Annotated[str, _shown("A:B")] | None = None
    """Trace the steps A to B with torch.profiler, into --run-dir."""
    phase: Annotated[str, _shown("N|NAME")] | None = None
    """Run only this phase of --config: its number, from 1, or its name."""
    run_dir: Path = field(default_factory=_new_run_dir)
    """Folder of the run. Default: a new one in runs/."""
    export: Path | None = None
    """Write the best weights, their config and tokenizer into this folder at the end."""
    resume: Resume = False
    """Continue the run in --run-dir with its settings. auto: start a new run if --run-dir has no
    checkpoint."""
    json: bool = False
    """Print the report as one line of JSON."""

    def check(self) -> None:
        """Raise a ConfigError for the first setting that cannot work."""
        check_types(self)
        if (self.min_learning_rate or 0.0) > self.learning_rate:
            raise ConfigError(
                f"`--min-learning-rate`={self.min_learning_rate}: expected at most "
                f"--learning-rate={self.learning_rate}."
            )
        if "://" in self.model or is_address(self.model.removeprefix("hf:")):
            raise ConfigError(  # config.yaml would keep the secrets of an address
                f"`--model`={public(self.model)}: is an address. Download it, and give the folder, "
                "or hf:ID for a model of the Hub."
            )
        self._check_numbers()
        first, last = self.profiled or (1, 1)
        if not 1 <= first <= last <= self.steps:
            raise ConfigError(
                f"`--profile`={self.profile}: expected steps A:B from 1 to --steps={self.steps}, "
                "like 20:23."
            )
        if self.step_rows is None and self.micro_batch_tokens != "auto":
            check_multiple(self, "step_tokens", "micro_batch_tokens")
        if self.mixing and self.mixing[-1].until_tokens:
            raise ConfigError(
                "`mixing`: the last stage goes on until the last step. Leave out its until_tokens."
            )
        lengths = [stage.sequence_length for stage in self.mixing if stage.sequence_length]
        if self.compile and self.compile is not True and self.shard_model:
            raise ConfigError(
                f"`--compile`={self.compile}: CUDA graphs need weights that stay in place, and "
                "--shard-model moves them. Use --compile without a mode."
            )
        if lengths and self.step_rows is not None:
            raise ConfigError(
                "`mixing`: a stage with sequence_length needs steps of a number of tokens. Give "
                "step_tokens instead of step_rows."
            )
        if max(lengths, default=0) > self.sequence_length:
            raise ConfigError(
                f"`mixing`: a stage has sequence_length {max(lengths)}, but the run has "
                f"{self.sequence_length}, which is the longest. Raise --sequence-length."
            )

    def _check_numbers(self) -> None:
        """Reject numbers of a model that contradict each other."""
        given = [name for name in MODEL_NUMBERS if getattr(self, name) is not None]
        if given and self.model != BY_NUMBERS:
            raise ConfigError(
                f"`{flag_of(given[0])}`: is for --model {BY_NUMBERS}, and --model is {self.model}. "
                "Leave one of the two out."
            )
        _, width, heads, kv_heads = self.model_numbers
        for name, number, part in (("width", width, 2 * heads), ("heads", heads, kv_heads)):
            if number % part:
                raise ConfigError(
                    f"`{flag_of(name)}`={number}: expected a multiple of {part}: a model has "
                    f"{heads} heads of an even width, and {kv_heads} of keys and values."
                )

    @property
    def model_numbers(self) -> tuple[int, int, int, int]:
        """Layers, width, heads, and heads of keys and values of a new Qwen3."""
        layers = self.layers or 12
        width = self.width or 64 * layers
        heads = self.heads or max(1, width // 64)
        return layers, width, heads, self.kv_heads or heads

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name, for YAML and JSON: without secrets in addresses, and without
        `step_tokens` if `step_rows` replaces it."""
        found: dict[str, Any] = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }
        mixing = [{k: v for k, v in part.items() if v is not None} for part in found["mixing"]]
        for settings in (found, *mixing):
            settings |= {k: _public(settings[k]) for k in _ADDRESSES if settings.get(k)}
        if self.step_rows is not None:
            del found["step_tokens"]
        return found | {"mixing": mixing}

    def changes(self, begun: "TrainConfig") -> list[str]:
        """Return one line for each setting that differs from those the run was started with."""
        before, now = begun.as_dict(), self.as_dict()
        return [
            f"{name} was {before.get(name)}, is {now.get(name)} from now on"
            for name in before | now
            if name not in OF_ONE_COMMAND and before.get(name) != now.get(name)
        ]

    def content(self) -> bytes:
        """Return the settings as the config.yaml of the run."""
        kept = {k: v for k, v in self.as_dict().items() if k not in OF_ONE_COMMAND}
        return yaml.safe_dump(kept, sort_keys=False).encode()

    def write(self) -> None:
        """Write config.yaml into the run's folder, atomically."""
        atomic_write(self.run_dir / CONFIG_FILE, self.content())

    @classmethod
    def of_run(cls, run_dir: Path) -> "TrainConfig | None":
        """Read the settings that a run was started with, and set `resume`; None if it has none."""
        path = run_dir / CONFIG_FILE
        if not path.is_file():
            return None
        try:
            values = read_settings(path, get_type_hints(cls, include_extras=True))
            return cls(**values | {"run_dir": run_dir, "resume": True})
        except (ConfigError, TypeError) as error:  # a TypeError: the file has no shards
            raise ConfigError(
                f"{error} {path} is not the config.yaml of a run: restore it, or delete it and "
                "give all settings."
            ) from error

    @property
    def is_hub(self) -> bool:
        """Whether the model is one of `transformers`."""
        return self.model.startswith("hf:") or self.model == BY_NUMBERS

    @property
    def reads_again(self) -> bool:
        """Whether a resumed run reads its frozen weights from the hf: model again. Otherwise the
        checkpoint has them."""
        return self.model.startswith("hf:") and self.lora is not None and self.init_from is None

    @property
    def all_shards(self) -> list[Shards]:
        """The shards of the run and of its mixing."""
        return [self.shards, *(stage.shards for stage in self.mixing)]

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step to trace; zeros if the setting names no steps."""
        if self.profile is None:
            return None
        found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", self.profile, re.ASCII)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, if the number is fixed: packed rows, or --step-rows."""
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
        """Token slots of a micro-batch, after `auto` was replaced by a number."""
        assert self.micro_batch_tokens != "auto"
        return self.micro_batch_tokens

    @property
    def for_evaluation(self) -> "TrainConfig":
        """These settings with the micro-batches of evaluations, which need no gradients. By
        default they are twice as large, if an evaluation has enough tokens."""
        tokens = self.eval_micro_batch_tokens
        if tokens == "auto":
            own = self.micro_batch_slots
            own = own if self.step_rows is None else self.rows * self.sequence_length
            is_short = self.eval_tokens is not None and self.eval_tokens < 2 * own
            tokens = own if is_short else 2 * own
        rows = None if self.step_rows is None else max(1, tokens // self.sequence_length)
        return dataclasses.replace(
            self, micro_batch_tokens=tokens, step_tokens=tokens, step_rows=rows
        )

    @property
    def step_slots(self) -> int:
        """Token slots of a step at most."""
        rows = self.step_rows
        return self.step_tokens if rows is None else rows * self.sequence_length


Settle = Callable[[TrainConfig, int, int], TrainConfig]
"""Returns the settings of a run with another size of the step and of its micro-batches."""


def alpha_of(lora: int | None, lora_alpha: int | None) -> int | None:
    """Return the LoRA alpha of --lora and --lora-alpha; None without adapters.

    By default, adapters count twice, whatever their rank is: so it changes what they can learn, not
    how fast.
    """
    return lora_alpha or (lora and 2 * lora)


def phase_folders(run_dir: Path) -> list[Path]:
    """Return the folder of each phase of a run, in order, from its config.yaml. Empty for a run
    without phases."""
    try:
        names = [
            phase["name"]
            for phase in yaml.safe_load((run_dir / CONFIG_FILE).read_bytes())["phases"]
        ]
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return []
    return [run_dir / f"phase-{number}-{name}" for number, name in enumerate(names, 1)]


def refuse_phases(run_dir: Path) -> None:
    """Reject the folder of a run with phases as the folder of a run without."""
    if phases := phase_folders(run_dir):
        raise ConfigError(
            f"`--run-dir`: {run_dir} holds a run with phases, {phases[0].name} and others. Go on "
            "with it by `train --resume` and this folder alone, or give another folder."
        )


def check_multiple(config: Any, name: str, divisor_name: str) -> None:
    """Reject a setting that is not a multiple of another one."""
    value, divisor = getattr(config, name), getattr(config, divisor_name)
    if value % divisor:
        near = max(1, round(value / divisor)) * divisor
        raise ConfigError(
            f"`{flag_of(name)}`: expected a multiple of {flag_of(divisor_name)}={divisor}, got "
            f"{value}. Try {near}."
        )
