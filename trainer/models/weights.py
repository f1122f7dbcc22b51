"""Weights of a model: which are trained, which a checkpoint keeps, and loading from earlier runs.

A run trains the weights whose names match a pattern; the others stay as they are. A checkpoint
keeps the weights that cannot be read again: weights that training changes, and weights that were
drawn or loaded from elsewhere. Untrained weights of `transformers` are loaded again by the model's
name.
"""

import contextlib
import difflib
import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError, ResumeError, TokenfeedError
from tokenfeed.pipeline.format.manifest import TOKENIZER_FILE
from tokenfeed.pipeline.format.storage import file_xxh3
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint
from tokenfeed.trainer.checkpoints.retention import Checkpoints
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import as_tokenizer, first_of, open_tokenizer
from tokenfeed.trainer.data.head import Head
from tokenfeed.trainer.models.starcoder2 import from_starcoder2, is_starcoder2
from tokenfeed.trainer.models.transformer import ModelSize

EXPORT_FILE = "tokenfeed.json"
_NEAREST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The content of tokenfeed.json in an exported folder; see `loop.export`."""

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
    def of(cls, folder: Path) -> "Exported | None":
        """Read a folder and verify its weights; None if another program wrote the folder.

        Raises:
            ConfigError: The weights or tokenfeed.json are damaged.
        """
        path = folder / EXPORT_FILE
        if not path.exists():
            return None
        try:
            # json first: msgspec rejects an infinite loss
            about = msgspec.convert(json.loads(path.read_bytes()), cls)
            damaged = [
                name for name, xxh3 in about.weights.items() if file_xxh3(folder / name) != xxh3
            ]
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is damaged ({error}). Export again.") from error
        if damaged:
            raise ConfigError(
                f"{folder / damaged[0]} is damaged: it fails its checksum. Export again."
            )
        return about


def trainable_names(model: nn.Module, pattern: str | None) -> frozenset[str]:
    """Return the names of the weights that match. If a weight has several names, return all of
    them.

    Args:
        model: Whose weights.
        pattern: A regular expression, searched for anywhere in a name; None takes what is trainable
            now.

    Raises:
        ConfigError: No name matches.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    if pattern is None:
        return frozenset(name for name, weight in weights.items() if weight.requires_grad)
    search = re.compile(pattern).search
    matching = {id(weight) for name, weight in weights.items() if search(name)}
    if not matching:
        near = difflib.get_close_matches(pattern, weights, n=_NEAREST, cutoff=0)
        raise ConfigError(
            f"`--trainable`={pattern}: no weight of the model has a name that matches. The nearest "
            f"are {', '.join(near)}."
        )
    return frozenset(name for name, weight in weights.items() if id(weight) in matching)


def train_only(model: nn.Module, names: Collection[str]) -> None:
    """Train the weights of these names, and freeze all others."""
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in names)


def count_parameters(model: nn.Module, names: Collection[str]) -> int:
    """Return the number of parameters in the weights of these names."""
    return sum(weight.numel() for name, weight in model.named_parameters() if name in names)


def product_weights(model: nn.Module) -> dict[str, int]:
    """Return the sizes of the weights in matrix products.

    The weight of an embedding is included only if the head shares it.
    """
    tables = [part for part in model.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    outside = {id(weight) for table in tables for weight in table.parameters()}
    outside.discard(id(getattr(model, "head_weight", None)))
    return {
        name: weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() >= 2 and id(weight) not in outside
    }


_log = logging.getLogger(__name__)

State = dict[str, Tensor]


def given_weights(model: nn.Module, config: TrainConfig) -> frozenset[str]:
    """The names of weights that come with the model of a run, and that it never trains: its
    checkpoints leave them out. To be asked of a model as it was made."""
    if not config.reads_again:
        return frozenset()
    trained = frozenset[str]().union(
        *(trainable_names(model, part.trainable) for part in config.phase_configs)
    )
    drawn = {f"model.{name}" for name in getattr(model, "fresh", ())}
    names = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(names.keys() - drawn - trained)


def kept_state(model: nn.Module, given: Collection[str]) -> State:
    """Return the model's state without the weights of these names."""
    return {name: value for name, value in model.state_dict().items() if name not in given}


def kept_weights(model: nn.Module, given: Collection[str], checkpoint: Checkpoint) -> State:
    """Return the weights of `kept_state`, which a checkpoint overwrites.

    Raises:
        ResumeError: The checkpoint is of another model.
    """
    ours = kept_state(model, given)
    kinds = {name: checkpoint.kind(of) for name, of in checkpoint.content.state["model"].items()}
    expected = {name: tuple(value.shape) for name, value in ours.items()}
    found = {name: kind.shape for name, kind in kinds.items() if kind}
    if expected != found:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise ResumeError(
            f"cannot resume: the checkpoint has other weights than this model: {name} is "
            f"{_shape(found.get(name))} there and {_shape(expected.get(name))} here. Give the "
            "--model, --lora, --lora-target and --trainable that it was made with."
        )
    return ours


@torch.no_grad()
def start_from(source: str, model: nn.Module) -> None:
    """Copy the weights of a run or an exported folder that match by name and shape. Log which
    weights stay random.

    Raises:
        ConfigError: The folder has no weights, or none that fit.
    """
    found = _read(source)
    fresh, ours = [], model.state_dict(keep_vars=True)
    taken: set[int] = set()
    for name, value in ours.items():
        theirs = found.get(name, found.get(name.removeprefix("model.")))
        if theirs is not None and theirs.shape == value.shape:
            value.data.copy_(theirs)
            taken.add(value.data_ptr())
    fresh = [name for name, value in ours.items() if value.data_ptr() not in taken]
    if not taken:
        raise ConfigError(
            f"`--init-from`={source}: has no weight that fits the model. Give the --model that it "
            "was made with; a run with --lora must be exported first."
        )
    _log.info("%s: starts fresh: %s", source, ", ".join(fresh) or "nothing")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


def _read(source: str) -> State:
    folder = Path(source)
    files = _files_in(folder)
    checkpoints = Checkpoints.of_run(folder)
    if not files and checkpoints.latest() is None:
        raise ConfigError(
            f"`--init-from`={source}: expected the folder of a run or of `train --export`, and "
            "found neither checkpoints nor *.safetensors."
        )
    if files:
        about = Exported.of(folder)
        found = {name: value for file in files for name, value in _load(file).items()}
        return from_starcoder2(found) if about and is_starcoder2(about.size, about.head) else found
    _, checkpoint = checkpoints.open_best()
    weights: State = checkpoint.read(only="model")["model"]
    return weights


def _files_in(folder: Path) -> list[Path]:
    """Return the weights of an exported folder."""
    return sorted(folder.glob("*.safetensors"))


def _load(file: Path) -> State:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:  # for a folder, OSError names no file
        raise ConfigError(
            f"`--init-from`: {file} is damaged ({error}). Export again, or copy it once more."
        ) from error


def warn_of_other_ids(config: TrainConfig) -> None:
    """Warn if ids of --init-from are other tokens in the shards: an embedding matches by its shape,
    even if it was trained with another tokenizer. Do nothing if that tokenizer cannot be found.

    Raises:
        ConfigError: The tokenizer of the shards cannot be read, or is another one by its checksum.
    """
    if config.init_from is None or config.resume:
        return
    shards, folder = first_of(config.shards), Path(config.init_from)
    ours = tokens_of(open_tokenizer(shards))
    with contextlib.suppress(TokenfeedError, OSError):
        begun = TrainConfig.of_run(folder)
        file = folder / TOKENIZER_FILE
        theirs = tokens_of(
            open_tokenizer(first_of(begun.shards))
            if begun
            else as_tokenizer(file.read_bytes(), file)
        )
        others = sum(ours.get(id, token) != token for id, token in theirs.items())
        if others:
            _log.warning(
                "`--init-from`=%s: its tokenizer is not that of %s: %s of %s ids are other tokens, "
                "and their rows of the embedding were trained for those tokens. Make shards with "
                "its tokenizer, by `pretokenize --tokenizer`",
                config.init_from,
                shards,
                f"{others:,}",
                f"{len(theirs):,}",
            )


def tokens_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens of a tokenizer by id."""
    return {id: token for token, id in tokenizer.get_vocab().items()}
