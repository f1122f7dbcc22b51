"""What a run logs: its beginning, and progress lines. Nothing else in the loop waits for the
device.

A line on the console is made from the same `MetricsLine` as the line of metrics.jsonl, so they
always agree.
"""

import dataclasses
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.config.run_config import PAGE_FILE, TrainConfig
from tokenfeed.trainer.data.attention import kernel_line
from tokenfeed.trainer.data.datasets import Epoch, is_packed, knows_steps, shown
from tokenfeed.trainer.data.micro_batch import Shaper
from tokenfeed.trainer.distributed.gpu import why_unusable
from tokenfeed.trainer.optim.optimizer import is_embedding
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.report.machine import Gpu, GpuReading, Host
from tokenfeed.trainer.report.recommendations import STALL_CAUSES, Readings, recommended
from tokenfeed.trainer.report.run_files import (
    MetricsFile,
    MetricsLine,
    clock,
    loading_of,
    rows_of,
)
from tokenfeed.trainer.stall import StallMeter
from tokenfeed.trainer.stall.stall_report import main_cause
from tokenfeed.trainer.step import Tally
from tokenfeed.trainer.tasks.task import Metrics, Task

_TRIVIAL = (
    ("accuracy", "majority_accuracy", 1, "always predicting the most frequent class"),
    ("rmse", "mean_rmse", -1, "always predicting the mean"),
)
"""A score, the score of a constant answer, whether more is better, and the constant answer."""
_LEAST_FALL = 0.05
"""Share by which the loss of the last fifth of a run is below the fifth before, if it falls."""

MOST_SKIPPED = 20
"""A run ends after this many steps in a row whose loss or gradients are not finite."""
NO_TARGET = (
    "Targets are missing if rows longer than --sequence-length lose their completions, if "
    "--targets or `skip` selects none, or if all labels are ignored."
)
"""What explains steps without a target."""

_MOST_APART = 256
"""Steps whose figures wait on the device for a line, each in tensors of its own."""
_SECONDS_BETWEEN = 1.0
"""Least seconds between two readings of the machine, which take a fifth of a short line."""
_LINES_IN_A_ROW = 3
"""A recommendation is logged when it applies to this many progress lines in a row."""
_MEANS = ("gpu_busy", "cpu_busy", "core_busy", "ram_used")
_DIVERGING = 1.2
"""A run is diverging if its smoothed loss ends above its least smoothed loss times this."""
_LEAST_LINES = 5
_SURE = 4
"""Standard errors above which a rise is not noise: the least of many means is low by chance."""

_log = logging.getLogger(__name__)


def console_line(line: MetricsLine, steps: int) -> str:
    """Return a progress line for the console. `steps` is the last step of the run."""
    parts = [
        f"step {line.step:>{len(str(steps))}}/{steps}",
        *([] if line.loss is None else [f"loss {line.loss:.4f}"]),
        f"lr {line.learning_rate:.2e}",
    ]
    if line.real_tokens_per_s is not None and line.stall is not None:
        # With its main cause: an evaluation must not look like a slow loader.
        stall = f"stall {line.stall:.2%}{main_cause(line.stall_causes)}"
        parts += [f"{line.real_tokens_per_s:,.0f} real tok/s", stall]
    else:
        parts.append("warming up")
    if line.gpu_bytes is not None and line.gpu_total_bytes:
        used, total = line.gpu_bytes, line.gpu_total_bytes
        gpu = f"gpu {used / 1e9:.1f}/{total / 1e9:.1f} GB ({used / total:.0%})"
        parts.append(gpu if line.gpu_busy is None else f"{gpu}, {line.gpu_busy:.0%} busy")
    if line.cpu_busy is not None and line.ram_used is not None:
        parts += [f"cpu {line.cpu_busy:.0%}", f"ram {line.ram_used:.0%}"]
    if line.steps_per_s is not None:
        speed = line.steps_per_s
        parts.append(f"{speed:.1f} it/s" if speed >= 1 else f"{speed:.2g} it/s")
    if line.phase is not None:
        parts.append(f"phase {line.phase}")
    if line.remaining_seconds is not None:
        parts.append(f"{clock(line.remaining_seconds)} left")
    if line.skipped_steps:
        parts.append(f"{line.skipped_steps} skipped")
    if line.loss_scale is not None:
        parts.append(f"loss scale {line.loss_scale:,.6g}")
    return " | ".join(parts)


def device_name(device: torch.device) -> str:
    """Return the GPU's model, or cpu, for reports."""
    if device.type == "cpu":
        return device.type
    return str(cuda.get_device_name(device))


def peak_memory(device: torch.device) -> int:
    """Return the bytes that torch has used at most on a GPU; on a CPU those of this process."""
    if device.type != "cpu":
        return int(cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        memory: Any = psutil.Process().memory_info()
        return int(memory.peak_wset)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Skips(NamedTuple):
    """The skipped steps since the previous progress line."""

    first: int
    """The first one. If the run ends, the first one in a row."""
    in_a_row: int
    """Number of the latest steps that were all skipped."""


class ProgressLog:
    """Add up steps, and write a progress line now and then.

    Args:
        metrics: Receives each line as an object; None on ranks other than 0.
        stall: Its readings give speed and stall of the steps since the previous line.
        learner: Its learning rate, skipped steps and the memory of its device are logged.
        steps: Last step of the run.
        skipped: Number of steps that earlier sessions skipped.
        readings: What recommendations need besides the figures of a line.
        phase: Name of the phase of the run; None without phases.
    """

    def __init__(
        self,
        metrics: MetricsFile | None,
        stall: StallMeter,
        learner: Learner,
        steps: int,
        skipped: int,
        readings: Readings | None = None,
        phase: str | None = None,
    ) -> None:
        self._metrics, self._stall, self._learner, self._steps = metrics, stall, learner, steps
        self._device = learner.device
        self._numbers: list[int] = []
        """The steps since the previous line."""
        self._latest: list[tuple[Tensor, ...]] = []
        """Their losses, targets and norms, on the device; of older ones, in `_stacked`."""
        self._stacked: list[Tensor] = []
        self._skipped, self._without_target = skipped, 0
        self._has_warned = False
        self.is_behind = False
        """Whether steps were added since the last line."""
        self._reading = stall.read()
        self._of_run, self._phase = readings or Readings(), phase
        self._lines_of = Counter[str]()
        """Latest lines in a row at which a recommendation applied, by its name."""
        self._recommended: set[str] = set()
        self._host = Host()
        self._machine, self._read_at_s = dict[str, Any](), -math.inf
        self._gpu: Gpu | None = None
        if self._device.type != "cpu":
            self._gpu = Gpu.of_uuid(str(cuda.get_device_properties(self._device).uuid))

    def add(self, step: int, tally: Tally, norm: Tensor) -> None:
        """Add a step without waiting for the device.

        Args:
            step: Number of the step.
            tally: Sums of the step. A loss that is not finite does not count.
            norm: Norm of its gradient, not finite if the step was skipped.
        """
        self._numbers.append(step)
        self._latest.append((tally.loss, tally.targets, norm))
        if len(self._latest) == _MOST_APART:
            self._stack()
        self.is_behind = True

    def _stack(self) -> None:
        """Join the figures of steps on the device: a few kernels, and no wait."""
        columns = [torch.stack(each).double() for each in zip(*self._latest, strict=True)]
        self._stacked.append(torch.stack(columns))
        self._latest.clear()

    def write(self, step: int, tokens: int) -> Skips | None:
        """Write a line. This waits for the device.

        Args:
            step: The latest step.
            tokens: Real tokens trained so far.

        Returns:
            The skipped steps since the previous line; None without any. If they end the run, no
            line is written.
        """
        precision, numbers = self._learner.precision, self._numbers
        if self._latest:
            self._stack()
        own = torch.stack([value.double() for value in (*precision.skips, precision.scale)])
        fetched = torch.cat([own, torch.cat(self._stacked, 1).flatten()]).tolist()  # the only wait
        skipped, in_a_row, scale, *rest = fetched
        losses, counts, norms = np.array(rest).reshape(3, -1)
        self._numbers, self._stacked, self.is_behind = [], [], False
        is_finite, latest_norm = np.isfinite(losses), float(norms[-1])
        # A smaller scale cures gradients that overflow.
        is_bad = ~is_finite if precision.is_scaled else ~np.isfinite(norms)
        first = numbers[is_bad.argmax()] if is_bad.any() else 0
        total = float(np.cumsum(np.where(is_finite, losses, 0.0), dtype=np.float32)[-1])
        targets = float(counts[is_finite].sum())
        self._without_target += int((counts == 0).sum())
        before, self._skipped = self._skipped, int(skipped)
        if in_a_row >= MOST_SKIPPED:
            return Skips(step - int(in_a_row) + 1, int(in_a_row))
        reading = self._stall.read()
        window, self._reading = reading.since(self._reading), reading
        machine = self._read_machine()
        line = MetricsLine(
            step=step,
            loss=total / targets if targets else None,
            learning_rate=self._learner.rate(step),
            gradient_norm=latest_norm if math.isfinite(latest_norm) else None,
            skipped_steps=self._skipped - before,
            loss_scale=scale if precision.is_scaled else None,
            tokens=tokens,
            real_tokens_per_s=window.tokens_per_s if window.steps else None,
            stall=window.fraction if window.steps else None,
            stall_causes={name: part for name, part in window.cause_fractions.items() if part},
            step_seconds=self._stall.latest_steps(),
            steps_per_s=window.steps / window.seconds if window.seconds else None,
            remaining_seconds=(self._steps - step) * reading.seconds / reading.steps
            if reading.steps and step < self._steps
            else None,
            phase=self._phase,
            **machine,
        )
        if self._metrics:
            self._metrics.write(line)
        _log.info("%s", console_line(line, self._steps))
        if self._without_target and self._metrics and not self._has_warned:
            self._has_warned = True
            counted = count_of(self._without_target, "step")
            _log.warning("%s up to step %d had no target to train on. %s", counted, step, NO_TARGET)
        if window.steps:
            shares = {name: line.stall_causes.get(name, 0.0) for name in STALL_CAUSES}
            self._recommend(step, self._of_run.updated(**machine, **shares))
        return Skips(first, int(in_a_row)) if first else None

    def _read_machine(self) -> dict[str, Any]:
        """Return the load of this rank's GPU and of the host, read at most once a second."""
        if time.monotonic() - self._read_at_s >= _SECONDS_BETWEEN:
            self._read_at_s, gpu = time.monotonic(), self._read_gpu()
            self._machine = {**(dataclasses.asdict(gpu) if gpu else {}), **self._host.read()}
        return self._machine

    def _read_gpu(self) -> GpuReading | None:
        """Return the load of this rank's GPU; None on a CPU. Without NVML, of torch's memory."""
        device = self._device
        if device.type == "cpu":
            return None
        reading = self._gpu.read() if self._gpu else None
        if reading is not None:
            return reading
        total = cuda.get_device_properties(device).total_memory
        held = cuda.memory_reserved(device)
        return GpuReading(gpu_bytes=held, gpu_total_bytes=total, gpu_busy=None)

    def _recommend(self, step: int, readings: Readings) -> None:
        """Log each recommendation once per session: when it applies to some lines in a row."""
        if self._device.type != "cpu":
            peak = peak_memory(self._device)
            readings = dataclasses.replace(readings, peak_gpu_bytes=peak)
        found = recommended(readings)
        self._lines_of = Counter({name: self._lines_of[name] + 1 for name in found})
        for name, text in found.items():
            if self._lines_of[name] >= _LINES_IN_A_ROW and name not in self._recommended:
                self._recommended.add(name)
                _log.info("step %d | %s", step, text)


def notes_on(
    task: Task, metrics: Mapping[str, Metrics], lines: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return warnings about the results of a finished run.

    Args:
        task: The task. Models of a vocabulary can always be trained for longer.
        metrics: Metrics of the best weights by split.
        lines: Lines of metrics.jsonl.
    """
    found = [
        f"{split}: {name} {scores[name]:.4f} is no better than {scores[trivial]:.4f} by {answer}"
        for split, scores in metrics.items()
        for name, trivial, sign, answer in _TRIVIAL
        if name in scores and (scores[name] - scores[trivial]) * sign <= 0
    ]
    name = "validation_loss" if any("validation_loss" in line for line in lines) else "loss"
    # Progress lines have no loss if all steps were skipped, but also if no step had a target.
    kind, mark = (name, name) if name != "loss" else ("learning_rate", "skipped_steps")
    last_line = [line for line in lines if kind in line][-1:]
    if any(mark in line and line.get(name) is None for line in last_line):
        found.append(
            f"the {name.replace('_', ' ')} is not finite at the end: the run has failed. Lower "
            "`--learning-rate`, raise `--warmup-steps`, or take `--precision fp32`"
        )
    losses = [line[name] for line in lines if line.get(name) is not None]
    last = len(losses) // 5
    if task.kind != "vocabulary" and last:
        before, after = sum(losses[-2 * last : -last]), sum(losses[-last:])
        if after < (1 - _LEAST_FALL) * before:
            found.append("the loss still fell when the run ended: raise --epochs")
    if name == "validation_loss" and losses and losses[-1] > _DIVERGING * min(losses):
        found.append(
            f"the validation loss ends at {losses[-1]:.4g}, after {min(losses):.4g}: the model "
            "learns the training data by heart. Lower --epochs; the best weights, by "
            f"{task.best_by.metric}, are kept"
        )
    return found


def divergence(losses: Sequence[float | None]) -> list[str]:
    """Return a note if the loss of a run ends above 1.2 times its least, both smoothed.

    A value is smoothed over a tenth of the progress lines. A difference within the noise from line
    to line does not count. Second differences show this noise: a steady rise leaves them small.

    Args:
        losses: The loss of each progress line; None if it was not finite.
    """
    known = np.array([loss for loss in losses if loss is not None])
    size = max(1, len(known) // 10)
    if len(known) < _LEAST_LINES:
        return []
    smoothed = np.convolve(known, np.full(size, 1 / size), "valid")
    end, least = float(smoothed[-1]), float(smoothed.min())
    noise = math.sqrt(np.square(np.diff(known, 2)).mean() / 6 / size)
    if end <= _DIVERGING * least or end - least <= _SURE * noise:
        return []
    return [
        f"the run is diverging: its smoothed loss ends at {end:.4g}, {end / least:.3g} times its "
        f"least, {least:.4g}. Lower `--learning-rate` or raise `--warmup-steps`, raise the step "
        "(`--step-tokens`, `--step-rows`), or lower `--clip-norm`"
    ]


def machine_means(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means of the machine's readings over lines of metrics.jsonl, and the most memory."""
    found = {}
    for name in (*_MEANS, "gpu_bytes", "gpu_total_bytes"):
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            found[name] = sum(values) / len(values) if name in _MEANS else max(values)
    return found


def remedies(config: TrainConfig, task: Task) -> Mapping[str, str]:
    """Advice by cause, in terms of the options of `train`."""
    lower = "`--samples` or `--eval-tokens`" if config.samples else "`--eval-tokens`"
    return {
        "data": "raise `--num-workers`, or read from a faster disk",
        "launch": "raise `--micro-batch-tokens`, or add `--compile`",
        "log": "raise `--log-every`",
        "checkpoint": "raise `--save-every`",
        "evaluation": f"raise `--eval-every`, or lower {lower} (`train` chooses what is not given)",
        "wait": "raise `--log-every`; a model of your own should read no values in each step",
        "communication": "raise `--step-tokens`, or use a faster network",
        "exchange": "raise `--step-tokens`, or use a faster network (no rank is late)",
        "padding": padding_remedy(config, task),
        "steps": "train for more steps",
        "other": "leave `--profile` out, whose trace takes most of it"
        if config.profile
        else "add `--profile A:B`: its trace of the steps A to B shows the code between them",
    }


def padding_remedy(config: TrainConfig, task: Task) -> str:
    """Return advice against padding.

    Rows with one label cannot be packed. Packed rows have padding only at their ends.
    """
    if is_packed(config, task.manifest):
        return "raise `--sequence-length`: longer rows have a smaller share of padding"
    if task.kind != "row":
        return "`--batching packed`"
    return (
        "rows with one label cannot be packed; lower `--micro-batch-tokens`: fewer rows of "
        "nearer lengths are padded together"
    )


def _attention_line(config: TrainConfig, learner: Learner, shape: Shaper) -> str:
    model, packed = learner.model, is_packed(config, learner.task.manifest)
    if not getattr(model, "attention_width", 1):
        return "attention: none, the model has no layers that attend"
    if not hasattr(model, "attention_width"):
        return f"attention: as the code of {config.model} computes it"
    is_separated = shape.apart if packed else not shape.causal
    by, drops = shape.separation if is_separated else None, getattr(model, "drops_attention", True)
    dtype = learner.precision.dtype
    return kernel_line(learner.device, dtype, by, packed=packed, drops=drops)


def log_beginning(
    config: TrainConfig,
    learner: Learner,
    shape: Shaper,
    epoch: Epoch,
    loader: ShardLoader,
    step: int,
) -> None:
    """Log the model, the data, the steps and the folder of a run that goes on after a step."""
    model, manifest, device = learner.model, learner.task.manifest, learner.device
    train = manifest.split("train")
    if config.device == "auto" and (reason := why_unusable()):
        _log.warning("training on the CPU: %s", reason)
    embeddings = {p for part in model.modules() if is_embedding(part) for p in part.parameters()}
    parameters = sum(weight.numel() for weight in model.parameters())
    without = parameters - sum(weight.numel() for weight in embeddings)
    _log.info(
        "model: %s, %s parameters (%s without the embedding), %s trained, %s on %s",
        config.model,
        f"{parameters:,}",
        f"{without:,}",
        "all" if learner.trained_parameters == parameters else f"{learner.trained_parameters:,}",
        learner.precision.name,
        device_name(device),
    )
    _log.info("%s", learner.precision.line())
    if device.type == "cpu" and learner.precision.name != "fp32":
        name = learner.precision.name
        _log.warning("there is no GPU, and %s is slow on a CPU: --precision fp32 is faster", name)
    _log.info("%s", _attention_line(config, learner, shape))
    _log.info(
        "memory: %.2f GB for weights, gradients and moments%s, besides activations",
        learner.state_bytes / 1e9,
        ", divided among the ranks" if config.shard_model else "",
    )
    _log.info("data: %s, %s tokens of %s", shown(config.shards), f"{train.tokens:,}", manifest.task)
    if "validation" not in manifest.splits:
        _log.info("evaluation: none, the data has no split validation (`pretokenize --validation`)")
    elif (split := manifest.split("validation")).is_small:
        _log.warning(
            "the split validation has only %s, %s tokens: small differences of its results are "
            "chance (`pretokenize --validation` makes it larger)",
            count_of(split.rows, "row"),
            f"{split.tokens:,}",
        )
    lost = train.tokens - round(epoch.tokens)
    if lost > 0:
        _log.warning(
            "rows longer than --sequence-length %s lose their end: about %s tokens, %.1f %%, of "
            "the split train",
            f"{config.sequence_length:,}",
            f"{lost:,}",
            100 * lost / train.tokens,
        )
    epochs = f"; {config.steps / epoch.steps:.3g} epochs" if knows_steps(config, manifest) else ""
    _log.info(
        "steps: %s%s of about %s tokens%s",
        f"{step + 1:,} to " if 0 < step < config.steps else "",
        f"{config.steps:,}",
        f"{round(epoch.tokens / epoch.steps):,}",
        epochs,
    )
    _log.info(
        "batch: a step has %s and about %s tokens, in %s of at most %s tokens; %s",
        count_of(config.step_rows, "sequence")
        if config.step_rows and is_packed(config, manifest)
        else rows_of(config.step_rows or train.rows / epoch.steps),
        f"{round(epoch.tokens / epoch.steps):,}",
        count_of(config.accumulation, "micro-batch", "micro-batches"),
        f"{config.micro_batch_slots:,}",
        loading_of(loader.num_workers, loader.prefetch, pinned=loader.copies_ahead),
    )
    if config.warmup_steps > config.steps:
        _log.warning(
            "the learning rate rises for --warmup-steps %s, so this run ends before it is at "
            "--learning-rate",
            f"{config.warmup_steps:,}",
        )
    _log.info("run: %s, with the report in %s", config.run_dir, PAGE_FILE)
