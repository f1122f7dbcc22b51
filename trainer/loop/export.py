"""Export the best weights of a run to a folder, with config and tokenizer.

    model.safetensors      weights; LoRA adapters are merged into them
    tokenfeed.json         the model, its task, the step, and the metrics
    config.json            only for hf: models: `from_pretrained` of `transformers` loads them
    tokenizer.json         the tokenizer of the shards, and tokenizer_config.json for
                           `AutoTokenizer`

The folder is complete or absent: it is written under a temporary name and then renamed. The weights
come from a checkpoint, so a finished run can be exported at any time.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import nn

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE, Manifest
from tokenfeed.pipeline.format.storage import TEMPORARY_SUFFIX, file_xxh3, sync_folder
from tokenfeed.trainer.checkpoints.metadata import CheckpointMeta
from tokenfeed.trainer.checkpoints.retention import Checkpoints
from tokenfeed.trainer.config.phases import phase_at, phases_of
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import (
    first_of,
    read_manifest,
    read_tokenizer,
    shown,
    weights_of,
)
from tokenfeed.trainer.data.head import Head
from tokenfeed.trainer.models.build import make_model
from tokenfeed.trainer.models.transformer import SIZES, ModelSize, Transformer
from tokenfeed.trainer.models.weights import (
    EXPORT_FILE,
    base_of,
    check_exported,
    given_weights,
    kept_weights,
)
from tokenfeed.trainer.tasks.language_modeling import SpecialIds
from tokenfeed.trainer.tasks.registry import make_task

__all__ = ["Exported", "check_export", "export_run", "load_exported"]

_WEIGHTS = "model.safetensors"
_HUB = "hf:"
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The content of tokenfeed.json."""

    model: str
    """tiny, mini, ...; MODULE:FACTORY; or hf: for a model of `transformers`."""
    size: ModelSize | None
    """The size of a built-in model; None for other models."""
    head: Head
    task: str
    step: int
    """The step of the weights."""
    metrics: dict[str, float]
    """Metrics of the validation split at that step."""
    shards: str
    """Fingerprint of the data set."""
    weights: dict[str, str]
    """The xxh3-64 of each file of weights."""

    @classmethod
    def read(cls, folder: Path) -> "Exported":
        """Read tokenfeed.json in a folder.

        Raises:
            ConfigError: The file is missing or damaged.
        """
        try:
            # json first: msgspec rejects an infinite loss
            return msgspec.convert(json.loads((folder / EXPORT_FILE).read_bytes()), cls)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{folder}: not a folder written by `train --export` ({error}). Give such a folder."
            ) from error

    @property
    def is_hub(self) -> bool:
        """Whether `transformers` can load the folder too."""
        return self.model == _HUB


def check_export(config: TrainConfig) -> None:
    """Check --export before training.

    Raises:
        ConfigError: The folder exists, or will hold the run, or the tokenizer of the shards cannot
            be read.
    """
    folder = config.export
    if folder is None:
        return
    run = config.run_dir.resolve()
    if folder.resolve() in (run, *run.parents):
        raise ConfigError(f"`--export`: {folder} will hold the run. Give a folder of its own.")
    if folder.exists():
        raise ConfigError(f"`--export`: {folder} exists already. Give a new one, or delete it.")
    read_tokenizer(first_of(config.shards))  # fail now, not after the last step


def export_run(config: TrainConfig, folder: Path) -> None:
    """Write the best weights of a run, or the latest ones if the run was not evaluated.

    Raises:
        ConfigError: The folder exists, and holds something else.
        ResumeError: The run has no checkpoint, or it is damaged.
    """
    manifest = read_manifest(config.shards)
    task = make_task(config, manifest, _CPU)
    checkpoints = Checkpoints.of_run(config.run_dir)
    best, checkpoint = checkpoints.open_best()
    progress = checkpoint.meta
    _check_data(config, progress)
    about = Exported(
        model=_HUB if config.model.startswith(_HUB) else config.model,
        size=SIZES.get(config.model),
        head=task.head,
        task=task.name,
        step=progress.step,
        metrics=best.metrics if best else {},
        shards=manifest.fingerprint,
        weights={},
    )
    found = Exported.read(folder) if (folder / EXPORT_FILE).is_file() else None
    if found and dataclasses.replace(found, weights={}) == about:
        return  # schedulers may start a command twice
    check_export(config)
    torch.manual_seed(config.seed)
    config = dataclasses.replace(config, resume=True)
    model = make_model(config, task.head)
    given = given_weights(model, config)
    progress.check_base(config, base_of(model, given, config))
    checkpoint.read({"model": kept_weights(model, given, checkpoint)}, only="model")
    with _complete_or_absent(folder) as temporary:
        _write(temporary, model, about, _tokenizer_files(config, manifest, task.head))


def _check_data(config: TrainConfig, progress: CheckpointMeta) -> None:
    """Reject data sets other than the trained ones: the tokenizer and labels come from there."""
    shards = phase_at(phases_of(config), progress.step).config.shards
    found = {read_manifest(address).fingerprint for address in weights_of(shards)}
    if found != set(progress.loader["plan"]["data"]):
        raise ResumeError(
            f"`--export`: {shown(shards)} is not the data that step {progress.step} was trained "
            "on, by its fingerprint. Restore the data, whose tokenizer and labels are exported."
        )


def load_exported(folder: Path | str) -> nn.Module:
    """Return the model of an exported folder, on the CPU in evaluation mode.

    It takes a `MicroBatch` and returns logits.

    Raises:
        ConfigError: The folder was not written by `export_run`.
    """
    folder = Path(folder)
    about = Exported.read(folder)
    check_exported(folder)
    if about.is_hub:
        settings = TrainConfig(shards="", model=f"{_HUB}{folder}", sequence_length=2)
        return make_model(settings, about.head).eval()
    if about.size is not None:
        model: nn.Module = Transformer(about.size, about.head)
    else:
        model = make_model(TrainConfig(shards="", model=about.model), about.head)
    safetensors.torch.load_model(model, folder / _WEIGHTS)
    return model.eval()


def _write(folder: Path, model: nn.Module, about: Exported, texts: dict[str, bytes]) -> None:
    if about.is_hub:
        model.save(folder)  # type: ignore[operator]
    else:
        safetensors.torch.save_model(model, str(folder / _WEIGHTS))
    weights = {path.name: file_xxh3(path) for path in folder.glob("*.safetensors")}
    about = dataclasses.replace(about, weights=weights)
    texts = texts | {EXPORT_FILE: _json(dataclasses.asdict(about))}
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. Rename it to `folder` unless the block raises."""
    temporary = folder.with_name(folder.name + TEMPORARY_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def _tokenizer_files(config: TrainConfig, manifest: Manifest, head: Head) -> dict[str, bytes]:
    """Return tokenizer.json of the shards, and tokenizer_config.json for `AutoTokenizer`."""
    content = read_tokenizer(first_of(config.shards))
    tokenizer = Tokenizer.from_buffer(content)
    special = SpecialIds.from_shards(first_of(config.shards))
    ids = {"eos_token": manifest.tokenizer.end_id, "mask_token": special.mask}
    ids["pad_token"] = manifest.tokenizer.pad_id
    types = ["token_type_ids"] if head.pairs else []
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.sequence_length,
        "model_input_names": ["input_ids", *types, "attention_mask"],
    }
    about |= {name: tokenizer.id_to_token(id) for name, id in ids.items() if id is not None}
    return {TOKENIZER_FILE: content, "tokenizer_config.json": _json(about)}


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"
