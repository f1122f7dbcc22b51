"""The report of a run, finished or under way, read off what it has."""

import dataclasses
import time
from typing import Any

from tokenfeed.trainer.evaluation import Metrics, metrics_by_task
from tokenfeed.trainer.precision import device_name
from tokenfeed.trainer.report import Report, versions

__all__ = ["report_of"]


def report_of(run: Any, metrics: dict[str, Metrics]) -> Report:
    """The report of a `Trainer` so far, with metrics by split; loop.py imports this file."""
    names = [name for name in run.task.parts if name]
    losses = [] if names else run.metrics.values("loss")
    each = {name: run.metrics.values(f"loss/{name}") for name in names}
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
        headspace_tokens_per_s=run.headspace,
        padding=1 - run.agreement.tokens / run.agreement.slots,
        stall=stall.to_dict(),
        efficiency=stall.efficiency(),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        losses={name: (found[0], found[-1]) for name, found in each.items() if found},
        validation_loss_first=validation[0] if validation else None,
        validation_loss_last=validation[-1] if validation else None,
        task=run.task.name,
        metrics=_by_task(metrics, names) if names else dict(metrics),
        best_step=run.judge.best.step if run.judge.best else None,
        model=run.config.model,
        parameters=sum(parameter.numel() for parameter in run.learner.model.parameters()),
        vocabulary_size=run.task.manifest.tokenizer.vocabulary_size,
        device=device_name(run.device),
        precision=run.learner.precision.name,
        remote=remote and dataclasses.asdict(remote),
        versions=versions(),
    )


def _by_task(metrics: dict[str, Metrics], names: list[str]) -> dict[str, dict[str, Metrics]]:
    """By task and split."""
    apart = {split: metrics_by_task(found, names) for split, found in metrics.items()}
    return {
        name: {split: found[name] for split, found in apart.items() if found[name]}
        for name in names
    }
