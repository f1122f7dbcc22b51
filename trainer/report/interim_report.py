"""What a run logs before its first step, its advice, and drafts of its report on the way."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import shown
from tokenfeed.trainer.feeding.batch_policy import padding_remedy
from tokenfeed.trainer.optim.optimizer import is_embedding
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.report.run_report import Report
from tokenfeed.trainer.sensors.gpu import device_name
from tokenfeed.trainer.sizing.recommended import epoch_of
from tokenfeed.trainer.tasks.task import Metrics, Task

__all__ = ["InterimReports", "log_beginning", "notes_on", "remedies"]

SECONDS_BETWEEN = 30.0
MOST_SHARE = 0.001
"""Largest share of the time that drafts may take."""

_TRIVIAL = (
    ("accuracy", "majority_accuracy", 1, "always predicting the most frequent class"),
    ("rmse", "mean_rmse", -1, "always predicting the mean"),
)
"""A score, the score of a constant answer, whether more is better, and the constant answer."""
_LEAST_FALL = 0.05
"""Share by which the loss of the last fifth of a run is below the fifth before, if it falls."""

_log = logging.getLogger(__name__)


def notes_on(
    task: Task, metrics: Mapping[str, Metrics], lines: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return what the results of a finished run call for.

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
    losses = [line[name] for line in lines if line.get(name) is not None]
    last = len(losses) // 5
    if task.kind != "vocabulary" and last:
        before, after = sum(losses[-2 * last : -last]), sum(losses[-last:])
        if after < (1 - _LEAST_FALL) * before:
            found.append("the loss still fell when the run ended: raise --epochs")
    return found


def remedies(config: TrainConfig, task: Task) -> Mapping[str, str]:
    """Advice by cause, in terms of the options of `train`."""
    return {
        "data": "batches come late: raise `--num-workers`, or read from a faster disk",
        "launch": "kernels are queued more slowly than they run: raise `--micro-batch-tokens`, or "
        "add `--compile`",
        "log": "raise `--log-every`",
        "checkpoint": "raise `--save-every`",
        "evaluation": "raise `--eval-every`, or lower `--eval-tokens` (`train` chooses "
        "what is not given)",
        "exchange": "most of it is the exchange of gradients, not a late rank: raise "
        "`--step-tokens`, or use a faster network",
        "padding": padding_remedy(config, task),
    }


def log_beginning(
    config: TrainConfig, task: Task, learner: Learner, device: torch.device, step: int
) -> None:
    """Log the model, the data, the steps and the folder of a run that goes on after a step."""
    model, manifest = learner.model, task.manifest
    train = manifest.split("train")
    epoch = epoch_of(config, manifest, on_gpu=device.type != "cpu")
    embeddings = {p for part in model.modules() if is_embedding(part) for p in part.parameters()}
    parameters = sum(weight.numel() for weight in model.parameters())
    without = parameters - sum(weight.numel() for weight in embeddings)
    _log.info(
        "model: %s, %s parameters (%s without the embedding), %s on %s",
        config.model,
        f"{parameters:,}",
        f"{without:,}",
        learner.precision.name,
        device_name(device),
    )
    _log.info("data: %s, %s tokens of %s", shown(config.shards), f"{train.tokens:,}", task.name)
    lost = train.tokens - round(epoch.tokens)
    if lost > 0:
        _log.warning(
            "rows longer than --sequence-length %s lose their end: about %s tokens, %.1f %%, of "
            "the split train",
            f"{config.sequence_length:,}",
            f"{lost:,}",
            100 * lost / train.tokens,
        )
    _log.info(
        "steps: %s%s of about %s tokens; %.3g epochs",
        f"{step + 1:,} to " if step else "",
        f"{config.steps:,}",
        f"{round(epoch.tokens / epoch.steps):,}",
        config.steps / epoch.steps,
    )
    _log.info("run: %s", config.run_dir)


class InterimReports:
    """Writes report.json while a run goes on, so that a killed run keeps what it measured.

    Args:
        run_dir: Folder of the run.
        make: Returns the report so far.
    """

    def __init__(self, run_dir: Path, make: Callable[[], Report]) -> None:
        self._run_dir, self._make = run_dir, make
        self._next_s = 0.0
        self._has_begun = self._has_failed = False

    def write(self) -> None:
        """Write a draft if the latest one is old enough. If it fails, as on a full disk, log it."""
        self._has_begun, started_s = True, time.perf_counter()
        if started_s < self._next_s:
            return
        try:
            self._write()
        except OSError as error:
            if not self._has_failed:
                _log.warning("report.json cannot be written, training goes on: %s", error)
            self._has_failed = True
        taken_s = time.perf_counter() - started_s
        self._next_s = started_s + max(SECONDS_BETWEEN, taken_s / MOST_SHARE)

    def write_last(self) -> None:
        """Write a draft after an error, if `write` was ever called.

        The report may be out of reach then: reading from a device that has failed raises.
        """
        if self._has_begun:
            with contextlib.suppress(OSError, RuntimeError):
                self._write()

    def _write(self) -> None:
        dataclasses.replace(self._make(), finished=False).write(self._run_dir)
