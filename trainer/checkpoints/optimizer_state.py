"""An optimizer's state by the names of the weights, which stay when their order does not."""

from typing import Any

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.trainer.checkpoints.tree import State

__all__ = ["load_optimizer", "optimizer_state"]

_WEIGHTS = "params"


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """Settings of each group, and by group and weight what the optimizer keeps of it."""
    names = _names(model)
    return {
        "settings": [
            {key: value for key, value in group.items() if key != _WEIGHTS}
            for group in optimizer.param_groups
        ],
        "weights": [
            {names[weight]: dict(optimizer.state.get(weight, {})) for weight in group[_WEIGHTS]}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> None:
    """Go on with what `optimizer_state` gave; or with torch's own form, of former checkpoints.

    Raises:
        ResumeError: It is of other weights.
    """
    if "param_groups" not in state:
        state = _numbered(optimizer, model, state)
    optimizer.load_state_dict(state)


def _numbered(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> State:
    """The state as torch has it: weights have numbers, counted over all groups."""
    names = _names(model)
    weights = [weight for group in optimizer.param_groups for weight in group[_WEIGHTS]]
    numbers = {weight: number for number, weight in enumerate(weights)}
    ours = [[names[weight] for weight in group[_WEIGHTS]] for group in optimizer.param_groups]
    if [sorted(group) for group in ours] != [sorted(group) for group in state["weights"]]:
        raise ResumeError(
            "cannot resume: the checkpoint's optimizer has other weights than this run's. Use the "
            "same model, or start a new run in another --run-dir."
        )
    kept: dict[int, State] = {}
    groups: list[dict[str, Any]] = []
    for group, settings, of_weights in zip(
        optimizer.param_groups, state["settings"], state["weights"], strict=True
    ):
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        groups.append(settings | {_WEIGHTS: [numbers[weight] for weight in group[_WEIGHTS]]})
        for weight in group[_WEIGHTS]:
            values = of_weights[names[weight]]
            if values:
                kept[numbers[weight]] = {
                    key: _laid_out_like(weight, value) for key, value in values.items()
                }
    return {"state": kept, "param_groups": groups}


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {weight: name for name, weight in model.named_parameters()}


def _laid_out_like(weight: Tensor, value: Any) -> Any:
    """A moment in its weight's order of memory, which fused kernels insist on."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    return torch.empty_like(weight, dtype=value.dtype).copy_(value)
