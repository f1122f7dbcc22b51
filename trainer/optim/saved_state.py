"""What a checkpoint keeps of a model, its optimizer and torch's random generators.

The optimizer's state is stored by the names of the weights, because their order may change.
"""

import torch
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.pipeline.feeding.devices import accelerator
from tokenfeed.trainer.checkpoints.checkpoint_format import Checkpoint, part_of, unshared
from tokenfeed.trainer.checkpoints.tensor_file import stored_form
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import State


def kept_state(model: nn.Module, config: TrainConfig) -> State:
    """Return the model's state without weights that are read again when a run resumes: frozen
    weights of an hf: model."""
    state = model.state_dict()
    if not config.reads_again:
        return state
    drawn = {f"model.{name}" for name in getattr(model, "fresh", ())}
    weights = model.named_parameters(remove_duplicate=False)
    again = {name for name, weight in weights if not weight.requires_grad} - drawn
    return {name: value for name, value in state.items() if name not in again}


def kept_weights(model: nn.Module, config: TrainConfig, checkpoint: Checkpoint) -> State:
    """Return the weights of `kept_state`, which a checkpoint overwrites.

    Raises:
        ResumeError: The checkpoint is of another model.
    """
    ours = kept_state(model, config)
    expected = {name: tuple(stored_form(each).shape) for name, each in unshared(ours).items()}
    found = {name: kind.shape for name, kind in part_of(checkpoint.tensors, "model.").items()}
    if expected != found:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise ResumeError(
            f"cannot resume: the checkpoint has other weights than this model: {name} is "
            f"{_shape(found.get(name))} there and {_shape(expected.get(name))} here. Give the "
            "--model, --lora and --lora-target that it was made with."
        )
    return ours


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


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
    for name, (dtype, shape) in part_of(checkpoint.tensors, "optimizer.").items():
        weight, _, key = name.rpartition(".")
        if weight not in weights:
            raise ResumeError(
                f"cannot resume: the checkpoint's optimizer trains {weight}, and this run does "
                "not. Use the same model, or start a new run in another --run-dir."
            )
        like = weights[weight]
        optimizer.state[like][key] = (
            torch.empty_like(like, dtype=dtype)  # with its layout and its shards
            if like.shape == shape
            else torch.empty(shape, dtype=dtype, device=like.device)
        )


def _weights_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of all groups by name."""
    trained = {weight for group in optimizer.param_groups for weight in group["params"]}
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
