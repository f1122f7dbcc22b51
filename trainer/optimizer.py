"""AdamW and its learning rate.

The learning rate is a pure function of the step: nothing to save, nothing to load, nothing that can
drift from the step count.
"""

import math

import torch
from torch import nn

from tokenfeed.trainer.config import TrainConfig

__all__ = ["learning_rate", "make_optimizer", "set_learning_rate"]

_BETAS = (0.9, 0.95)
_FINAL_FRACTION = 0.1


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW, fused into one kernel per group; only matrices decay, gains of norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=_BETAS, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak; `step` counts from 1."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    rest = max(1, config.steps - config.warmup_steps)
    progress = (step - config.warmup_steps) / rest
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (_FINAL_FRACTION + (1 - _FINAL_FRACTION) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
