"""Where work begins on a CPU: with the first forward pass of a trained module after a step.

On a CPU the host does the work itself, so time shows nothing about what it was used for. What lies
between the end of a step and the first forward pass is `other`, unless it is in a bracket.
"""

import signal
import traceback
import weakref
from collections.abc import Callable, MutableMapping
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenfeed.trainer.stall.meter import StallMeter


def is_of_handler(error: Exception) -> bool:
    """Return whether a signal handler of the program raised an error: a timeout, perhaps. It may
    come at any moment, also in a hook, and is meant for the program."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


class ForwardWatch:
    """Calls a meter at the first forward pass of a trained module after each `wait`.

    A hook of torch for all modules is in place from `wait` to its first use, so it costs one call a
    step. It is not attached to any module. A forward pass that computes no gradients, such as that
    of an evaluation, does not count. A hook that fails removes itself.
    """

    def __init__(self, meter: "StallMeter") -> None:
        self._meter = weakref.ref(meter)
        weakref.finalize(meter, self.close).atexit = False
        self._thread, self._hook = get_ident(), self._called
        self._hooks: MutableMapping[int, Any] = {}
        """Torch's table of hooks for all modules, from the first `wait` on."""
        self._number = -1
        """The place of the hook in this table."""
        self._trained: Callable[[], Any] = bool
        """A weak reference to the module that began the latest step."""
        self._is_compiling: Callable[[], bool] = bool
        self._computes_gradients: Callable[[], bool] = bool

    def wait(self) -> None:
        """Wait for the next forward pass."""
        self._thread = get_ident()
        if self._number >= 0:
            self._hooks[self._number] = self._hook
            return
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._is_compiling = torch.compiler.is_dynamo_compiling
        self._computes_gradients = torch.is_grad_enabled
        handle = register_module_forward_pre_hook(self._hook)
        self._hooks, self._number = handle.hooks_dict_ref() or {}, handle.id

    def close(self) -> None:
        """Stop waiting."""
        self._hooks.pop(self._number, None)

    def _called(self, module: Any, inputs: Any) -> None:
        if self._is_compiling():
            return
        try:
            if get_ident() != self._thread or not self._computes_gradients():
                return
            if self._trained() is not module:
                if not any(weight.requires_grad for weight in module.parameters()):
                    return
                self._trained = weakref.ref(module)
            meter = self._meter()
            if meter is not None:
                if meter.phase != "before":
                    return  # in a bracket
                meter.end_segment("before")
                meter.phase = "work"
            self._hooks.pop(self._number, None)
        except Exception as error:  # no training fails by its meter
            self.close()
            if is_of_handler(error):
                raise
