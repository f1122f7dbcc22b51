"""Replace names of modules and classes, and restore all of them.

A module that the script has not imported yet is patched by a finder on `sys.meta_path` as soon as
its code has run, so `from module import name` finds the replaced name too.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenfeed.trainer.stall.causes import Cause


class Call(NamedTuple):
    """A function or method whose time belongs to a cause; None: to work."""

    module: str
    name: str
    cause: Cause | None


CALLS: tuple[Call, ...] = (
    Call("torch.serialization", "save", "checkpoint"),
    Call("torch.distributed.checkpoint.state_dict_saver", "save", "checkpoint"),
    Call("torch.distributed.checkpoint.state_dict_saver", "async_save", "checkpoint"),
    Call("safetensors.torch", "save_file", "checkpoint"),
    Call("transformers.trainer", "Trainer.evaluate", "evaluation"),
    Call("transformers.trainer", "Trainer.predict", "evaluation"),
    Call("transformers.trainer", "Trainer._save_checkpoint", "checkpoint"),
    Call("transformers.trainer", "Trainer.log", "log"),
    Call("accelerate.accelerator", "Accelerator.save_state", "checkpoint"),
    Call("accelerate.accelerator", "Accelerator.save_model", "checkpoint"),
    Call("accelerate.accelerator", "Accelerator.log", "log"),
    *(
        call
        for lightning in ("lightning.pytorch", "pytorch_lightning")
        for call in (
            Call(f"{lightning}.loops.evaluation_loop", "_EvaluationLoop.run", "evaluation"),
            Call(f"{lightning}.trainer.trainer", "Trainer.save_checkpoint", "checkpoint"),
        )
    ),
    Call("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply", None),
    *(  # a policy plays in eval mode
        Call(f"stable_baselines3.common.{kind.lower()}_policy_algorithm", name, "data")
        for kind in ("On", "Off")
        for name in (f"{kind}PolicyAlgorithm.collect_rollouts",)
    ),
    Call("wandb.sdk.wandb_run", "Run.log", "log"),
    Call("mlflow.tracking.fluent", "log_metrics", "log"),
    Call("torch.utils.tensorboard.writer", "SummaryWriter.add_scalar", "log"),
    Call("torch.utils.tensorboard.writer", "SummaryWriter.add_histogram", "log"),
    Call("tokenfeed.pipeline.feeding.delivery", "Pass.__next__", "data"),
    Call("queue", "Queue.get", "other"),
    Call("multiprocessing.queues", "Queue.get", "other"),
    Call("concurrent.futures._base", "Future.result", "other"),
)
"""What the watch charges to a cause beside its own hooks. `other` is data if it returns a batch."""


_ended: "WeakKeyDictionary[Any, tuple[Any, bool]]" = WeakKeyDictionary()
"""Values that could not be restored, since a later watch has replaced them, with what was before
each. Watches of several threads end in any order."""


class Patches:
    """Replaced attributes, and how to restore them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Callable[[], None]:
        """Replace an attribute. At the end, it is restored unless somebody else replaced it.

        Returns:
            A function that restores it earlier.
        """
        before, is_own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, value)

        def restore() -> None:
            if vars(owner).get(name) is not value:
                _ended[value] = before, is_own
                return
            found, has = before, is_own
            while (ended := _ended.get(found)) is not None:
                found, has = ended
            if has:
                setattr(owner, name, found)
            else:
                delattr(owner, name)

        self.at_end(restore)
        return restore

    def wrap(self, module: ModuleType, call: Call, charged: Callable[..., Any]) -> None:
        """Replace a name of the table. Names that this version of a package lacks are left out."""
        *path, name = call.name.split(".")
        owner: Any = module
        for each in path:
            owner = getattr(owner, each, None)
        function = vars(owner).get(name) if owner is not None else None
        if not callable(function):
            return
        self.replace(owner, name, value := charged(function, call.cause))
        parent = sys.modules.get(call.module.rpartition(".")[0])
        if not path and vars(parent or module).get(name) is function:  # such as `torch.save`
            self.replace(parent, name, value)

    def at_end(self, undo: Callable[[], Any]) -> None:
        """Call a function at the end, after those that were added later."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Restore everything, the latest change first."""
        while self._undo:
            self._undo.pop()()


class Finder:
    """Calls a function with each module of a list, as soon as the code of the module has run."""

    def __init__(self, names: Sequence[str], patch: Callable[[ModuleType], None]) -> None:
        self._names, self._patch = {*names}, patch

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find. Its loader calls the function once."""
        if name not in self._names:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in specs if each is not None), None)
        loader: Any = spec.loader if spec else None
        if not hasattr(loader, "exec_module"):
            return spec

        def run(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            self._patch(module)

        try:
            loader.exec_module = run
        except AttributeError:  # a loader of somebody else, with fixed attributes
            return spec
        return spec
