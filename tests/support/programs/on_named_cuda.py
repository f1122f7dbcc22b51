"""Trains some steps on a CUDA device in name only, and prints what was seen as a line of JSON.

python on_named_cuda.py LIBRARY CASES: a JSON object of `TrainConfig` settings for each case.
"""

import gc
import itertools
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from support import ROOT, named_cuda

sys.path.append(str(ROOT))  # for benchmarks/
torch = named_cuda.begin(Path(sys.argv[1]))

import pytest  # noqa: E402
from support.host_waits import HostWaits  # noqa: E402
from support.training import follow_brackets, make_config  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402

from benchmarks.gpu.memory import PeakBytes  # noqa: E402
from tokenfeed.trainer.loop.trainer import Trainer  # noqa: E402
from tokenfeed.trainer.models.gpt import SIZES, ModelSize  # noqa: E402

_STEPS = 2  # the first makes the optimizer's state
_SIZE = ModelSize(layers=1, width=64, heads=2)


class Journal(TorchDispatchMode):
    """Which operators ran on the device, and with which dtypes of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, set[str]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        floats = [
            value.dtype
            for value in tree_iter((args, out))
            if isinstance(value, torch.Tensor)
            and value.device.type == "cuda"
            and value.is_floating_point()
        ]
        name = function.name().split("::")[1].split(".")[0]
        self.operators.setdefault(name, set()).update(map(_short, floats))
        return out


def _wait(module: Any, given: Any, out: Any) -> None:
    out.cpu()
    out.sum().item()


def _mix(module: Any, given: Any, out: Any) -> Any:
    return out + torch.ones(out.shape)


FAULTS = {"wait": _wait, "device": _mix}
"""Hooks that a model calls after its forward pass."""


def train(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What some steps of the real loop did."""
    fault = FAULTS.get(settings.pop("fault", ""))
    capability = tuple(settings.pop("capability", named_cuda._CAPABILITY))
    shards, defaults = Path(settings.pop("shards")), {"num_workers": 0, "eval_tokens": 1}
    config = make_config(shards, folder, device="cuda", steps=100, **defaults | settings)
    steps = itertools.count(1)
    ended = False

    def count_step() -> bool:
        nonlocal ended
        ended = next(steps) == _STEPS
        return False

    journal = Journal()
    with (
        pytest.MonkeyPatch.context() as patch,
        named_cuda.device(),
        journal,
        PeakBytes("cuda") as memory,
        HostWaits(follow_brackets(patch)) as waits,
    ):
        patch.setitem(SIZES, "tiny", _SIZE)
        patch.setattr(named_cuda, "_CAPABILITY", capability)
        trainer = Trainer(config)
        learner = trainer.learner
        sums = set[str]()
        for block in learner.model.repeated_blocks():
            block.register_forward_pre_hook(
                lambda _, given, named: sums.add(_short((*given, *named.values())[0].dtype)),
                with_kwargs=True,
            )
        if fault:
            learner.model.register_forward_hook(fault)
        before = len(waits.seen)  # making the model may wait
        trainer.train(lambda: ended, count_step)
        trainer.close()
        return {
            "waits": [(str(wait), wait.cause) for wait in waits.seen[before:]],
            "sums": sorted(sums),
            "operators": {name: sorted(kinds) for name, kinds in journal.operators.items()},
            "precision": learner.precision.name,
            "optimizer": type(learner.optimizer).__name__,
            "matmul": torch.get_float32_matmul_precision(),
            "peak": memory.peak,
            "weights": _kinds(learner.model.parameters()),
            "moments": _kinds(
                value
                for state in learner.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ),
        }


def _kinds(tensors: Any) -> list[str]:
    return sorted({f"{tensor.device} {_short(tensor.dtype)}" for tensor in tensors})


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _result(settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return train(settings, Path(folder) / "run")
        except Exception:
            return {"error": traceback.format_exc()}


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    gc.freeze()  # the loop collects at every log line
    print(json.dumps({name: _result(settings) for name, settings in cases.items()}))
