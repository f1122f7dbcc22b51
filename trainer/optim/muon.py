"""Muon and AdamW as one optimizer that can leave a step out without a wait.

Fused AdamW skips a step on the device where the tensor `found_inf` says so; torch's Muon knows
nothing of it. So each matrix and its momentum are kept aside while Muon updates them, and put back
where the step does not count: copies of one matrix at a time, little next to the fifteen matrix
products that Muon makes of it.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MuonAdamW"]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some matrices, AdamW for what it was given; one state, one list of groups.

    The learning rate and the decay of AdamW fit Muon too: its updates are brought to the size that
    AdamW's have.

    Args:
        matrices: Muon's, each a group of its own, after AdamW's groups.
        adamw: Fused. It shares its state and its groups with this optimizer from now on.
        weight_decay: That of the matrices.
    """

    found_inf: Tensor | None = None
    """Set before `step`: where it is not 0, weights, moments and momentum stay as they are."""
    grad_scale: Tensor | None = None
    """Set before `step`: what gradients are divided by."""

    def __init__(
        self, matrices: list[nn.Parameter], adamw: torch.optim.AdamW, weight_decay: float
    ) -> None:
        self._adamw = adamw
        self._muons = [
            torch.optim.Muon([m], weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            for m in matrices
        ]
        groups = [group for part in (adamw, *self._muons) for group in part.param_groups]
        super().__init__(groups, {})
        self._share()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all weights from their gradients, or none."""
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        self._adamw.step()
        self._divide_gradients()
        for muon in self._muons:
            if self.found_inf is None:
                muon.step()  # type: ignore[no-untyped-call]
            else:
                _step_unless(self.found_inf.bool(), muon)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the moments and the momentum of `state_dict()`."""
        super().load_state_dict(state_dict)  # makes groups and state anew
        self._share()

    def _divide_gradients(self) -> None:
        """Those of the matrices: torch's Muon knows no `grad_scale`."""
        groups = (muon.param_groups[0]["params"][0].grad for muon in self._muons)
        gradients = [gradient for gradient in groups if gradient is not None]
        if gradients and self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)  # pyright: ignore[reportPrivateImportUsage]

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state."""
        split = len(self.param_groups) - len(self._muons)
        self._adamw.param_groups = self.param_groups[:split]
        for muon, group in zip(self._muons, self.param_groups[split:], strict=True):
            muon.param_groups = [group]
        for part in (self._adamw, *self._muons):
            part.state = self.state


def _step_unless(skip: Tensor, muon: torch.optim.Muon) -> None:
    """Step the optimizer of one matrix, and undo it on the device where `skip` is true."""
    (matrix,) = muon.param_groups[0]["params"]
    if matrix.grad is None:
        return
    matrix.grad.masked_fill_(skip, 0.0)  # momentum that begins now then begins with zeros
    kept = [(tensor, tensor.clone()) for tensor in (matrix, *muon.state[matrix].values())]
    muon.step()  # type: ignore[no-untyped-call]
    for tensor, before in kept:
        tensor.copy_(torch.where(skip, before, tensor))
