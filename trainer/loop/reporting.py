"""The report of a run: at its end, and while it goes on."""

import dataclasses
import logging
import time

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.text import count_of
from tokenfeed.trainer.checkpoints.checkpoint_files import Figures
from tokenfeed.trainer.loop.evaluation import Evaluator
from tokenfeed.trainer.loop.profile import trace_of
from tokenfeed.trainer.loop.run_state import Run
from tokenfeed.trainer.report.progress_lines import (
    NO_TARGET,
    device_name,
    divergence,
    machine_means,
    notes_on,
    peak_memory,
)
from tokenfeed.trainer.report.recommendations import recommended
from tokenfeed.trainer.report.run_files import Report, versions
from tokenfeed.trainer.tasks.task import Metrics

_log = logging.getLogger(__name__)


class Reporter:
    """Makes reports of a run."""

    def __init__(self, run: Run, evaluator: Evaluator) -> None:
        self._run, self.evaluator = run, evaluator

    @property
    def is_finished(self) -> bool:
        """Whether all steps are trained and evaluated."""
        return self._run.step == self._run.config.steps and not self.evaluator.was_stopped

    def report(self, metrics: dict[str, Metrics]) -> Report:
        """Return the report so far, with metrics of the best weights by split.

        On ranks other than 0, which have no metrics.jsonl, the report has no losses.
        """
        run = self._run
        lines = run.metrics.read() if run.metrics else []
        losses, validation, skipped, scales = (
            [line[name] for line in lines if name in line]
            for name in ("loss", "validation_loss", "skipped_steps", "loss_scale")
        )
        step_sync, manifest, stall = run.step_sync, run.task.manifest, run.stall.report()
        delivered = run.loader.stats().epoch_tokens if run.config.mixing else {}
        config, epoch, on_gpu = run.config, run.epoch, run.device.type != "cpu"
        mean_rows = manifest.split("train").rows / epoch.steps
        speed = stall.steps / stall.seconds if stall.seconds else None
        notes = notes_on(run.task, metrics, lines) if self.is_finished else []
        report = Report(
            run_dir=str(run.config.run_dir),
            finished=self.is_finished,
            steps=run.step,
            skipped_steps=sum(skipped),
            loss_scale=scales[-1] if scales and run.learner.precision.is_scaled else None,
            tokens=step_sync.tokens,
            seconds=time.perf_counter() - run.started_s,
            total_seconds=run.seconds,
            real_tokens_per_s=stall.real_tokens_per_s,
            padding=1 - step_sync.tokens / step_sync.slots if run.step else 0.0,
            stall=stall,
            remote=run.loader.stats().remote,
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            validation_loss_first=validation[0] if validation else None,
            validation_loss_last=validation[-1] if validation else None,
            task=run.task.name,
            metrics={split: dict(found) for split, found in metrics.items()},
            notes=notes if config.mixing else [*notes, *divergence(losses)],
            best_step=self.evaluator.best.step if self.evaluator.best else None,
            model=run.config.model,
            parameters=sum(parameter.numel() for parameter in run.learner.model.parameters()),
            trained_parameters=run.learner.trained_parameters,
            vocabulary_size=manifest.tokenizer.vocabulary_size,
            device=device_name(run.device),
            precision=run.learner.precision.name,
            versions=versions(),
            delivered=delivered,
            rows_by_length=list(manifest.split("train").length_histogram),
            steps_per_s=speed,
            rows_per_s=speed and speed * mean_rows,
            epoch_seconds=epoch.steps / speed if speed else None,
            step_rows=config.step_rows or mean_rows,
            step_tokens=step_sync.tokens / run.step if run.step else None,
            accumulation=config.accumulation,
            micro_batch_tokens=config.micro_batch_slots,
            num_workers=run.loader.num_workers,
            prefetch=run.loader.prefetch,
            pinned=run.loader.copies_ahead and not run.loader.stats().pageable,
            state_bytes=run.learner.state_bytes // run.learner.ranks,
            peak_gpu_bytes=peak_memory(run.device) if on_gpu else None,
            evaluation_seconds=run.seconds_of["evaluation"],
            checkpoint_seconds=run.seconds_of["checkpoint"],
            machine=machine_means(lines),
            trace=trace_of(config.run_dir),
        )
        named = {advice.cause for advice in stall.advice}
        found = recommended(report.readings).items()
        texts = [text for name, text in found if name not in named]
        return dataclasses.replace(report, recommendations=texts)

    def of_finished(self) -> Report | None:
        """Return the report of a finished run that was started again. It has the stall of the part
        that trained."""
        run = self._run
        if run.step > run.began_at:
            return None
        earlier = run.world.from_rank_0(lambda: Report.of_run(run.config.run_dir))
        return earlier if earlier and earlier.finished and earlier.steps == run.step else None

    def write_draft(self) -> None:
        """Write report.json while the run goes on, so that a killed run keeps what it measured."""
        run = self._run
        if not run.world.is_main:
            return
        try:
            dataclasses.replace(self.report({}), finished=False).write(run.config.run_dir)
        except OSError as error:
            _log.warning("report.json cannot be written, training goes on: %s", error)

    def figures(self) -> Figures:
        """Return the figures of the run that a checkpoint keeps."""
        run = self._run
        stall = run.stall.report()
        return Figures(
            seconds=run.seconds,
            real_tokens_per_s=stall.real_tokens_per_s,
            stall=stall.stall,
            stall_causes={k: part.fraction for k, part in stall.causes.items() if part.fraction},
            peak_memory_bytes=peak_memory(run.device),
            versions=versions(),
        )

    def check_learnt(self) -> None:
        """Raise if no step of the run had a target, or if all steps of a finished run were skipped.

        Raises:
            ConfigError: The run has learnt nothing.
        """
        run, none = self._run, "so the model has learnt nothing."
        lines = [line for line in run.metrics.read() if "learning_rate" in line]  # type: ignore[union-attr]
        if lines and not any("loss" in line or "skipped_steps" in line for line in lines):
            raise ConfigError(
                f"{run.config.run_dir}: no step of the training had a target, {none} {NO_TARGET}"
            )
        skipped = sum(line.get("skipped_steps", 0) for line in lines)
        if skipped and self.is_finished and skipped == run.step:
            fp16 = ", take more --steps or --precision fp32," * run.learner.precision.is_scaled
            raise ConfigError(
                f"{run.config.run_dir}: loss or gradients of all {count_of(skipped, 'step')} are "
                f"not finite, {none} Lower --learning-rate{fp16} or look at the rows that "
                "bad-step.jsonl lists."
            )
