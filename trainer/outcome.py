"""The report of a run, finished or under way, read off what it has."""

import dataclasses
import time
from typing import Any

from tokenfeed.trainer.evaluation import Metrics
from tokenfeed.trainer.precision import device_name
from tokenfeed.trainer.report import Report, versions

__all__ = ["report_of"]


def report_of(run: Any, metrics: dict[str, Metrics]) -> Report:
    """The report of a `Trainer` so far, with metrics by split; loop.py imports this file."""
    losses = run.metrics.values("loss")
    validation = run.metrics.values("validation_loss")
    stall, remote = run.stall.report(), run.course.remote
    return Report(
        run_dir=str(run.config.run_dir),
        finished=run.step == run.config.steps,
        steps=run.step,
        skipped_steps=sum(run.metrics.values("skipped_steps")),
        tokens=run.agreement.tokens,
        seconds=time.perf_counter() - run.started_s,
        real_tokens_per_s=stall.real_tokens_per_s,
        padding=1 - run.agreement.tokens / run.agreement.slots,
        stall=stall.to_dict(),
        efficiency=stall.efficiency(),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        validation_loss_first=validation[0] if validation else None,
        validation_loss_last=validation[-1] if validation else None,
        task=run.task.name,
        metrics=metrics,
        best_step=run.judge.best.step if run.judge.best else None,
        model=run.config.model,
        parameters=sum(parameter.numel() for parameter in run.learner.model.parameters()),
        vocabulary_size=run.task.manifest.tokenizer.vocabulary_size,
        device=device_name(run.device),
        precision=run.learner.precision.name,
        remote=remote and dataclasses.asdict(remote),
        versions=versions(),
    )
