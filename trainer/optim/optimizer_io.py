"""The state of the optimizer and of torch's random generators, for checkpoints.

The optimizer's state is stored by the names of the weights, because their order may change.
"""

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint, part_of
from tokenfeed.trainer.distributed.world import State

_WEIGHTS = "params"


def moments_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """Return the moments, named NAME.MOMENT by the names of the weights. Settings of groups come
    from the run's settings."""
    return {
        f"{name}.{key}": value
        for name, weight in _weights_of(optimizer, model).items()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def make_moments(
    optimizer: torch.optim.Optimizer, model: nn.Module, checkpoint: Checkpoint
) -> None:
    """Create the optimizer's moments that a checkpoint has. Reading it overwrites their values. The
    settings of groups stay the optimizer's own.

    Raises:
        ResumeError: The checkpoint has moments of other weights.
    """
    weights = _weights_of(optimizer, model)
    for name, kind in part_of(checkpoint.content.tensors, "optimizer.").items():
        weight, _, key = name.rpartition(".")
        if weight not in weights:
            raise ResumeError(
                f"cannot resume: the checkpoint's optimizer trains {weight}, and this run does "
                "not. Use the same model, --trainable and phases, or start a new run in another "
                "--run-dir."
            )
        optimizer.state[weights[weight]][key] = kind.empty(weights[weight])


def keep_moments(optimizer: torch.optim.Optimizer, before: torch.optim.Optimizer) -> None:
    """Continue with another optimizer's moments of the weights that both have."""
    weights = [weight for group in optimizer.param_groups for weight in group[_WEIGHTS]]
    optimizer.state.update({w: before.state[w] for w in weights if w in before.state})


def _weights_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of all groups by name."""
    trained = {weight for group in optimizer.param_groups for weight in group[_WEIGHTS]}
    return {name: weight for name, weight in model.named_parameters() if weight in trained}


def random_state(device: torch.device) -> State:
    """Return the state of torch's random generators: the host's, and the device's if it has its
    own."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = accelerator(device).module.get_rng_state(device)
    return state


def set_random_state(state: State, device: torch.device) -> None:
    """Continue with the random numbers after `random_state`. On another device, start anew."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type != "cpu" and device.type in state:
        accelerator(device).module.set_rng_state(state[device.type].cpu(), device)


def seed_random(key: int, device: torch.device) -> None:
    """Seed the random numbers from a key. Takes microseconds, and does not wait for the device."""
    torch.default_generator.manual_seed(key)  # `torch.manual_seed` takes a hundred of them
    if device.type != "cpu":
        accelerator(device).module.manual_seed(key)
