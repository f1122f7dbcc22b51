"""DeepSpeed's `initialize` and the engine's methods that a training loop calls, for tests where
DeepSpeed is not installed. Signatures and meaning are those of DeepSpeed 0.19.8: `backward` adds up
gradients, and `step` updates the weights if the boundary is set."""

from pathlib import Path
from typing import Any

import torch


def initialize(
    model: torch.nn.Module, model_parameters: Any, config: dict[str, Any]
) -> tuple["Engine", None, None, None]:
    optimizer = torch.optim.SGD(model_parameters, **config["optimizer"]["params"])
    return Engine(model, optimizer, config["gradient_accumulation_steps"]), None, None, None


class Engine:
    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: int
    ) -> None:
        self.module, self.device = model, torch.device("cpu")
        self._optimizer, self._parts, self._is_boundary = optimizer, parts, True

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._is_boundary = is_boundary

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        (loss / self._parts if scale_wrt_gas else loss).backward()

    def step(self) -> None:
        if self._is_boundary:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def save_checkpoint(self, folder: str, client_state: dict[str, Any]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save([self.module.state_dict(), client_state], Path(folder) / "state.pt")

    def load_checkpoint(self, folder: str) -> tuple[str, dict[str, Any]]:
        weights, client_state = torch.load(Path(folder) / "state.pt", weights_only=False)
        self.module.load_state_dict(weights)
        return folder, client_state
