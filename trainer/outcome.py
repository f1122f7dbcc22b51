"""The lines before a run's first step, and its report, made from the trainer's state."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.trainer.batching import padding_remedy
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.data_sets import shown
from tokenfeed.trainer.defaults import epoch_of
from tokenfeed.trainer.evaluation import Metrics
from tokenfeed.trainer.optimizer import is_embedding
from tokenfeed.trainer.precision import device_name
from tokenfeed.trainer.report import Report, versions

__all__ = ["log_beginning", "remedies", "report_of"]

_log = logging.getLogger(__name__)


def remedies(config: TrainConfig, task: Any) -> Mapping[str, str]:
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


def log_beginning(run: Any) -> None:
    """Log what a `Trainer` is about to train, on what, for how long, and where results go."""
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


def report_of(run: Any, metrics: dict[str, Metrics]) -> Report:
    """The report of a `Trainer` so far, with metrics by split. `run` is not typed, since loop.py
    imports this file."""
    losses = run.metrics.values("loss")
    validation = run.metrics.values("validation_loss")
    earlier: Report | None = run.earlier
    stall = run.stall.report(earlier.stall if earlier else None)
    manifest = run.task.manifest
    return Report(
        run_dir=str(run.config.run_dir),
        finished=run.is_finished,
        parts=1 + (earlier.parts if earlier else 0),
        steps=run.step,
        skipped_steps=sum(run.metrics.values("skipped_steps")),
        tokens=run.agreement.tokens,
        seconds=time.perf_counter() - run.started_s + (earlier.seconds if earlier else 0.0),
        real_tokens_per_s=stall.real_tokens_per_s,
        padding=1 - run.agreement.tokens / run.agreement.slots if run.step else 0.0,
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
