"""The state of the optimizer and of torch's random generators, for checkpoints.

The optimizer's state is stored by the names of the weights, because their order may change.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.distributed.fsdp import distribute_like
from tokenfeed.trainer.distributed.world import State

__all__ = [
    "keep_moments",
    "load_optimizer",
    "optimizer_state",
    "random_state",
    "seed_random",
    "set_random_state",
]

_WEIGHTS = "params"


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """The moments by group and weight; the settings of groups come from the run's own settings."""
    weights = dict(model.named_parameters())
    return {
        "weights": [
            {name: dict(optimizer.state.get(weights[name], {})) for name in group}
            for group in _names_by_group(optimizer, model)
        ],
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> None:
    """Go on with what `optimizer_state` gave.

    Raises:
        ResumeError: It is of other weights.
    """
    optimizer.load_state_dict(_as_torch_has_it(optimizer, model, state))


def keep_moments(optimizer: torch.optim.Optimizer, before: torch.optim.Optimizer) -> None:
    """Go on with what another optimizer keeps of the weights that both have."""
    weights = [weight for group in optimizer.param_groups for weight in group[_WEIGHTS]]
    optimizer.state.update({w: before.state[w] for w in weights if w in before.state})


def _names_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names = {weight: name for name, weight in model.named_parameters()}
    return [[names[weight] for weight in group[_WEIGHTS]] for group in optimizer.param_groups]


def _as_torch_has_it(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> State:
    """Convert the state to torch's form, with names for weights and the optimizer's own settings:
    a resumed run may have another weight decay than the run that saved."""
    names = _names_by_group(optimizer, model)
    if [set(group) for group in names] != [set(group) for group in state["weights"]]:
        raise ResumeError(
            "cannot resume: the checkpoint's optimizer has other weights than this run's. Use the "
            "same model, --trainable and phases, or start a new run in another --run-dir."
        )
    weights = dict(model.named_parameters())
    return {
        "state": {
            name: {key: _laid_out_like(weights[name], value) for key, value in values.items()}
            for group in state["weights"]
            for name, values in group.items()
            if values
        },
        "param_groups": [
            settings | {_WEIGHTS: group}
            for settings, group in zip(optimizer.param_groups, names, strict=True)
        ],
    }


def _laid_out_like(weight: Tensor, value: Any) -> Any:
    """A moment in its weight's order of memory, which fused kernels insist on."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    return distribute_like(weight, value)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's random generators: the host's, and the device's where it has its own."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = accelerator(device).module.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Go on with random numbers where `random_state` was taken; on another device, start anew."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type != "cpu" and device.type in state:
        accelerator(device).module.set_rng_state(state[device.type].cpu(), device)


def seed_random(key: int, device: torch.device) -> None:
    """Begin anew with random numbers that follow from a key; some microseconds, and no wait."""
    torch.default_generator.manual_seed(key)  # `torch.manual_seed` takes a hundred of them
    if device.type != "cpu":
        accelerator(device).module.manual_seed(key)
