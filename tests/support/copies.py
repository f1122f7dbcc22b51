"""What tests of copies at a URL share: what is in a place, and checkpoints to put there."""

from pathlib import Path
from typing import Any

from faulty_store import FaultyStore
from saves import save
from training import make_config

from tokenfeed.trainer.checkpoints.remote_copy import RemoteRun
from tokenfeed.trainer.config.run_config import TrainConfig

__all__ = ["checkpoint", "copy_of", "files_at", "files_in", "refuse", "saving_config"]


def saving_config(shards: Path, run_dir: Path, **changes: Any) -> TrainConfig:
    return make_config(
        shards, run_dir, **{"save_every": 2, "eval_every": 2, "eval_tokens": 256} | changes
    )


def files_at(url: str) -> dict[str, bytes]:
    if "://" not in url:
        return files_in(Path(url))
    return {path.removeprefix(url): data for path, data in FaultyStore.store.items()}


def files_in(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {f"/{path.relative_to(folder)}": path.read_bytes() for path in paths}


def refuse(operation: str, path: str) -> None:
    raise ConnectionError("the line is dead\nand so on")


def copy_of(folder: Path, url: str) -> RemoteRun:
    remote = RemoteRun(url)
    for path in sorted(folder.glob("checkpoints/step-????????")):
        remote.put_checkpoint(path)
    return remote


def checkpoint(run_dir: Path, step: int) -> Path:
    return save(run_dir / "checkpoints", step, keep=9)
