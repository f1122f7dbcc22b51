"""The files of a run for programs: report.json and metrics.jsonl; and trackers.

Speed and stall are those of the measured steps since the start or the latest resume, without the
warm-up. Tokens, losses and padding are those of all steps. A run writes interim reports, so that a
killed run keeps what it measured.

metrics.jsonl has one object per progress line and per evaluation. Rank 0 forwards each line to
trackers. A tracker that raises is logged once and disabled. The run continues.
"""

import contextlib
import datetime
import errno
import functools
import importlib.metadata
import logging
import math
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.placement import cores_per_rank
from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.pipeline.format.storage import atomic_write, held, holder_of
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.config.run_config import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    PAGE_FILE,
    REPORT_FILE,
    TrainConfig,
)
from tokenfeed.trainer.report.recommendations import STALL_CAUSES, Readings
from tokenfeed.trainer.stall.reading import StepSeconds
from tokenfeed.trainer.stall.stall_report import StallReport, speed_parts

INTERVAL = "loss_interval"
"""The metric that is half of the 95 % interval of `loss`."""

T = TypeVar("T")

_log = logging.getLogger(__name__)
RowsByLength = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=64)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcome of a run."""

    run_dir: str
    finished: bool
    """False if the run stopped before its last step, or is still going on."""
    steps: int
    """Steps trained, those before a resume included."""
    skipped_steps: int
    """Steps that changed nothing, because their gradients were not finite."""
    loss_scale: float | None = None
    """Scale of the loss in the next step; None unless the precision is fp16."""
    tokens: int
    """Real tokens trained, those before a resume included."""
    seconds: float
    """Wall time since the start or the latest resume, set-up and evaluation included."""
    total_seconds: float | None = None
    """The same with earlier sessions, up to the checkpoints from which the run went on; None in
    reports of earlier versions."""
    real_tokens_per_s: float | None
    """Real tokens of the measured steps divided by their wall time, stall included; None if the run
    ended in its warm-up."""
    padding: float
    """Share of all token slots that held no token."""
    stall: StallReport
    remote: RemoteStats | None = None
    """What the training data took from a store; None if they are local."""
    loss_first: float | None
    """Loss of the first step; None if metrics.jsonl was lost."""
    loss_last: float | None
    """Mean loss over the steps of the last progress line."""
    validation_loss_first: float | None
    """None without a validation split, or if the loss was not finite."""
    validation_loss_last: float | None
    task: str
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Metrics of the best weights, by split and name: `loss`, and those of the task. None if the
    model's predictions were not numbers."""
    notes: list[str] = field(default_factory=list)
    """What the results call for, such as more epochs."""
    best_step: int | None = None
    """The step of the best weights; None if nothing was evaluated."""
    model: str
    parameters: int
    trained_parameters: int | None = None
    """Parameters that the run trained; None in reports of earlier versions."""
    vocabulary_size: int
    device: str
    precision: str
    versions: dict[str, str]
    delivered: dict[str, int] = field(default_factory=dict)
    """Tokens of each data set in all stages of `mixing` so far; empty without `mixing`."""
    rows_by_length: RowsByLength = field(default_factory=list)
    """Rows of the split `train` by length in tokens: entry k counts those of 2**k up to
    2**(k+1) - 1."""
    steps_per_s: float | None = None
    """Of the measured steps, like the next two; evaluations and checkpoints are included."""
    rows_per_s: float | None = None
    epoch_seconds: float | None = None
    """Seconds of a pass over the train split."""
    step_rows: float | None = None
    """--step-rows, else the average that the manifest predicts. A document is a row."""
    step_tokens: float | None = None
    """Real tokens of a step on average."""
    accumulation: int | None = None
    """Micro-batches of a step, over all ranks."""
    micro_batch_tokens: int | None = None
    num_workers: int | None = None
    """Loader processes of a rank."""
    prefetch: int = 0
    """Batches ready on the device ahead of the step."""
    pinned: bool = False
    """Whether batches are copied to the device from page-locked memory."""
    state_bytes: int | None = None
    """Memory of weights, gradients and moments on a rank."""
    peak_gpu_bytes: int | None = None
    """Most memory of the GPU that torch held; None on a CPU."""
    evaluation_seconds: float = 0.0
    """Seconds of the loop in evaluations of the validation split."""
    checkpoint_seconds: float = 0.0
    """Seconds of the loop in checkpoints. Most of a checkpoint is written beside the next steps."""
    machine: dict[str, float] = field(default_factory=dict)
    """Means over the progress lines of `gpu_busy`, `cpu_busy`, `core_busy` and `ram_used`, and the
    largest `gpu_bytes` and `gpu_total_bytes`."""
    recommendations: list[str] = field(default_factory=list)
    """What to change, besides the advice about the stall."""
    trace: str | None = None
    """File of the trace that --profile has written into the folder of the run."""

    @property
    def readings(self) -> Readings:
        """What recommendations are made from."""
        ranks, shares = self.stall.world_size, self.stall.causes
        return Readings().updated(
            **self.machine,
            **{name: shares[name].fraction for name in STALL_CAUSES},
            workers=self.num_workers,
            cores=cores_per_rank(),
            accumulation=self.accumulation and ceil_div(self.accumulation, ranks),
            micro_batch_tokens=self.micro_batch_tokens,
            state_bytes=self.state_bytes,
            peak_gpu_bytes=self.peak_gpu_bytes,
        )

    @classmethod
    def of_run(cls, run_dir: Path) -> "Report | None":
        """The report in a run's folder; None if it is missing or damaged."""
        try:
            return cls.of_json((run_dir / REPORT_FILE).read_bytes(), run_dir)
        except (OSError, ValueError, RecursionError):
            return None

    @classmethod
    def of_json(cls, data: bytes, run_dir: Path) -> "Report":
        """Decode report.json of the run that is in a folder now.

        Raises:
            ValueError, RecursionError: It is not a report.
        """
        # The folder may have been moved or copied.
        return replace(msgspec.json.decode(data, type=cls), run_dir=str(run_dir))

    def write(self, run_dir: Path) -> None:
        """Write report.json, atomically."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=1)  # null for NaN
        atomic_write(run_dir / REPORT_FILE, content + b"\n")

    def summary(self) -> str:
        """The report in a few lines."""
        loss = _change(self.loss_first, self.loss_last)
        if self.validation_loss_first is not None:
            first, last = self.validation_loss_first, self.validation_loss_last
            change = f"{first:.4f}" if first == last else _change(first, last)
            loss += f", validation {change}"
        end = "" if self.finished else f", {self._way_on()}"
        is_whole = self.trained_parameters in (None, self.parameters)
        trained = "" if is_whole else f", {self.trained_parameters:,} of them trained"
        skipped = f" ({self.skipped_steps:,} skipped)" if self.skipped_steps else ""
        folder = Path(self.run_dir)
        files = [name for name in (PAGE_FILE, REPORT_FILE) if (folder / name).exists()]
        speed = speed_parts(self.stall, self.padding)
        if self.real_tokens_per_s is None:
            speed = ["not measured", *speed]
        if self.steps_per_s and self.rows_per_s and self.epoch_seconds:
            rates = f"{self.steps_per_s:,.3g} steps/s, {self.rows_per_s:,.3g} rows/s"
            speed.insert(1, f"{rates}, {duration(self.epoch_seconds)} an epoch")
        return self.stall.text(
            before={
                "model": f"{self.model}, {self.parameters / 1e6:.1f} M parameters{trained}, "
                f"{self.precision} on {self.device}",
                "trained": f"{count_of(self.steps, 'step')}{skipped}, "
                f"{self.tokens:,} real tokens{end}",
                "loss": loss,
                "metrics": "\n".join(self._metrics()),
                "note": "\n".join(self.notes),
                "batch": self._batch(),
                "speed": ", ".join(speed),
                "time": f"{self.evaluation_seconds:,.1f} s in evaluations and "
                f"{self.checkpoint_seconds:,.1f} s in checkpoints, of {self.seconds:,.1f} s",
                "memory": f"at most {self.peak_gpu_bytes / 1e9:.2f} GB of the GPU"
                if self.peak_gpu_bytes
                else "",
                "store": _store(self.remote),
            },
            more_advice=self.recommendations,
            after={
                "trace": f"{folder / self.trace}, for https://ui.perfetto.dev"
                if self.trace
                else "",
                "report": f"{folder / ', '.join(files)}" if files else "",
            },
        )

    def _batch(self) -> str:
        """The size of a step, how it is divided, and the workers; empty if unknown."""
        if self.step_rows is None or self.step_tokens is None:
            return ""
        return (
            f"{rows_of(self.step_rows)} and {self.step_tokens:,.0f} real tokens a step, in "
            f"{count_of(self.accumulation or 1, 'micro-batch', 'micro-batches')}; "
            f"{loading_of(self.num_workers or 0, self.prefetch, pinned=self.pinned)}"
        )

    def _way_on(self) -> str:
        """How a run that did not reach its last step can go on."""
        if any((Path(self.run_dir) / CHECKPOINTS_FOLDER).glob("step-????????")):
            return "stopped before the end: go on with --resume"
        return "ended before its first checkpoint: start it again without --resume"

    def _metrics(self) -> list[str]:
        """A line for each split that was measured."""
        step = "" if self.best_step is None else f", best at step {self.best_step:,}"
        return [
            f"{split}{step}: " + ", ".join(shown_metrics(metrics))
            for split, metrics in self.metrics.items()
        ]


def _store(found: RemoteStats | None) -> str:
    """Return what the run read from a store; empty for local data."""
    if found is None:
        return ""
    return (
        f"{found.requests:,} requests, {found.bytes / 1e6:,.1f} MB, {found.hits:,} hits in the "
        f"cache, {found.retries:,} retries, {found.outage_s:.1f} s of outage, windows at hand "
        f"after {found.wait_s.p99:.3f} s (p99)"
    )


def shown_metrics(metrics: Mapping[str, float | None]) -> list[str]:
    """Return each metric with its value, nan if it is no number. A loss has its interval beside."""
    found = []
    for name, value in metrics.items():
        metric, _, data_set = name.partition("/")
        if metric == INTERVAL:
            continue
        half = metrics.get(f"{INTERVAL}/{data_set}" if data_set else INTERVAL)
        shown = f"{name} {'nan' if value is None else f'{value:.4f}'}"
        found.append(shown + (f" ± {half:.2g}" if metric == "loss" and half is not None else ""))
    return found


def loading_of(workers: int, prefetch: int, *, pinned: bool) -> str:
    """How batches come to the device."""
    return (
        f"{count_of(workers, 'loader worker')}, {count_of(prefetch, 'batch', 'batches')} ready "
        f"ahead, {'page-locked' if pinned else 'pageable'} memory"
    )


def rows_of(rows: float) -> str:
    """Return the rows of a step, as in "32 rows"; of a mean, as in "about 19.3 rows"."""
    if rows < 1:
        return "a part of a row"
    return count_of(int(rows), "row") if rows == int(rows) else f"about {rows:,.3g} rows"


def duration(seconds: float) -> str:
    """Return a time in hours, minutes and seconds, as in "0:02:40"; below 10 seconds as "2.5 s"."""
    return f"{seconds:.2g} s" if seconds < 10 else clock(seconds)


def clock(seconds: float) -> str:
    """Return a time in hours, minutes and seconds, as in "0:02:40"."""
    return str(datetime.timedelta(seconds=round(min(seconds, 1e12))))


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "not known"
    return f"{first:.4f} -> {last:.4f}"


@functools.cache
def versions() -> dict[str, str]:
    """Versions that the figures of a report depend on."""
    return {
        "tokenfeed": importlib.metadata.version("tokenfeed"),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


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
    loss_scale: float | None = None
    """Scale of the loss in the next step; None unless the precision is fp16."""
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
    steps_per_s: float | None = None
    """None during warm-up."""
    remaining_seconds: float | None = None
    """Seconds until the last step, at the average speed so far; None during warm-up."""
    gpu_bytes: int | None = None
    """Memory in use on this rank's GPU, by all processes; without NVML, what torch holds. None on a
    CPU."""
    gpu_total_bytes: int | None = None
    gpu_busy: float | None = None
    """Share of the time in which the GPU ran some kernel; None if NVML does not report it."""
    cpu_busy: float | None = None
    """Share of the machine's processors that were busy."""
    core_busy: float | None = None
    """The same of the busiest processor."""
    ram_used: float | None = None
    """Share of the machine's memory in use."""
    phase: str | None = None
    """Name of the phase; None without phases."""
    samples: list[dict[str, str]] | None = None


class MetricsFile:
    """metrics.jsonl of a run. Each line is written at once.

    The open file locks the run's folder: a second run in the folder is refused.
    """

    def __init__(
        self, run_dir: Path, on_line: Callable[[dict[str, Any]], None] = lambda values: None
    ) -> None:
        """Args: `on_line` is called with each line that was written. It must not raise."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path, self._on_line = run_dir / METRICS_FILE, on_line
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        self._links = os.fstat(self._file.fileno()).st_nlink  # 0 on some mounted drives
        self._lock = contextlib.ExitStack()
        if not self._lock.enter_context(held(self._path)):
            self.close()
            raise ConfigError(
                f"`--run-dir`: another run is writing into {run_dir}{holder_of(self._path)}. Wait "
                "for it or end it, or give another folder."
            )

    def keep(self, until_step: int) -> None:
        """Drop the lines after a step. A resumed run writes them again."""
        size = end = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            size += len(line)
            if any(found.step <= until_step for found in decode_lines(line, MetricsLine)):
                end = size
        self._file.truncate(end)

    def check_exists(self) -> None:
        """Check that the file is still in the folder, where another run could begin otherwise.

        Raises:
            ConfigError: It is not.
        """
        links = os.fstat(self._file.fileno()).st_nlink
        if not self._path.exists() or links < min(1, self._links):
            raise ConfigError(
                f"`--run-dir`: {self._path} was deleted or moved while the run went on. Move it "
                "back and add --resume, or start again in another folder."
            )

    def write(self, values: MetricsLine | dict[str, Any]) -> None:
        """Append a line. A dictionary has at least `step`."""
        self.check_exists()
        line = msgspec.json.encode(values) + b"\n"  # null for infinity and NaN
        if self._file.write(line) < len(line):  # the last bytes that the disk had
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._on_line(msgspec.to_builtins(values))

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
        self.check_exists()
        return decode_lines(self._path.read_bytes(), dict[str, Any])

    def close(self) -> None:
        """Close the file, which unlocks the folder."""
        self._file.close()
        self._lock.close()


def decode_lines(content: bytes, kind: type[T]) -> list[T]:
    """Decode lines of metrics.jsonl. Damaged lines are left out, such as the last line of a killed
    run."""
    found = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            msgspec.json.decode(line, type=MetricsLine)
            found.append(msgspec.json.decode(line, type=kind))
    return found


TRACKED_FILE = "tracked"
"""File in a run's folder with the id of the run at services, for resumed runs."""


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
                is_file = name == "tensorboard"
                service: Any = TensorBoard(config.run_dir) if is_file else import_module(name)
                run_id = _id_of(config.run_dir)
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
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            _log.warning("--track %s: %s. The run goes on without it", name, reason)


class TensorBoard:
    """Event files in the folder of the run, with the functions of the other trackers."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = functools.partial(SummaryWriter, run_dir / "tensorboard", flush_secs=10)
        self._writer: Any = None

    def init(self, **settings: Any) -> None:
        """Do nothing: the folder names the run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the values. The first line of a resumed run replaces later ones of a killed run."""
        self._writer = self._writer or self._open(purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is left."""
        if self._writer:
            self._writer.close()


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
    path = run_dir / TRACKED_FILE
    if not path.is_file():
        letters = "".join(c if c.isalnum() or c in "-_" else "-" for c in run_dir.resolve().name)
        atomic_write(path, f"{letters}-{secrets.token_hex(3)}".encode())
    return path.read_text()
