"""Where work begins on a CPU: with the first forward pass of a trained module after a step.

On a CPU the host does the work itself, so time shows nothing about what it was used for. What lies
between the end of a step and the first forward pass is `other`, unless it is in a bracket.
"""

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenfeed.trainer.stall.meter import StallMeter


class ForwardWatch:
    """Calls a meter at the first forward pass of a trained module after each `wait`.

    A hook of torch for all modules is registered by `wait`, and removed by its first use. It is not
    attached to any module. A forward pass that computes no gradients, such as that of an
    evaluation, does not count. A hook that fails removes itself.
    """

    def __init__(self, meter: "StallMeter") -> None:
        self._begin = weakref.WeakMethod(meter.begin_work)
        weakref.finalize(meter, self.close).atexit = False
        self._place = os.getpid(), threading.get_ident()
        self._handle: Any = None

    def wait(self) -> None:
        """Wait for the next forward pass."""
        if self._handle is None:
            from torch.nn.modules.module import register_module_forward_pre_hook

            self._place = os.getpid(), threading.get_ident()
            self._handle = register_module_forward_pre_hook(self._called)

    def close(self) -> None:
        """Stop waiting."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _called(self, module: Any, inputs: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        try:
            if (os.getpid(), threading.get_ident()) != self._place or not torch.is_grad_enabled():
                return
            if not any(weight.requires_grad for weight in module.parameters()):
                return
            begin = self._begin()
            if begin is None or begin():
                self.close()
        except Exception:  # no training fails by its meter
            self.close()
