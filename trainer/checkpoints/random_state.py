"""Where torch's random generators stand."""

import torch

from tokenfeed.pipeline.feeding.devices import accelerator

__all__ = ["random_state", "seed_random", "set_random_state"]


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
