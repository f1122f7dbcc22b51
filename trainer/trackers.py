"""Where figures of a run go besides metrics.jsonl: TensorBoard, Weights & Biases, trackio.

They are told what metrics.jsonl is told, at progress lines and evaluations, by rank 0 alone. One
that fails is named once and asked no more: a run does not end by it.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.trainer.config import TrackerName, TrainConfig

__all__ = ["Trackers", "check_trackers"]

_TRACKED_FILE = "tracked"
"""In a run's folder: by what name services know it, so that a resumed run goes on there."""

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What a kind of tracker does."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Take figures of a step."""
        ...

    def finish(self) -> None:
        """Send or write what is left."""
        ...


class TensorBoard:
    """Event files in the run's folder, written by a thread of torch's."""

    def __init__(self, config: TrainConfig) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(config.run_dir / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        """Take figures of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbLike:
    """A run of `wandb`, or of `trackio`, which has the same functions."""

    def __init__(self, module: str, config: TrainConfig) -> None:
        imported = __import__(module)
        known_as = _known_as(config.run_dir)
        named = {"id": known_as, "dir": str(config.run_dir)} if module == "wandb" else {}
        self._module = imported
        imported.init(
            project=os.environ.get(f"{module.upper()}_PROJECT", "tokenfeed"),
            name=known_as,
            config=config.as_dict(),
            resume="allow",
            **named,
        )

    def log(self, values: dict[str, float], step: int) -> None:
        """Take figures of a step."""
        self._module.log(values, step=step)

    def finish(self) -> None:
        """Send what is left."""
        self._module.finish()


_KINDS: dict[TrackerName, Callable[[TrainConfig], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda config: WandbLike("wandb", config),
    "trackio": lambda config: WandbLike("trackio", config),
}


def check_trackers(names: tuple[TrackerName, ...]) -> None:
    """Refuse trackers whose package is not installed.

    Raises:
        ConfigError: Says how to install it.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"`--track`={name}: the package {name} is not installed. Run `pip install {name}`, "
                "or leave it out."
            )


class Trackers:
    """The trackers of a run."""

    def __init__(self, config: TrainConfig) -> None:
        self._open: dict[str, Tracker] = {}
        for name in config.track if os.environ.get("RANK", "0") == "0" else ():
            with self._survived(name):
                self._open[name] = _KINDS[name](config)

    def log(self, line: dict[str, Any]) -> None:
        """Tell a line of metrics.jsonl: its numbers, by name; never fails."""
        values = _numbers(line)
        for name, tracker in [*self._open.items()]:
            with self._survived(name):
                tracker.log(values, line["step"])

    def finish(self) -> None:
        """End all; never fails."""
        for name, tracker in [*self._open.items()]:
            with self._survived(name):
                tracker.finish()

    @contextlib.contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        """Of a tracker that fails say so, and ask it no more."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            _log.warning("--track %s: %s. The run goes on without it", name, reason)


def _numbers(line: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The figures of a line; those within others by both names."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found[prefix + name] = value
    return found


def _known_as(run_dir: Path) -> str:
    """A name that no other run has: the folder's, and some letters that are drawn once."""
    path = run_dir / _TRACKED_FILE
    if not path.is_file():
        letters = "".join(c if c.isalnum() or c in "-_" else "-" for c in run_dir.resolve().name)
        atomic_write(path, f"{letters}-{secrets.token_hex(3)}".encode())
    return path.read_text()
