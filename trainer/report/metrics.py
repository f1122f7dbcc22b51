"""metrics.jsonl of a run: one object per progress line and per evaluation; and trackers.

Rank 0 forwards each line to TensorBoard, Weights & Biases or trackio. A tracker that raises is
logged once and disabled. The run continues.
"""

import contextlib
import errno
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.format.storage import atomic_write, hold
from tokenfeed.trainer.config.run_config import METRICS_FILE, TrackerName, TrainConfig
from tokenfeed.trainer.stall.statistics import StepSeconds


class _Gpu(msgspec.Struct, frozen=True):
    memory_bytes: float | None = None
    power_watts: float | None = None


class _Sample(msgspec.Struct, frozen=True):
    prompt: str
    text: str


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a line of metrics.jsonl that are read again."""

    step: int
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    skipped_steps: int = 0
    real_tokens_per_s: float | None = None
    stall_causes: dict[str, float] | None = None
    step_seconds: StepSeconds | None = None
    gpu: _Gpu | None = None
    samples: list[_Sample] | None = None


class MetricsFile:
    """metrics.jsonl of a run. Each line is written at once.

    The open file locks the run's folder: a second run in the folder is refused.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_FILE
        self.on_line: Callable[[dict[str, Any]], None] = lambda values: None
        """Called with each line that was written. It must not raise."""
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        if not hold(self._file):
            self.close()
            raise ConfigError(
                f"`--run-dir`: another run is writing into {run_dir}. Wait for it or end it, or "
                "give another folder."
            )

    def keep(self, until_step: int) -> None:
        """Drop the lines after a step. A resumed run writes them again."""
        kept = [line for line in self.read() if line["step"] <= until_step]
        self._file.truncate(sum(map(len, self._lines()[: len(kept)])))

    def write(self, values: dict[str, Any]) -> None:
        """Append a line. `values` has at least `step`."""
        line = msgspec.json.encode(values) + b"\n"  # null for infinity and NaN
        if self._file.write(line) < len(line):  # the last bytes that the disk had
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self.on_line(values)

    def evaluation(self, step: int, split: str) -> dict[str, float]:
        """Return the metrics of a split at a step by name; empty if no line has them."""
        return {
            key.removeprefix(f"{split}_"): math.nan if value is None else value
            for line in self.read()
            if line["step"] == step
            for key, value in line.items()
            if key.startswith(f"{split}_")
        }

    def read(self) -> list[dict[str, Any]]:
        """Return all whole lines. A killed run may have cut the last one short; it is left out.

        Raises:
            ResumeError: A line is not a metrics record.
        """
        return [self._parse(number, line) for number, line in enumerate(self._lines(), 1)]

    def close(self) -> None:
        """Close the file, which unlocks the folder."""
        self._file.close()

    def _lines(self) -> list[bytes]:
        content = self._path.read_bytes()
        return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads(line)
            msgspec.convert(values, MetricsLine)
        except (ValueError, RecursionError) as error:  # such as 10,000 brackets
            raise ResumeError(
                f"{self._path}: line {number} is not a metrics record ({error}). Delete that line."
            ) from error
        return values


_TRACKED_FILE = "tracked"
"""File in a run's folder with the id of the run at services, for resumed runs."""

_log = logging.getLogger(__name__)


class Tracker(NamedTuple):
    """The functions of an open tracker."""

    log: Callable[[dict[str, float], int], None]
    """Takes the figures of a step."""
    finish: Callable[[], None]
    """Sends or writes what is left."""


def _open(name: TrackerName, config: TrainConfig) -> Tracker:
    """Open a tracker. TensorBoard gets event files in the run's folder. `wandb` and `trackio` have
    the same functions."""
    if name == "tensorboard":
        from torch.utils.tensorboard.writer import SummaryWriter

        writer = SummaryWriter(str(config.run_dir / "tensorboard"))

        def log(values: dict[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)

        return Tracker(log, writer.close)
    service, run_id = __import__(name), _id_of(config.run_dir)
    named = {"id": run_id, "dir": str(config.run_dir)} if name == "wandb" else {}
    project = os.environ.get(f"{name.upper()}_PROJECT", "tokenfeed")
    settings = config.as_dict()
    service.init(project=project, name=run_id, config=settings, resume="allow", **named)
    return Tracker(lambda values, step: service.log(values, step=step), service.finish)


def check_trackers(names: tuple[TrackerName, ...]) -> None:
    """Refuse trackers whose package is not installed.

    Raises:
        ConfigError: A package is missing.
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
                self._open[name] = _open(name, config)

    def log(self, line: dict[str, Any]) -> None:
        """Forward the numbers of a line of metrics.jsonl by name. Never raises."""
        values = _numbers(line)
        for name, tracker in [*self._open.items()]:
            with self._survived(name):
                tracker.log(values, line["step"])

    def finish(self) -> None:
        """Finish all trackers. Never raises."""
        for name, tracker in [*self._open.items()]:
            with self._survived(name):
                tracker.finish()

    @contextlib.contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        """Log the error of a tracker, and disable the tracker."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            _log.warning("--track %s: %s. The run goes on without it", name, reason)


def _numbers(line: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a line. Nested objects give names such as "gpu/memory_bytes"."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found[prefix + name] = value
    return found


def _id_of(run_dir: Path) -> str:
    """Return a unique id: the name of the folder and some random letters, drawn once."""
    path = run_dir / _TRACKED_FILE
    if not path.is_file():
        letters = "".join(c if c.isalnum() or c in "-_" else "-" for c in run_dir.resolve().name)
        atomic_write(path, f"{letters}-{secrets.token_hex(3)}".encode())
    return path.read_text()
