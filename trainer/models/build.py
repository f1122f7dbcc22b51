"""Build the model of a run from its name."""

import contextlib
import dataclasses
import difflib
import fnmatch
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import (
    ALL_LINEAR,
    BY_NUMBERS,
    MOST_SHAPES,
    TrainConfig,
)
from tokenfeed.trainer.config.values import flag_of
from tokenfeed.trainer.data.datasets import first_of
from tokenfeed.trainer.data.micro_batch import Head
from tokenfeed.trainer.models.gpt import SIZES
from tokenfeed.trainer.models.words import Words, make_built_in
from tokenfeed.trainer.tasks.language_modeling import has_hidden

_MOST_GRAPHS = 12 * MOST_SHAPES
"""Compiled variants of a block: for training and evaluation, packed or padded, before and behind
the first trained weight."""

CHOICES: dict[str, object] = {
    "max_pointwise_cat_inputs": 0,
    "max_complex_pointwise_cat_inputs": 0,
    "online_softmax": False,
}
"""Settings of the compiler. `cat` writes each part in place. On a GPU, the compiler would join few
parts by one kernel, which computes every part for each element. A softmax takes its maximum before
its sum, with one exponential per logit: when it finds both at once, it takes two, and a vocabulary
keeps a GPU busier with them than with its bytes."""

_TRAINED_COPY = ".modules_to_save.default."
"""Where `peft` holds a module that it trains as a whole."""


Begin = Callable[[nn.Module, Head, TrainConfig], None]
"""A function that overwrites the weights of a new model with those of `init_from`."""


def make_model(
    config: TrainConfig,
    head: Head,
    dtype: torch.dtype = torch.float32,
    begin: Begin = lambda *_: None,
) -> nn.Module:
    """Return a model on the host. Weights that are not given are drawn from torch's random state.

    Args:
        config: Names it. With `resume` no weights are read where a checkpoint has them all.
        head: What it has to give.
        dtype: Of weights that are never trained: those beside adapters.
        begin: Reads the weights of `init_from`, and may add adapters.

    Raises:
        ConfigError: There is no such model, or it cannot do what is asked.
    """
    _check_adapters(config)
    model = _hub_model(config, head, dtype) if config.is_hub else _named_model(config, head)
    is_empty = any(weight.is_meta for weight in model.parameters())  # it gets those of rank 0
    if config.init_from is not None and not config.resume and not is_empty:
        begin(model, head, config)
    if config.lora is not None and not getattr(model, "adapters", ()):
        add_adapters(model, head, config)
    choose_trainable(model, config)
    return model


def check_model(config: TrainConfig, head: Head) -> None:
    """Check that a model has the layers and weights that the settings name, without reading its
    weights. A model of one's own is made for this.

    Raises:
        ConfigError: There is no such model, or it lacks what is named.
    """
    _check_adapters(config)
    is_own = not config.is_hub and config.model not in SIZES
    with contextlib.nullcontext() if is_own else torch.device("meta"):
        if config.is_hub:
            with _needs_extra(f"`--model`={config.model}", "hub"):
                from tokenfeed.trainer.models import hf_attention, hf_model  # noqa: F401
            bare = dataclasses.replace(config, resume=True, lora=None)
            model: nn.Module = hf_model.load_hub_model(bare, head, torch.float32)
        else:
            model = _named_model(config, head)
        if config.lora is not None:
            add_adapters(model, head, config)
        if config.recompute:
            recompute_layers(model)
        choose_trainable(model, config)


def add_adapters(model: nn.Module, head: Head, config: TrainConfig) -> None:
    """Freeze an hf: model and add the adapters of --lora.

    Raises:
        ConfigError: `peft` is missing, or the model lacks the layers of --lora-target.
    """
    with _needs_extra(f"`--lora`={config.lora}", "lora"):
        from tokenfeed.trainer.models import hf_model

        hf_model.add_adapters(model, head, config)  # type: ignore[arg-type]


def choose_trainable(model: nn.Module, config: TrainConfig) -> None:
    """Freeze all weights that --trainable does not match, besides adapters.

    Raises:
        ConfigError: A pattern matches no weight.
    """
    if config.trainable is None:
        return
    named = weights_by_name(model)
    matching: set[nn.Parameter] = set()
    for pattern in config.trainable.replace(" ", "").split(","):
        found = fnmatch.filter(named, pattern)
        if not found:
            close = difflib.get_close_matches(pattern.strip("*."), named, n=3, cutoff=0.0)
            raise ConfigError(
                f"`--trainable`: no parameter of {config.model} matches {pattern!r}. The closest "
                f"names are {', '.join(close)}."
            )
        matching.update(named[name] for name in found)
    adapts = config.lora is not None
    for weight in model.parameters():
        if adapts and weight in matching:  # weights beside adapters may be in half precision
            weight.data = weight.data.float()
        weight.requires_grad_(weight in matching or (adapts and weight.requires_grad))


def weights_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that --trainable matches: for models of transformers,
    their names there, whether or not the model has adapters."""
    wrapper = "model." if hasattr(model, "adapters") else ""
    return {
        name.removeprefix(wrapper).replace(".base_layer.", ".").replace(_TRAINED_COPY, "."): weight
        for name, weight in model.named_parameters(remove_duplicate=False)
        if ".original_module." not in name
    }


def compile_model(model: nn.Module, mode: str | None = None) -> None:
    """Compile a model in place when it is first used: a block once for all layers, and the parts
    around the blocks. A model without blocks is compiled as a whole. `mode` is torch.compile's."""
    from torch._dynamo import config as limits  # over a second, which only --compile pays
    from torch._inductor import config as choices

    # Every shape is compiled twice: to train, and to evaluate. Beyond either limit the compiler
    # would give up without a word.
    limits.recompile_limit = max(_MOST_GRAPHS, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(_MOST_GRAPHS, limits.accumulated_recompile_limit)
    for name, value in CHOICES.items():
        if hasattr(choices, name):  # not in every version of torch
            setattr(choices, name, value)
    blocks: set[nn.Module] = set(getattr(model, "repeated_blocks", tuple)())
    if blocks:
        _compile_parts(model, blocks, mode)
        return
    model.compile(dynamic=False, mode=mode)
    if has_hidden(model):
        model.__dict__["hidden"] = torch.compile(cast(Any, model).hidden, dynamic=False, mode=mode)


def _compile_parts(module: nn.Module, blocks: set[nn.Module], mode: str | None) -> None:
    """Compile the blocks below a module, and the largest parts without a block. Layers of torch are
    one kernel each, which a compiler does not improve."""
    for part in module.children():
        is_layer = type(part).__module__.startswith("torch.nn.")
        if part in blocks or not (is_layer or blocks.intersection(part.modules())):
            part.compile(dynamic=False, mode=mode)
        else:
            _compile_parts(part, blocks, mode)


@contextlib.contextmanager
def outside_graphs(model: nn.Module, *, has_graphs: bool) -> Iterator[None]:
    """Move gradients that a CUDA graph allocates out of its memory, which the next replay
    overwrites. Later micro-batches of the step then add to the copies."""
    weights = [each for each in model.parameters() if each.grad is None] if has_graphs else []
    yield
    for weight in weights:
        if weight.grad is not None:
            weight.grad = weight.grad.clone()


def recompute_layers(model: nn.Module) -> None:
    """Make the layers of a model keep only what enters them, and compute everything else again in
    the backward pass.

    Gradients are the same, with dropout as well: what is computed again draws the same numbers.
    Names of parameters do not change. Call this before the model is compiled.

    Raises:
        ConfigError: The model does not tell its layers.
    """
    blocks = list(getattr(model, "repeated_blocks", tuple)())
    if not blocks:
        raise ConfigError(
            f"`--recompute`: {type(model).__name__} has no `repeated_blocks()`, or none are known. "
            "Add that method, or leave --recompute out."
        )
    for block in blocks:
        block.forward = _again(block.forward)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    # A function, not a partial: the compiler looks into it.
    def compute(*values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*values, **named)
        return checkpoint(forward, *values, use_reentrant=False, **named)

    return compute


def _check_adapters(config: TrainConfig) -> None:
    if not config.is_hub and (config.lora is not None or config.from_scratch):
        option = "--from-scratch" if config.lora is None else "--lora"
        raise ConfigError(f"`{option}`: is for hf: models, and --model is {config.model}.")
    if config.lora is None and (config.lora_alpha or config.lora_target != ALL_LINEAR):
        name = "lora_alpha" if config.lora_alpha else "lora_target"
        raise ConfigError(
            f"`{flag_of(name)}`={getattr(config, name)}: without --lora all weights are trained. "
            "Add --lora and a rank, or leave it out."
        )


def _named_model(config: TrainConfig, head: Head) -> nn.Module:
    if config.model in SIZES:
        built_in = make_built_in(SIZES[config.model], head, config.dropout or 0.0)
        if isinstance(built_in, Words):
            built_in.describe_tokens(first_of(config.shards))
        return built_in
    module, colon, factory = config.model.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"`--model`: expected {', '.join(SIZES)}, {BY_NUMBERS}, hf:FOLDER or MODULE:FACTORY, "
            f"got {config.model}."
        )
    return _own_model(module, factory, head)


def _own_model(module: str, factory: str, head: Head) -> nn.Module:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # behind all that is installed
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`--model`={module}:{factory}: {error}. Expected a module that Python finds from "
            "here or on PYTHONPATH, and a function in it."
        ) from error
    model = make(head) if callable(make) else make
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`--model`={module}:{factory}: gave {type(model).__name__}, no model.")
    return model


def _hub_model(config: TrainConfig, head: Head, dtype: torch.dtype) -> nn.Module:
    if config.lora is not None and (config.from_scratch or config.model == BY_NUMBERS):
        option = "--from-scratch" if config.from_scratch else f"--model {BY_NUMBERS}"
        raise ConfigError(
            f"`--lora`: adapters beside weights that {option} draws learn little. Leave one of the "
            "two out."
        )
    with _needs_extra(f"`--model`={config.model}", "hub"):
        from tokenfeed.trainer.models import hf_attention, hf_model
    model = hf_model.load_hub_model(config, head, dtype if config.lora else torch.float32)
    hf_attention.try_out(model, head, config.model)
    return model


@contextlib.contextmanager
def _needs_extra(option: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{option}: {error}. Run `pip install tokenfeed[{extra}]`.") from error
