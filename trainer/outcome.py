"""The report of a run, finished or under way, made from the trainer's state."""

import time
from collections.abc import Mapping
from typing import Any

from tokenfeed.pipeline.feeding.stats import RemoteStats
from tokenfeed.trainer.batching import padding_remedy
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.evaluation import Metrics
from tokenfeed.trainer.precision import device_name
from tokenfeed.trainer.report import Report, versions

__all__ = ["remedies", "report_of"]


def remedies(config: TrainConfig, task: Any) -> Mapping[str, str]:
    """Advice by cause, in terms of the options of `train`."""
    return {
        "data": "batches come late: raise `--num-workers`, or read from a faster disk",
        "launch": "kernels are queued more slowly than they run: raise `--micro-batch-tokens`, or "
        "add `--compile`",
        "log": "raise `--log-every`",
        "checkpoint": "raise `--save-every`",
        "evaluation": "raise `--eval-every`, or lower `--eval-batches`",
        "exchange": "most of it is the exchange of gradients, not a late rank: raise "
        "`--step-tokens`, or use a faster network",
        "padding": padding_remedy(config, task),
    }


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
        finished=run.step == run.config.steps,
        parts=1 + (earlier.parts if earlier else 0),
        steps=run.step,
        skipped_steps=sum(run.metrics.values("skipped_steps")),
        tokens=run.agreement.tokens,
        seconds=time.perf_counter() - run.started_s + (earlier.seconds if earlier else 0.0),
        real_tokens_per_s=stall.real_tokens_per_s,
        padding=1 - run.agreement.tokens / run.agreement.slots,
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
