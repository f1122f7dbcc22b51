"""Export the best weights of a run to a folder, with config and tokenizer.

    model.safetensors      weights; LoRA adapters are merged into them
    adapter/               the LoRA adapters alone, for `peft`
    tokenfeed.json         the model, its task, the step, and the metrics
    config.json            for hf: models and built-in decoders: `from_pretrained` of `transformers`
                           loads them
    tokenizer.json         the tokenizer, and tokenizer_config.json for `AutoTokenizer`
    chat_template.jinja    for conversations: the template of the shards

The tokenizer files and generation settings of an hf: model are copied, if the shards were made with
its tokenizer, and so is its chat template unless the shards have one. Its weights keep their dtype.

A built-in decoder is a Starcoder2 without biases. Both have pre-norm blocks with LayerNorm, rotary
positions, a feed-forward network of four times the width with tanh-approximated GELU, and a head
tied to the embedding. `transformers` has Q, K and V apart, and biases in its norms, which are zero
here.

The folder is complete or absent: it is written under a temporary name and then renamed. The weights
come from a checkpoint, so a finished run can be exported at any time.
"""

import contextlib
import dataclasses
import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Manifest
from tokenfeed.pipeline.format.storage import atomic_folder
from tokenfeed.trainer.checkpoints.checkpoint_files import Best, Checkpoints
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import (
    as_tokenizer,
    first_of,
    open_tokenizer,
    read_chat_template,
    read_manifest,
    read_tokenizer,
)
from tokenfeed.trainer.data.micro_batch import Head
from tokenfeed.trainer.distributed.world import State
from tokenfeed.trainer.models.build import make_model
from tokenfeed.trainer.models.gpt import ROTARY_BASE, SIZES, ModelSize, Transformer
from tokenfeed.trainer.models.words import make_built_in
from tokenfeed.trainer.optim.train_state import read_weights
from tokenfeed.trainer.tasks.registry import make_task

_WEIGHTS, _ABOUT = "model.safetensors", "tokenfeed.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_HUB = "hf:"
_CPU = torch.device("cpu")

_INSIDE = {
    "attention_norm": "input_layernorm",
    "attention_out": "self_attn.o_proj",
    "feed_norm": "post_attention_layernorm",
    "feed_in": "mlp.c_fc",
    "feed_out": "mlp.c_proj",
}
"""Modules of a block by their names in `transformers`, all but Q, K and V."""
_QKV = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The content of tokenfeed.json in an exported folder."""

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
    tokenizer: str = ""
    """Checksum of the tokenizer.json of the data set."""

    @property
    def has_hub_names(self) -> bool:
        """Whether the weights have their names in `transformers`."""
        return self.model == _HUB or _is_starcoder2(self.size, self.head)

    @classmethod
    def of(cls, folder: Path) -> "Exported | None":
        """Read a folder; None if another program wrote it.

        Raises:
            ConfigError: tokenfeed.json is damaged.
        """
        path = folder / _ABOUT
        if not path.exists():
            return None
        try:
            # json first: msgspec rejects an infinite loss
            return msgspec.convert(json.loads(path.read_bytes()), cls)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is damaged ({error}). Export again.") from error


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
    meta = Checkpoints.of_run(config.run_dir).latest_meta() if config.resume else None
    is_exported = meta is not None and meta.step >= config.steps and Exported.of(folder)
    if folder.exists() and not is_exported:
        raise ConfigError(f"`--export`: {folder} exists already. Give a new one, or delete it.")
    above = next(each for each in folder.absolute().parents if each.exists())
    if not above.is_dir():
        raise ConfigError(f"`--export`: {folder}: {above} is not a folder. Give another one.")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"`--export`: {folder}: {above} cannot be written. Give another folder.")
    read_tokenizer(first_of(config.shards))  # fail now, not after the last step


def export_run(config: TrainConfig, folder: Path, best: Best | None) -> None:
    """Write the best weights of a run.

    Args:
        config: The settings of the run.
        folder: Where to write.
        best: The best step; None for the latest one of a run that was not evaluated.

    Raises:
        ResumeError: The run has no checkpoint, or it is damaged.
        OSError: The folder cannot be written.
    """
    manifest = read_manifest(config.shards)
    task = make_task(config, manifest, _CPU)
    checkpoint = Checkpoints.of_run(config.run_dir).open(best.step if best else None)
    about = Exported(
        model=_HUB if config.is_hub else config.model,
        size=SIZES.get(config.model),
        head=task.head,
        task=task.name,
        step=checkpoint.meta.step,
        metrics=best.metrics if best else {},
        shards=manifest.fingerprint,
        tokenizer=manifest.tokenizer.xxh3,
    )
    torch.manual_seed(config.seed)
    config = dataclasses.replace(config, resume=True)
    model = make_model(config, task.head)
    read_weights(model, config, checkpoint)
    try:
        with atomic_folder(folder) as temporary:
            _write_weights(temporary, model, about, config)
            files = _tokenizer_files(config, manifest, task.head)
            texts = _with_template(config, files) | {_ABOUT: _json(dataclasses.asdict(about))}
            for name, content in texts.items():
                (temporary / name).write_bytes(content)
            mode = (temporary / _ABOUT).stat().st_mode
            for path in temporary.glob("*.safetensors"):
                path.chmod(mode)  # safetensors makes files that only their owner may read
    except (SafetensorError, OSError) as error:  # such as a full disk
        again = f"`train --run-dir {config.run_dir} --resume --export {folder}` exports it again"
        why = getattr(error, "strerror", None) or error
        raise OSError(errno.EIO, f"{why}. After fixing this, {again}", str(folder)) from error


def load_exported(folder: Path | str) -> nn.Module:
    """Return the model of an exported folder, on the CPU in evaluation mode.

    It takes a `MicroBatch` and returns logits.

    Raises:
        ConfigError: The folder was not written by `export_run` of this version.
    """
    folder = Path(folder)
    about = Exported.of(folder)
    if about is None:
        raise ConfigError(
            f"{folder}: not a folder written by `train --export`. Give such a folder."
        )
    if about.model == _HUB:
        settings = TrainConfig(shards="", model=f"{_HUB}{folder}", sequence_length=2)
        return make_model(settings, about.head).eval()
    if about.size is not None:
        model: nn.Module = make_built_in(about.size, about.head)
    else:
        model = make_model(TrainConfig(shards="", model=about.model), about.head)
    try:
        if about.has_hub_names:
            live, found = hub_names_of(model, about.head), load_file(folder / _WEIGHTS)
            if live.keys() != found.keys():
                raise RuntimeError(f"expected {len(live)} weights, got {len(found)}")
            for name, weight in live.items():
                weight.copy_(found[name])
        else:
            safetensors.torch.load_model(model, folder / _WEIGHTS)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{folder / _WEIGHTS}: the weights do not fit {about.model} ({reason}). Train and "
            "export again, or load it with the version of tokenfeed that exported it."
        ) from error
    return model.eval()


def _write_weights(folder: Path, model: nn.Module, about: Exported, config: TrainConfig) -> None:
    """Write the weights, and config.json if `transformers` has such a model."""
    if about.model == _HUB:
        model.save(folder)  # type: ignore[operator]
    elif isinstance(model, Transformer) and about.size and _is_starcoder2(about.size, about.head):
        described = _starcoder2_config(model, about.size, about.head, config.sequence_length)
        (folder / "config.json").write_bytes(_json(described))
        weights, metadata = _to_starcoder2(model), {"format": "pt"}
        safetensors.torch.save_file(weights, folder / _WEIGHTS, metadata)
    else:
        safetensors.torch.save_model(model, str(folder / _WEIGHTS))


def _tokenizer_files(config: TrainConfig, manifest: Manifest, head: Head) -> dict[str, bytes]:
    """Return the files of the model's own tokenizer, if its ids mean the same in the shards. If
    not, return tokenizer.json of the shards, and tokenizer_config.json for `AutoTokenizer`."""
    content = read_tokenizer(first_of(config.shards))
    own: dict[str, bytes] = {}
    if config.model.startswith(_HUB):
        from tokenfeed.trainer.models.hf_model import companion_files

        own = companion_files(config.model)
    tokenizer = open_tokenizer(first_of(config.shards))
    ours, theirs = tokens_of(tokenizer), dict[int, str]()
    with contextlib.suppress(ConfigError):  # a tokenizer that cannot be decoded is not copied
        theirs = tokens_of(as_tokenizer(own.get(TOKENIZER_FILE, b""), config.model))
    if theirs and all(theirs.get(id, token) == token for id, token in ours.items()):
        is_same = ours.keys() <= theirs.keys() and _rules(content) == _rules(own[TOKENIZER_FILE])
        return own if is_same else own | {TOKENIZER_FILE: content}
    ids = {"eos_token": manifest.tokenizer.end_id, "pad_token": manifest.tokenizer.pad_id}
    types = ["token_type_ids"] if head.pairs else []
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.sequence_length,
        "model_input_names": ["input_ids", *types, "attention_mask"],
    }
    about |= {name: tokenizer.id_to_token(id) for name, id in ids.items() if id is not None}
    generation = {name: own[name] for name in ("generation_config.json",) if name in own}
    return {TOKENIZER_FILE: content, _TOKENIZER_CONFIG: _json(about), **generation}


def _rules(content: bytes) -> list[Any]:
    """Return the parts of a tokenizer.json that divide a text into tokens."""
    decoded = json.loads(content)
    return [decoded.get("normalizer"), decoded.get("pre_tokenizer"), decoded["model"].get("merges")]


def _with_template(config: TrainConfig, files: dict[str, bytes]) -> dict[str, bytes]:
    """Replace the chat template of a tokenizer by the template of the shards, if they have one."""
    template = read_chat_template(first_of(config.shards))
    if template is None:
        return files
    about = json.loads(files.get(_TOKENIZER_CONFIG, b"{}"))
    about = about if isinstance(about, dict) else {}
    about.pop("chat_template", None)  # older versions of transformers prefer it to the file
    return files | {CHAT_TEMPLATE_FILE: template, _TOKENIZER_CONFIG: _json(about)}


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def tokens_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens of a tokenizer by id."""
    return {id: token for token, id in tokenizer.get_vocab().items()}


def _is_starcoder2(size: ModelSize | None, head: Head) -> bool:
    """Return whether a built-in model of this size and head is a Starcoder2."""
    return size is not None and not size.by_word and head.causal


def _starcoder2_config(
    model: Transformer, size: ModelSize, head: Head, length: int
) -> dict[str, Any]:
    """Return config.json of a model that was trained on rows of `length` tokens."""
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "vocab_size": model.embedding.num_embeddings,
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": length,
        "norm_epsilon": model.norm.eps,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "use_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": head.end_id,
        "pad_token_id": head.pad_id,
    }


def _to_starcoder2(model: Transformer) -> State:
    """Return the weights by their names in `transformers`."""
    found: State = {
        "model.embed_tokens.weight": model.embedding.weight,
        **_norm("model.norm", model.norm),
    }
    for number, block in enumerate(model.blocks):
        prefix = f"model.layers.{number}."
        whole = block.get_submodule("attention_in").get_parameter("weight")
        parts = zip(_QKV, whole.chunk(3), strict=True)
        found |= {prefix + name: part.contiguous() for name, part in parts}
        for ours, theirs in _INSIDE.items():
            found |= _norm(prefix + theirs, block.get_submodule(ours))
    return {name: value.detach() for name, value in found.items()}


def hub_names_of(model: nn.Module, head: Head) -> State:
    """Return the weights of a live model by their names in an export of this head: those in
    `transformers`, where it has the model. They share the memory of the model."""
    if isinstance(model, Transformer) and head.causal:
        heads = model.state_dict().items()  # of another task than the export's
        own = {k: v for k, v in heads if k.partition(".")[0] not in ("embedding", "blocks", "norm")}
        return _to_starcoder2(model) | own
    if hasattr(model, "adapters"):  # a model of transformers in its wrapper
        model = model.get_submodule("model")
    return model.state_dict()


def _norm(name: str, module: nn.Module) -> State:
    """Return the weight of a module, with a bias of zeros if the module is a norm."""
    weight = module.get_parameter("weight")
    bias = {f"{name}.bias": torch.zeros_like(weight)} if weight.dim() == 1 else {}
    return {f"{name}.weight": weight, **bias}
