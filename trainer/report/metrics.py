"""metrics.jsonl of a run: one object per progress line and per evaluation; and trackers.

Rank 0 forwards each line to Weights & Biases or trackio. A tracker that raises is logged once and
disabled. The run continues.
"""

import contextlib
import errno
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.format.storage import atomic_write, hold
from tokenfeed.trainer.config.run_config import METRICS_FILE, TrainConfig
from tokenfeed.trainer.stall.statistics import StepSeconds

T = TypeVar("T")


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of metrics.jsonl: all fields of a progress line, and fields of other lines that are
    read again.

    The file leaves out unknown figures. Rates cover the steps since the previous line.
    """

    step: int
    loss: float | None = None
    """Mean per target token, in nats, over the steps since the previous line with a finite loss;
    None without such a step."""
    validation_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """Norm of this step, before clipping; None if it was not finite and the step was skipped."""
    skipped_steps: int = 0
    """Steps since the previous line that changed nothing: their gradients were not finite."""
    tokens: int = 0
    """Real tokens trained since the first step."""
    real_tokens_per_s: float | None = None
    """None during warm-up."""
    stall: float | None = None
    """Fraction of the wall time, 0 to 1; None during warm-up."""
    stall_causes: dict[str, float] = {}
    """Share of the wall time by cause, without causes of 0."""
    step_seconds: StepSeconds | None = None
    """None during warm-up."""
    gpu_bytes: int | None = None
    """Memory of the GPU that torch holds; None on a CPU."""
    samples: list[dict[str, str]] | None = None


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
        size = end = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            size += len(line)
            if any(found.step <= until_step for found in decode_lines(line, MetricsLine)):
                end = size
        self._file.truncate(end)

    def write(self, values: MetricsLine | dict[str, Any]) -> None:
        """Append a line. A dictionary has at least `step`."""
        line = msgspec.json.encode(values) + b"\n"  # null for infinity and NaN
        if self._file.write(line) < len(line):  # the last bytes that the disk had
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self.on_line(msgspec.to_builtins(values))

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
        """Return all lines."""
        return decode_lines(self._path.read_bytes(), dict[str, Any])

    def close(self) -> None:
        """Close the file, which unlocks the folder."""
        self._file.close()


def decode_lines(content: bytes, kind: type[T]) -> list[T]:
    """Decode lines of metrics.jsonl. Damaged lines are left out, such as the last line of a killed
    run."""
    found = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            msgspec.json.decode(line, type=MetricsLine)
            found.append(msgspec.json.decode(line, type=kind))
    return found


_TRACKED_FILE = "tracked"
"""File in a run's folder with the id of the run at services, for resumed runs."""

_log = logging.getLogger(__name__)


def check_trackers(config: TrainConfig) -> None:
    """Refuse trackers whose package is not installed.

    Raises:
        ConfigError: A package is missing.
    """
    for name in config.track:
        if find_spec(name) is None:
            raise ConfigError(
                f"`--track`={name}: the package {name} is not installed. Run `pip install {name}`, "
                "or leave it out."
            )


class Trackers:
    """The trackers of a run: modules with the functions `init`, `log` and `finish`."""

    def __init__(self, config: TrainConfig) -> None:
        self._open: dict[str, Any] = {}
        for name in config.track:
            with self._survived(name):
                service, run_id = import_module(name), _id_of(config.run_dir)
                named = {"id": run_id, "dir": str(config.run_dir)} if name == "wandb" else {}
                project = os.environ.get(f"{name.upper()}_PROJECT", "tokenfeed")
                settings = config.as_dict()
                service.init(project=project, name=run_id, config=settings, resume="allow", **named)
                self._open[name] = service

    def log(self, line: dict[str, Any]) -> None:
        """Forward the numbers of a line of metrics.jsonl by name. Never raises."""
        for name, service in [*self._open.items()]:
            with self._survived(name):
                service.log(_numbers(line), step=line["step"])

    def finish(self) -> None:
        """Finish all trackers. Never raises."""
        for name, service in [*self._open.items()]:
            with self._survived(name):
                service.finish()

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
