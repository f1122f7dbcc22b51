"""The log lines before a run's first step, its report, and drafts of the report on the way."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.trainer.batching import padding_remedy
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.data_sets import shown
from tokenfeed.trainer.defaults import epoch_of
from tokenfeed.trainer.evaluation import Metrics
from tokenfeed.trainer.optimizer import is_embedding
from tokenfeed.trainer.precision import device_name
from tokenfeed.trainer.report import Report, versions
from tokenfeed.trainer.tasks.task import Task

if TYPE_CHECKING:
    from tokenfeed.trainer.loop import Trainer

__all__ = ["DraftReports", "log_beginning", "remedies", "report_of"]

_SECONDS_BETWEEN = 30.0
_MOST_SHARE = 0.001
"""Largest share of the time that drafts may take."""

_log = logging.getLogger(__name__)


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


def log_beginning(run: "Trainer") -> None:
    """Log the model, the data, the steps and the folder of a run before its first step."""
    config, model, manifest = run.config, run.learner.model, run.task.manifest
    train = manifest.split("train")
    epoch = epoch_of(config, manifest, on_gpu=run.device.type != "cpu")
    embeddings = {p for part in model.modules() if is_embedding(part) for p in part.parameters()}
    parameters = sum(weight.numel() for weight in model.parameters())
    without = parameters - sum(weight.numel() for weight in embeddings)
    _log.info(
        "model: %s, %s parameters (%s without the embedding), %s on %s",
        config.model,
        f"{parameters:,}",
        f"{without:,}",
        run.learner.precision.name,
        device_name(run.device),
    )
    _log.info("data: %s, %s tokens of %s", shown(config.shards), f"{train.tokens:,}", run.task.name)
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
        f"{run.step + 1:,} to " if run.step else "",
        f"{config.steps:,}",
        f"{round(epoch.tokens / epoch.steps):,}",
        config.steps / epoch.steps,
    )
    _log.info("run: %s", config.run_dir)


def report_of(run: "Trainer", metrics: Mapping[str, Metrics]) -> Report:
    """Return the report of a run so far.

    Args:
        run: The run. On ranks other than 0, which have no metrics.jsonl, the report has no losses.
        metrics: Metrics of the best weights by split.
    """
    lines = run.metrics.read() if run.metrics else []
    losses, validation, skipped = (
        [line[name] for line in lines if name in line]
        for name in ("loss", "validation_loss", "skipped_steps")
    )
    earlier, agreement, manifest = run.earlier, run.agreement, run.task.manifest
    stall = run.stall.report(earlier.stall if earlier else None)
    return Report(
        run_dir=str(run.config.run_dir),
        finished=run.is_finished,
        parts=1 + (earlier.parts if earlier else 0),
        steps=run.step,
        skipped_steps=sum(skipped),
        tokens=agreement.tokens,
        seconds=time.perf_counter() - run.started_s + (earlier.seconds if earlier else 0.0),
        real_tokens_per_s=stall.real_tokens_per_s,
        padding=1 - agreement.tokens / agreement.slots if run.step else 0.0,
        stall=stall,
        remote=_remote(run.course.remote, earlier.remote if earlier else None),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        validation_loss_first=validation[0] if validation else None,
        validation_loss_last=validation[-1] if validation else None,
        task=run.task.name,
        metrics={split: dict(found) for split, found in metrics.items()},
        best_step=run.judge.best.step if run.judge.best else None,
        model=run.config.model,
        parameters=sum(parameter.numel() for parameter in run.learner.model.parameters()),
        vocabulary_size=manifest.tokenizer.vocabulary_size,
        device=device_name(run.device),
        precision=run.learner.precision.name,
        versions=versions(),
        rows_by_length=list(manifest.split("train").length_histogram),
    )


def _remote(own: RemoteStats | None, earlier: RemoteStats | None) -> RemoteStats | None:
    return own.with_another(earlier) if own and earlier else own or earlier


class DraftReports:
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
        self._next_s = started_s + max(_SECONDS_BETWEEN, taken_s / _MOST_SHARE)

    def write_last(self) -> None:
        """Write a draft after an error, if `write` was ever called.

        The report may be out of reach then: reading from a device that has failed raises.
        """
        if self._has_begun:
            with contextlib.suppress(OSError, RuntimeError):
                self._write()

    def _write(self) -> None:
        dataclasses.replace(self._make(), finished=False).write(self._run_dir)
