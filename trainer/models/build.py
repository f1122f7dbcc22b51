"""The model of a run, from its name."""

import importlib

from torch import nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.batching import MOST_SHAPES
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.models.head import Head
from tokenfeed.trainer.models.transformer import SIZES, Transformer

__all__ = ["compile_model", "make_model"]

_MOST_GRAPHS = 4 * MOST_SHAPES
"""Of one block: for training and evaluation, packed or padded."""


def make_model(config: TrainConfig, head: Head) -> nn.Module:
    """A model with weights drawn from torch's random state, on the host.

    Args:
        config: Names it.
        head: What it has to give.

    Raises:
        ConfigError: There is no such model, or it cannot do what is asked.
    """
    if config.model in SIZES:
        return Transformer(SIZES[config.model], head, config.dropout)
    module, colon, factory = config.model.partition(":")
    if not colon:
        raise ConfigError(
            f"`--model`: expected {', '.join(SIZES)}, hf:FOLDER or MODULE:FACTORY, got "
            f"{config.model}."
        )
    return _own_model(module, factory, head)


def compile_model(model: nn.Module) -> None:
    """Have what repeats compiled when it is first used: once, for all layers; else the whole."""
    from torch._dynamo import config as limits  # over a second, which only --compile pays

    # Every shape is compiled twice: to train, and to evaluate. Beyond its limit the compiler would
    # give up without a word.
    limits.recompile_limit = max(_MOST_GRAPHS, limits.recompile_limit)
    blocks = getattr(model, "repeated_blocks", None)
    for part in blocks() if blocks else [model]:
        part.compile(dynamic=False)


def _own_model(module: str, factory: str, head: Head) -> nn.Module:
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`--model`={module}:{factory}: {error}. Expected a module that Python finds from "
            "here, and a function in it."
        ) from error
    model = make(head)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`--model`={module}:{factory}: gave {type(model).__name__}, no model.")
    return model
