"""The state of the optimizer and of torch's random generators, for checkpoints.

The optimizer's state is stored by the names of the weights, because their order may change.
"""

import torch
from torch import nn

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint
from tokenfeed.trainer.distributed.world import State

_WEIGHTS = "params"


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """Return the moments by group and weight. Settings of groups come from the run's settings."""
    weights = dict(model.named_parameters())
    return {
        "weights": [
            {name: dict(optimizer.state.get(weights[name], {})) for name in group}
            for group in _names_by_group(optimizer, model)
        ],
    }


def make_moments(
    optimizer: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint
) -> None:
    """Create the optimizer's moments that a checkpoint has. Reading it overwrites their values. The
    settings of groups stay the optimizer's own.

    Raises:
        ResumeError: The checkpoint has moments of other weights.
    """
    names = _names_by_group(optimizer, model)
    groups = checkpoint.content.state["optimizer"]["weights"]
    if [set(group) for group in names] != [set(group) for group in groups]:
        raise ResumeError(
            "cannot resume: the checkpoint's optimizer has other weights than this run's. Use the "
            "same model, --trainable and phases, or start a new run in another --run-dir."
        )
    weights = dict(model.named_parameters())
    for name, values in (item for group in groups for item in group.items()):
        if values:
            optimizer.state[weights[name]] = {
                key: kind.empty(weights[name]) if (kind := checkpoint.kind(value)) else value
                for key, value in values.items()
            }


def keep_moments(optimizer: torch.optim.Optimizer, before: torch.optim.Optimizer) -> None:
    """Continue with another optimizer's moments of the weights that both have."""
    weights = [weight for group in optimizer.param_groups for weight in group[_WEIGHTS]]
    optimizer.state.update({w: before.state[w] for w in weights if w in before.state})


def _names_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    names = {weight: name for name, weight in model.named_parameters()}
    return [[names[weight] for weight in group[_WEIGHTS]] for group in optimizer.param_groups]


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's random generators: the host's, and the device's if it has its
    own."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = accelerator(device).module.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Continue with the random numbers after `random_state`. On another device, start anew."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type != "cpu" and device.type in state:
        accelerator(device).module.set_rng_state(state[device.type].cpu(), device)


def seed_random(key: int, device: torch.device) -> None:
    """Seed the random numbers from a key. Takes microseconds, and does not wait for the device."""
    torch.default_generator.manual_seed(key)  # `torch.manual_seed` takes a hundred of them
    if device.type != "cpu":
        accelerator(device).module.manual_seed(key)
