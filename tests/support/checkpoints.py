"""What tests of checkpoints share: small ones, and saves that are waited for."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from support.training import make_config
from tokenfeed.trainer.checkpoints.async_saver import Saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Best, CheckpointMeta, Checkpoints
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.distributed.world import State

CPU = torch.device("cpu")


def make_meta(step: int, **changes: Any) -> CheckpointMeta:
    values: dict[str, Any] = {
        "step": step,
        "tokens": step * 100,
        "slots": step * 128,
        "loader": {"epoch": 0, "window": step, "step": 3},
        "config": {"steps": 10, "learning_rate": 2e-3},
    }
    return CheckpointMeta(**values | changes)


def make_state(step: int) -> State:
    return {"model.weight": torch.full((4,), float(step)), "precision.skips": torch.zeros(2)}


def best_of(step: int) -> Best:
    return Best(step=step, metric="loss", metrics={"loss": 1.0 / step})


@contextlib.contextmanager
def open_saver(folder: Path, keep: int = 2) -> Iterator[Saver]:
    saver = Saver(Checkpoints(folder), keep, CPU)
    yield saver
    saver.wait_after_error()


def save(
    folder: Path,
    step: int,
    state: State | None = None,
    keep: int = 2,
    *,
    compress: bool = False,
) -> Path:
    """A checkpoint that is whole."""
    saver = Saver(Checkpoints(folder), keep, CPU, compress=compress)
    saver.save(make_meta(step), make_state(step) if state is None else state)
    saver.wait()
    return Checkpoints(folder).path(step)


def sealed_content(content: dict[str, Any]) -> bytes:
    """A checkpoint.json with the checksum of its content."""
    content = {key: value for key, value in content.items() if key != "xxh3"}
    whole = json.dumps(content).encode() + b"\n"
    return json.dumps({"xxh3": xxhash.xxh3_64_hexdigest(whole)} | content).encode()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(one: State, other: State) -> None:
    """Two states are the same bit for bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert _bytes_of(tensor) == _bytes_of(other[name])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def saving_config(shards: Path, run_dir: Path, **changes: Any) -> TrainConfig:
    return make_config(
        shards, run_dir, **{"save_every": 2, "eval_every": 2, "eval_tokens": 256} | changes
    )


def checkpoint(run_dir: Path, step: int) -> Path:
    return save(run_dir / "checkpoints", step, keep=9)
