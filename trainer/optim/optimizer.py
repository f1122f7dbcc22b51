"""The optimizer of each weight, and the learning rate of each step.

AdamW updates everything, or Muon updates the matrices of hidden layers and AdamW the rest. Muon
makes the singular values of an update equal. This suits a matrix that maps one hidden state to
another. It does not suit embeddings, which are tables of rows, heads and routers, whose outputs
have meanings, or the factors of LoRA, whose product is the matrix.

A checkpoint does not save the learning rate, a pure function of the step. If a resumed run has a
higher --steps, its rates are those of a run that had these --steps from the start. For `constant`,
and for `wsd` before its decay, the rates of the steps already trained are the same too.
"""

import math
import re
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tokenfeed.trainer.config.run_config import OptimizerName, ScheduleName
from tokenfeed.trainer.optim.muon import MuonAdamW

_HEAD_NAMES = {"head", "heads", "lm_head", "classifier", "score", "cls", "qa_outputs"}
"""Names of heads in this package and in transformers."""
_LORA = re.compile(r"(^|\.)lora_")
_ROUTER = re.compile(r"router$|(^|_)gate$")
"""Names of routers. A gate with more outputs than inputs is a part of a feed-forward network."""
_FUSED = {"c_attn": 3, "Wqkv": 3, "qkv_proj": 3, "gate_up_proj": 2}
"""How many matrices a linear layer of transformers holds side by side, by its name."""
_END = 0.1
"""Last rate of `cosine` and `linear` as a share of the peak, unless another one is given."""
_WSD_DECAY = 0.2
"""Share of all steps in which `wsd` decays. A longer decay gains next to nothing."""


def make_optimizer(
    model: nn.Module,
    name: OptimizerName,
    weight_decay: float,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
    compiled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.optim.Optimizer:
    """Return an optimizer of the weights that are trainable now. `set_learning_rate` sets its rate.

    Only weights with two dimensions or more decay, so biases and gains of norms do not. A model
    without hidden matrices is trained by AdamW alone, also under the name muon. `dtype` is the half
    precision of Muon's products.
    """
    matrices = hidden_matrices(model) if name == "muon" else {}
    rest = [p for p in model.parameters() if p.requires_grad and p not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=betas, eps=epsilon, fused=True)
    if not matrices:
        return adamw
    parts = {weight: sections.of for weight, sections in matrices.items()}
    return MuonAdamW(parts, adamw, weight_decay, dtype, compiled)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a CUDA graph reads it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(
    step: int,
    *,
    schedule: ScheduleName,
    peak: float,
    steps: int,
    warmup_steps: int,
    least: float | None = None,
) -> float:
    """Return the learning rate of a step: linear warm-up to the peak, then the schedule.

    `cosine` and `linear` fall to the least rate, which the last step has. `wsd` (warm-up, stable,
    decay) stays at the peak until the last fifth of all steps. There it falls as 1 - √x, and would
    reach the least rate one step after the last. `constant` stays at the peak.

    Example: `wsd` with steps=100, warmup_steps=10: 0.1, 0.2, ... of the peak up to step 10, the
        peak up to step 80, then 1 - √(1/21) = 0.78 of it at step 81 and 1 - √(20/21) = 0.02 at step
        100.

    Args:
        step: The step, counted from 1.
        schedule: The schedule after the warm-up.
        peak: The largest rate.
        steps: The last step.
        warmup_steps: The step that reaches the peak; 0 starts at the peak.
        least: The rate to fall to. Default: a tenth of the peak; 0 for `wsd`.
    """
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    start, default = warmup_steps, _END
    if schedule == "wsd":
        start, default = max(warmup_steps, steps - math.ceil(_WSD_DECAY * steps)), 0.0
    if step <= start or schedule == "constant":
        return peak
    done, of = step - start, steps - start
    if schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done / of))
    elif schedule == "linear":
        left = 1 - done / of
    else:
        left = 1 - math.sqrt(done / (of + 1))
    end = default if least is None else least / peak
    return peak * (end + (1 - end) * left)


class Sections(NamedTuple):
    """The matrices that a weight holds side by side."""

    dim: int
    sizes: tuple[int, ...]

    def of(self, weight: Tensor) -> list[Tensor]:
        """Return views of the sections, each with at least as many rows as columns."""
        parts = torch.split(weight, list(self.sizes), self.dim)
        return [part if part.shape[0] >= part.shape[1] else part.mT for part in parts]


def hidden_matrices(model: nn.Module) -> dict[Tensor, Sections]:
    """Return the trainable weights of linear layers, and the matrices that each of them holds.

    Left out are routers, LoRA's factors, heads, and weights that an embedding shares. A layer is a
    head if its name is in `_HEAD_NAMES`, or if it is outside the `base_model` of a model of
    transformers. A bare parameter with two dimensions is left out: it may be a table of positions.
    """
    others = _of_embeddings_and_heads(model)
    found: dict[Tensor, Sections] = {}
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            weight = getattr(layer, "weight", None)
            # Conv1D is the linear layer of GPT-2 in transformers, which may not be installed.
            is_linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
            if not is_linear or not isinstance(weight, nn.Parameter):
                continue
            dim = 0 if isinstance(layer, nn.Linear) else 1
            is_router = _ROUTER.search(name) and weight.shape[dim] < weight.shape[1 - dim]
            is_left_out = is_router or _LORA.search(f"{path}.{name}") or id(weight) in others
            if weight.requires_grad and not is_left_out:
                found[weight] = Sections(dim, _sizes(parent, name, weight.shape[dim]))
    return found


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is a table of rows by id."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _sizes(parent: nn.Module, name: str, outputs: int) -> tuple[int, ...]:
    """Return the numbers of outputs of the matrices in a linear layer.

    A module may declare them: `fused = {"qkv": 3}` for three equal parts of its layer `qkv`.
    """
    parts = getattr(parent, "fused", _FUSED).get(name, 1)
    config = getattr(parent, "config", None)
    queries, keys = (
        getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value")
    )
    if name == "qkv_proj" and queries and keys:  # grouped queries
        width = outputs // (queries + 2 * keys)
        return queries * width, keys * width, keys * width
    return (outputs // parts,) * parts if outputs % parts == 0 else (outputs,)


def _of_embeddings_and_heads(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for path, module in model.named_modules():
        if is_embedding(module) or _HEAD_NAMES.intersection(path.split(".")):
            found |= _ids(module)
        if hasattr(module, "base_model_prefix"):  # of transformers; it may be its own base model
            found |= _ids(module) - _ids(cast(nn.Module, module.base_model))
    return found


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}
