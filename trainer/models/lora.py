"""LoRA by `peft`: train small matrices beside the frozen weights of a model.

Trained are these adapters, and the head of a task that the model was not made for. So a checkpoint
holds a few megabytes, and the moments of the optimizer as few.
"""

import warnings

import peft

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import ALL_LINEAR, TrainConfig
from tokenfeed.trainer.data.micro_batch import Head
from tokenfeed.trainer.models.hf_model import HubModel

_ALPHA_PER_RANK = 2
"""Adapters count twice, whatever their rank is: so it changes what they can learn, not how fast."""
_TASK_TYPES = {"vocabulary": None, "token": "TOKEN_CLS", "row": "SEQ_CLS"}
_HEADS = ("score", "classifier", "head", "pooler")
"""Modules of heads of classes and tags, and of what stands before them: trained whole."""


def add_adapters(model: HubModel, head: Head, config: TrainConfig) -> None:
    """Freeze a model, and add adapters to the layers of --lora-target.

    Rows of embeddings that were added for new tokens are trained too.

    Raises:
        ConfigError: It has no such layers.
    """
    assert config.lora is not None
    target, added = config.lora_target, model.added_rows
    settings = peft.LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha or _ALPHA_PER_RANK * config.lora,
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
