"""Models of `transformers`: from weights or from a config, wrapped to be called like ours.

The wrapper hands over ids, positions and what attention may reach, and no labels: the loss is the
task's. Of rows with one label it takes the token to be judged by itself, where `transformers`
guesses it from ids that look like padding.

With LoRA by `peft`, small matrices beside frozen weights are trained, and the head of a task that
the model was not made for. So a checkpoint holds a few megabytes, and the moments of the optimizer
as few.

Shapes: B rows, T slots, D width, C outputs.
"""

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from tokenfeed.pipeline.arithmetic import ceil_div, round_up
from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.trainer.config.run_config import ALL_LINEAR, BY_NUMBERS, TrainConfig, alpha_of
from tokenfeed.trainer.data.attention import Reach, Scope, product_dtype
from tokenfeed.trainer.data.datasets import first_of, open_tokenizer, shown
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models.hf_attention import ATTENTION_NAME, irreplaceable

_log = logging.getLogger(__name__)

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_MULTIPLE = 64
"""Multiple for matrix sizes, so that they fill the tiles of tensor cores."""
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
"""Files that come with the weights of a model, and that an exported model needs too."""
_PURPOSES = {
    "vocabulary": "CausalLM",
    "row": "SequenceClassification",
    "token": "TokenClassification",
}
"""The class of `transformers` for a kind of head."""
_TASK_TYPES = {"vocabulary": None, "token": "TOKEN_CLS", "row": "SEQ_CLS"}
_HEADS = ("score", "classifier", "head", "pooler")
"""Modules of heads of classes and tags, and of what stands before them: trained whole."""
_REFUSALS = (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError)
"""Errors that `transformers` raises for a folder without a model, or with one that does not fit."""


class HubModel(nn.Module):
    """A model of `transformers`, called with a micro-batch."""

    def __init__(self, model: Any, head: Head, fresh: frozenset[str] = frozenset()) -> None:
        """
        Args:
            model: Of `AutoModelFor...`, made with our attention.
            head: What its logits are of.
            fresh: Names of its parameters that no weights were found for.
        """
        super().__init__()
        self.model, self.fresh = model, fresh
        self._takes_last = head.kind == "row" and hasattr(model, "score")
        self._takes_types = head.pairs and getattr(model.config, "type_vocab_size", 1) > 1
        self._first_position = _first_position(model)
        self._parameters_of_call = inspect.signature(model.forward).parameters
        self.reaches: frozenset[Reach] = frozenset()
        """Reaches of its layers within a document. The forward pass makes a scope for each."""
        self.has_plain_head = False
        """Whether its logits were found to be `hidden @ head_weight.T`."""
        self.added_rows: dict[str, list[int]] = {}
        """Rows of embeddings that were added for new tokens, by the names of their modules."""
        self.saved_dtype = torch.float32
        """The dtype of the weights in their source, in which `save` writes them."""
        self.adapters: tuple[Any, ...] = ()
        """The model again, by `peft`, where it has adapters; no part of this module."""
        model.get_input_embeddings().register_forward_hook(_widen)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Logits: (B, T, V), (B, T, C), or (B, C) for a head of rows."""
        return self.logits(micro_batch, self._scopes(micro_batch))

    def logits(self, micro_batch: MicroBatch, scopes: Mapping[Reach, Scope]) -> Tensor:
        """Return the logits, given the scope of each reach."""
        inputs = self._inputs(micro_batch) | {"scopes": scopes}
        if not self._takes_last:
            logits: Tensor = self.model(**inputs).logits
            return logits
        assert micro_batch.is_token_BT is not None, "rows with one label are not packed"
        hidden_BTD = self.model.base_model(**inputs).last_hidden_state
        last_B11 = micro_batch.is_token_BT.sum(1)[:, None, None] - 1
        judged_BD = hidden_BTD.gather(1, last_B11.expand(-1, 1, hidden_BTD.shape[2])).squeeze(1)
        scores_BC: Tensor = self.model.score(judged_BD)
        return scores_BC

    @property
    def drops_attention(self) -> bool:
        """Whether the config has dropout of attention weights."""
        return any(dropout_shares(self.model.config).values())

    @property
    def attention_width(self) -> int:
        """The width that attends, summed over layers; 0 if the config does not say it."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        return int(config.num_hidden_layers * heads * width)

    @property
    def head_weight(self) -> Tensor | None:
        """The matrix of the head, (V, D); None if logits are more than `hidden @ head_weight.T`."""
        head = self.model.get_output_embeddings() if self.has_plain_head else None
        return head.weight if type(head) is nn.Linear else None

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """Return the input of the head, (B, T, D)."""
        inputs = self._inputs(micro_batch) | {"scopes": self._scopes(micro_batch)}
        hidden_BTD: Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden_BTD

    def new_cache(self) -> Any:
        """Return an empty cache of keys and values, to generate text; None if the model takes
        none."""
        if "past_key_values" not in self._parameters_of_call:
            return None
        return transformers.DynamicCache(config=self.model.config)

    def repeated_blocks(self) -> Iterable[nn.Module]:
        """Return the block that every layer uses, to be compiled once; empty if unknown."""
        names = set(self.model._no_split_modules or ())
        return [part for part in self.model.modules() if type(part).__name__ in names]

    def merge(self) -> None:
        """Merge the adapters into the weights, and train all weights."""
        for adapted in self.adapters:
            adapted.merge_and_unload()
        self.adapters = ()
        self.requires_grad_(True)

    def save(self, folder: Path) -> None:
        """Write what `from_pretrained` loads, with adapters merged into the weights, and the
        adapters alone into adapter/, for `peft`."""
        for adapted in self.adapters:
            adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
        self.merge()
        self.model.config.use_cache = True
        with _quiet():
            self.model.to(self.saved_dtype).save_pretrained(folder)

    def _scopes(self, micro_batch: MicroBatch) -> dict[Reach, Scope]:
        scope, ids_BT = micro_batch.scope, micro_batch.ids_BT
        return {reach: scope.narrowed(reach, ids_BT) for reach in self.reaches}

    def _inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        ids_BT = micro_batch.ids_BT
        positions_BT = micro_batch.positions_BT.expand_as(ids_BT) + self._first_position
        inputs: dict[str, Any] = {"input_ids": ids_BT, "position_ids": positions_BT}
        if micro_batch.is_token_BT is not None:
            inputs["attention_mask"] = micro_batch.is_token_BT  # some pool by it
        if micro_batch.cache is not None:
            inputs |= {"past_key_values": micro_batch.cache, "use_cache": True}
        if self._takes_types and "token_type_ids" in self._parameters_of_call:
            inputs["token_type_ids"] = micro_batch.token_types_BT
        return inputs


def _widen(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
    """Let layers be added in fp32 on a GPU with fp16, whose range a sum could leave, also if the
    weights are fp16. On a CPU, norms need the dtype of their weights."""
    is_narrow = embedded.device.type != "cpu" and product_dtype(embedded) == torch.float16
    return embedded.float() if is_narrow else embedded


def load_hub_model(config: TrainConfig, head: Head, dtype: torch.dtype) -> HubModel:
    """Return the model that `hf:` names. Missing weights are drawn from torch's random state.

    Args:
        config: Names it, and says whether its weights are wanted.
        head: What it has to give.
        dtype: Of its weights.

    Raises:
        ConfigError: The model is missing, or does not fit.
    """
    source = config.model.removeprefix("hf:")
    is_new = config.from_scratch or config.model == BY_NUMBERS
    with _quiet(), _one_line_for(config.model):
        described = _describe(source, config, head)
        saved_dtype = described.dtype or torch.float32
        auto = getattr(transformers, f"AutoModelFor{_PURPOSES[head.kind]}")
        # Adapters are beside the modules that the source lacks, so it is read again.
        if is_new or (config.resume and config.lora is None):
            model = auto.from_config(described, dtype=dtype, attn_implementation=ATTENTION_NAME)
            fresh: frozenset[str] = frozenset()
        else:
            model, fresh = _from_weights(auto, source, described, dtype)
            if fresh and config.init_from is None:
                _log.info("%s: starts fresh: %s", source, ", ".join(sorted(fresh)))
        added = _add_rows(model, config, head)
    _check_sizes(model, config, head)
    hub_model = HubModel(model, head, fresh)
    hub_model.saved_dtype, hub_model.added_rows = saved_dtype, added
    return hub_model


def companion_files(model: str) -> dict[str, bytes]:
    """Return the files that come with an hf: model besides its config and weights, by name:
    tokenizer, chat template and settings for generation."""
    source = model.removeprefix("hf:")
    found = {}
    for name in _COMPANIONS:
        with suppress(*_REFUSALS):  # there is no such file
            found[name] = Path(cached_file(source, name) or "").read_bytes()
    return found


def read_config(model: str) -> Any:
    """Return the config of an hf: model; None if it cannot be read, which the run reports."""
    source = model.removeprefix("hf:")
    with _quiet(), suppress(*_REFUSALS):
        return transformers.AutoConfig.from_pretrained(source, **_where(source))
    return None


def _describe(source: str, config: TrainConfig, head: Head) -> Any:
    """Return the config of the model, adapted to the task."""
    if config.model == BY_NUMBERS:
        described: Any = _qwen3(config, head)
    else:
        described = transformers.AutoConfig.from_pretrained(source, **_where(source))
    described.use_cache = False
    if head.kind != "vocabulary":
        described.num_labels = head.outputs
    if head.labels:
        described.id2label = dict(enumerate(head.labels))
        described.label2id = {name: number for number, name in enumerate(head.labels)}
    text_config = described.get_text_config()
    if getattr(text_config, "pad_token_id", None) is None:
        text_config.pad_token_id = head.pad_id
    if config.dropout is not None:
        share = config.dropout if config.lora is None else 0.0
        described.classifier_dropout = share  # where a config has none, heads of tags take 10 %
        for name in dropout_shares(described):
            setattr(described, name, share)
    if unknown := set(getattr(described, "layer_types", None) or ()) - _KNOWN_LAYERS:
        raise ConfigError(
            f"`--model`={config.model}: has layers of {', '.join(sorted(unknown))}, and `train` "
            f"knows {' and '.join(sorted(_KNOWN_LAYERS))}. Take another model."
        )
    return described


def _qwen3(config: TrainConfig, head: Head) -> Any:
    """Return the config of a Qwen3 with --layers, --width, --heads and --kv-heads."""
    layers, width, heads, kv_heads = config.model_numbers
    return transformers.Qwen3Config(
        vocab_size=round_up(head.vocabulary_size, _MULTIPLE),
        hidden_size=width,
        intermediate_size=round_up(ceil_div(8 * width, 3), _MULTIPLE),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=config.sequence_length,
        tie_word_embeddings=True,
        eos_token_id=head.end_id,
        pad_token_id=head.pad_id,
    )


def dropout_shares(described: Any) -> dict[str, float]:
    """Return the shares of dropout in a config, whatever the model calls them, without dropout of
    whole layers."""
    return {
        name: value
        for name, value in described.to_dict().items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        if "drop" in name and "layer" not in name
    }


def _from_weights(
    auto: Any, source: str, described: Any, dtype: torch.dtype
) -> tuple[Any, frozenset[str]]:
    """Return a model, and the names of its missing weights."""
    model, found = auto.from_pretrained(
        source,
        config=described,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # a head for other labels
        **_where(source),
    )
    fresh = {*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])}
    return model, frozenset(fresh)


def _where(source: str) -> dict[str, Any]:
    """Return options for loading: a folder causes no download, and no code from the Hub runs."""
    return {"local_files_only": Path(source).is_dir(), "trust_remote_code": False}


def _first_position(model: Any) -> int:
    """Return the position of a document's first token. Models like RoBERTa count from after the
    padding id."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return 0 if part.padding_idx is None else part.padding_idx + 1
    return 0


@torch.no_grad()
def _add_rows(model: Any, config: TrainConfig, head: Head) -> dict[str, list[int]]:
    """Add rows to the embeddings of a model for tokens that were added to its tokenizer.

    Each new row is the mean of the others. Does nothing if an id that the model lacks is no added
    token: then the shards were made with another tokenizer.

    Returns:
        The new rows by the name of the embedding.
    """
    known = model.get_input_embeddings().num_embeddings
    new = [*range(known, head.vocabulary_size)]
    if not new:
        return {}
    added: set[int] = set()
    with suppress(TokenfeedError):
        added |= set(open_tokenizer(first_of(config.shards)).get_added_tokens_decoder())
    if not added.issuperset(new):
        return {}
    model.resize_token_embeddings(head.vocabulary_size, mean_resizing=False)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {module.weight for module in embeddings if module is not None}
    for weight in weights:
        weight[known:] = weight[:known].float().mean(0).to(weight.dtype)
    _log.info("%s: %d tokens are new: %d to %d", config.model, len(new), new[0], new[-1])
    names = {name: module for name, module in model.named_modules() if module in embeddings}
    first = {module.weight: name for name, module in reversed(names.items())}  # tied ones once
    return dict.fromkeys(first.values(), new)


def _check_sizes(model: Any, config: TrainConfig, head: Head) -> None:
    ids = model.get_input_embeddings().num_embeddings
    if ids < head.vocabulary_size:
        raise ConfigError(
            f"`--model`={config.model}: knows {ids} ids, and {shown(config.shards)} needs "
            f"{head.vocabulary_size}. Run `pretokenize` with the tokenizer of this model."
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and longest - _first_position(model) < config.sequence_length:
        raise ConfigError(
            f"`--sequence-length`={config.sequence_length}: {config.model} reads at most "
            f"{longest - _first_position(model)} tokens. Give at most that, or another --model."
        )


@contextmanager
def _one_line_for(name: str) -> Iterator[None]:
    """Turn errors of `transformers` and safetensors into a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except _REFUSALS as error:
        if error.args == (ATTENTION_NAME,):  # not found in a table of its own
            raise irreplaceable(name) from error
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"`--model`={name}: transformers cannot make it for this task ({reason}). Expected a "
            "folder that `save_pretrained` wrote, or the name of one on the Hub."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and warnings of loading. Fresh weights are logged in one line."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def add_adapters(model: HubModel, head: Head, config: TrainConfig) -> None:
    """Freeze a model, and add adapters to the layers of --lora-target.

    Rows of embeddings that were added for new tokens are trained too.

    Raises:
        ConfigError: It has no such layers.
    """
    import peft

    alpha = alpha_of(config.lora, config.lora_alpha)
    assert config.lora is not None
    assert alpha is not None
    target, added = config.lora_target, model.added_rows
    settings = peft.LoraConfig(
        r=config.lora,
        lora_alpha=alpha,
        lora_dropout=config.dropout or 0.0,
        trainable_token_indices=added or None,
        target_modules=target if target == ALL_LINEAR else target.replace(" ", "").split(","),
        task_type=_TASK_TYPES[head.kind],
        modules_to_save=_trained_whole(model, head),
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # of its own calls, and what it sets itself
            adapted = peft.get_peft_model(model.model, settings)
    except ValueError as error:
        raise ConfigError(
            f"`--lora-target`={target}: {str(error).partition(chr(10))[0]} Expected {ALL_LINEAR}, "
            "or names of its layers with commas between."
        ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # the copy of a head in half precision
    model.adapters = (adapted,)


def _trained_whole(model: HubModel, head: Head) -> list[str] | None:
    """Return the modules of the head, and those without given weights."""
    names = [name for name, _ in model.model.named_modules()]
    heads = {name for name in names if name.rpartition(".")[2] in _HEADS}
    if head.kind == "vocabulary":
        heads = set()
    fresh = {name.rpartition(".")[0] for name in model.fresh}
    inside = tuple(f"{name}." for name in heads)
    return sorted(heads | {name for name in fresh if not f"{name}.".startswith(inside)}) or None
