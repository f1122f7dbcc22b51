"""A training from its first step to its report.

`trainer/step.py` trains. `parts.py` has what happens occasionally between two steps. This file puts
them together: it begins or resumes the run, asks the parts after each step, and ends the run.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.pipeline.feeding.placement import cores_per_rank
from tokenfeed.pipeline.planning.state import with_micro_batches
from tokenfeed.trainer.checkpoints.async_saver import Saver
from tokenfeed.trainer.config.memory import collections_at_log_lines
from tokenfeed.trainer.config.run_config import Settle, TrainConfig
from tokenfeed.trainer.data.datasets import is_packed
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.loop.evaluation import Evaluator, Sampler
from tokenfeed.trainer.loop.parts import Evaluation, Lines, Part, Saving, Tracing
from tokenfeed.trainer.loop.profile import open_profiler
from tokenfeed.trainer.loop.reporting import Reporter
from tokenfeed.trainer.loop.run_state import Run
from tokenfeed.trainer.loop.uploads import Uploads
from tokenfeed.trainer.report.page import write_page
from tokenfeed.trainer.report.progress_lines import (
    ProgressLog,
    log_beginning,
    remedies,
)
from tokenfeed.trainer.report.recommendations import Readings
from tokenfeed.trainer.report.run_files import MetricsFile, Report, Trackers
from tokenfeed.trainer.stall import StallMeter, warmup_steps
from tokenfeed.trainer.step import train_steps
from tokenfeed.trainer.tasks.task import Metrics

_LARGEST_JUMP = 0.1
"""Relative change of the learning rate on a resume that needs no warning."""

_log = logging.getLogger(__name__)


class Trainer(Run):
    """A run with its parts."""

    def __init__(
        self, config: TrainConfig, world: World | None = None, settle: Settle | None = None
    ) -> None:
        """See `Run`."""
        super().__init__(config, world, settle)
        config, learner, loaders = self.config, self.learner, self.loaders
        self.evaluator = Evaluator(config, loaders, learner, self.world, self.is_stopped)
        self.sampler = Sampler(config, learner, loaders) if config.samples else None
        has_copy = config.upload and self.world.is_main
        self.uploads = Uploads(config, self.checkpoints) if has_copy else None
        self.saver: Saver | None = None
        if config.shard_model or self.world.is_main:
            gather = self.world.slow_gather() if config.shard_model else lambda value: [value]
            self.saver = Saver(
                self.checkpoints,
                config.keep,
                self.device,
                self.world.rank,
                gather,
                compress=config.compress_checkpoints,
                on_saved=self.uploads.start if self.uploads else lambda: None,
            )
        self.reporter = Reporter(self, self.evaluator)
        self.evaluation = Evaluation(self, self.evaluator, self.sampler)
        self.saving = Saving(self, self.saver, self.evaluation, self.reporter)
        self.lines = Lines(self, self.saving, self.reporter)
        self.tracing: list[Part] = []
        self._resources = contextlib.ExitStack()
        self._resources.callback(self.loader.close)
        if self.saver:
            self._resources.callback(self.saver.close)

    @property
    def parts(self) -> list[Part]:
        """The parts that may run after this step, in order; see `parts.py`."""
        if self.stops_early:
            return [self.lines, self.saving, self.evaluation, *self.tracing]
        return [self.lines, self.evaluation, self.lines, self.saving, *self.tracing]

    def train(
        self, should_stop: Callable[[], bool], should_save: Callable[[], bool] = bool
    ) -> None:
        """Train until the last step, or until a stop is requested.

        Args:
            should_stop: Returns whether to save and end. Called after each step, and before each
                micro-batch of an evaluation.
            should_save: Returns whether to save. Called after each step.
        """
        self.should_stop = should_stop
        self._begin()
        if self.step_sync.stop:
            return
        profiler = open_profiler(self.config, self.step) if self.world.is_main else None
        self.tracing = [Tracing(self, profiler.step)] if profiler else []
        with profiler or contextlib.nullcontext(), collections_at_log_lines():
            for trained in train_steps(
                self.learner,
                iter(self.loader),
                self.loaders.shape,
                range(self.step + 1, self.config.steps + 1),
                charge=self.stall.cause,
                before_update=self.saver.before_update if self.saver else lambda: None,
            ):
                self.step, tally = trained.step, trained.tally
                is_late = self.saving.is_late()
                requests = {"save": should_save() or is_late, "stop": self.should_stop()}
                counts = self.step_sync.after_step(
                    **requests, tokens=tally.tokens, slots=tally.slots
                )
                self.stall.step(*counts)
                self.lines.add(trained)
                if self.step_sync.take_save():
                    self.saving.request()
                self._run_parts()
                if self.step_sync.stop or self.step == self.config.steps:
                    break

    def _run_parts(self) -> None:
        """Run the parts that are due after this step."""
        for part in self.parts:
            if not part.due(self.step):
                continue
            try:
                part.run(self.step)
            except Exception:
                is_lost = part is self.evaluation and self.saving.due(self.step)
                if is_lost and not self.config.shard_model:  # sharded ranks must save together
                    self.saving.run(self.step)
                raise

    def try_steps(self, count: int) -> list[float]:
        """Train some steps, and return their seconds. Write nothing.

        A step before them is not counted: it allocates memory and starts workers. The weights
        change, so no run can follow.
        """
        if self.config.compile:
            self.learner.compile(*self.loaders.blanks())
        seconds, began_s = [], time.perf_counter()
        steps = range(1, count + 2)
        for _ in train_steps(self.learner, iter(self.loader), self.loaders.shape, steps):
            if self.device.type != "cpu":
                cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
        return seconds[1:]

    def finish(self) -> Report:
        """Save what a stop left unsaved, and write the report. Call this after `train`."""
        if self.progress_log.is_behind:
            self.lines.run(self.step)
        if self.saving.saved != self.step:
            self.saving.run(self.step)
        self.saving.wait()
        self.step_sync.wait()
        self.gather_stall()
        report = self.reporter.of_finished() or self.reporter.report(self._final_metrics())
        if self.world.is_main:
            report.write(self.config.run_dir)
            write_page(self.config.run_dir)
        if self.config.upload:
            self.world.run_slow(self.uploads.finish if self.uploads else lambda: None)
        if self.world.is_main:
            self.reporter.check_learnt()
        return report

    def _final_metrics(self) -> dict[str, Metrics]:
        """Return metrics by split: of the best weights if they are known, else of the last."""
        best = self.evaluator.best
        found = {"validation": best.metrics} if best else {}
        if self.step == self.config.steps and self.evaluator.has("test"):
            if best and best.step != self.step:
                self.learner.load_weights(self.open_checkpoint(best.step))
            known = self.known_metrics("test")
            found["test"] = known or self.evaluator.evaluate("test", self.step, self.metrics)
        return {split: metrics for split, metrics in found.items() if metrics}

    def close(self) -> None:
        """Stop the loader's workers, wait for a checkpoint that is being written, close files, and
        unlock the run's folder."""
        self._resources.close()

    def _begin(self) -> None:
        """Lock the run's folder, resume if requested, compile, and evaluate.

        So a broken validation split is found, and everything is compiled, before the first step.
        """
        config = self.config
        self.metrics = self._open_metrics() if self.world.is_main else None
        if config.resume:
            self._resume()
        shape, loader = self.loaders.shape, self.loader
        if self.world.is_main:
            log_beginning(config, self.learner, shape, self.epoch, loader, self.step)
        if config.compile:
            self.learner.compile(*self.loaders.blanks())
        if self.metrics:
            self.checkpoints.delete_unfinished()
            self.metrics.keep(until_step=self.step if config.resume else -1)
            self._write_config()
            self._warn_of_jump(self.metrics.read())
        self.stall = StallMeter(
            self.device,
            skipped_steps=warmup_steps(config.steps - self.step),
            operations_per_token=self.learner.operations_per_token(self._row_length()) or None,
            devices=self.world.size,
            remedies=remedies(config, self.task),
        )
        self._resources.callback(self.stall.close)
        readings = Readings(
            workers=self.loader.num_workers,
            cores=cores_per_rank(),
            accumulation=ceil_div(config.accumulation, self.world.size),
            micro_batch_tokens=config.micro_batch_slots,
            state_bytes=self.learner.state_bytes // self.learner.ranks,
        )
        self.progress_log = ProgressLog(
            self.metrics,
            self.stall,
            self.learner,
            config.steps,
            int(self.learner.precision.skips[0]) if self.step else 0,
            readings,
            config.phase,
        )
        if self.evaluation.due(self.step):
            self.evaluation.run(self.step)

    def _row_length(self) -> float:
        """Return the slots of a packed row, or the tokens of an average padded row."""
        if is_packed(self.config, self.task.manifest):
            return self.config.sequence_length
        split = self.task.manifest.split("train")
        return min(self.config.sequence_length, split.tokens / split.rows)

    def _write_config(self) -> None:
        """Log the settings that a resumed run changes, after all checks. Save all settings."""
        with contextlib.suppress(ConfigError):  # a damaged config.yaml is replaced
            begun = TrainConfig.of_run(self.config.run_dir) if self.config.resume else None
            for line in self.config.changes(begun) if begun else ():
                _log.info("%s", line)
        self.config.write()

    def _warn_of_jump(self, lines: list[dict[str, Any]]) -> None:
        """Warn if changed settings of a resumed run make the learning rate jump."""
        rates = [line["learning_rate"] for line in lines if line.get("learning_rate")]
        now = self.learner.rate(self.step) if self.step else 0.0
        if not rates or self.step == self.config.steps:
            return
        if abs(now - rates[-1]) > _LARGEST_JUMP * rates[-1]:
            _log.warning(
                "the learning rate jumps from %.2e in step %d to %.2e in step %d: --schedule %s "
                "follows --steps, --warmup-steps and --learning-rate, which changed. With "
                "constant, more --steps make no jump",
                rates[-1],
                self.step,
                self.learner.rate(self.step + 1),
                self.step + 1,
                self.config.schedule,
            )

    def _open_metrics(self) -> MetricsFile:
        trackers = Trackers(self.config)
        metrics = MetricsFile(self.config.run_dir, trackers.log)
        self._resources.callback(metrics.close)
        self._resources.callback(trackers.finish)
        return metrics

    def _resume(self) -> None:
        """Load the latest checkpoint, if it fits this model and data."""
        config = self.config
        checkpoint = self.open_checkpoint()
        progress = checkpoint.meta
        progress.check(config)
        sizes = self.loaders.policy, config.accumulation
        if config.mixing and any(
            progress.config.get(name) not in (None, getattr(config, name))
            for name in ("micro_batch_tokens", "step_tokens")
        ):
            raise ConfigError(
                "`--micro-batch-tokens` and --step-tokens of a run with `mixing` cannot change. "
                f"Leave them out, or give {progress.config['micro_batch_tokens']} and "
                f"{progress.config['step_tokens']}, as in its checkpoint."
            )
        self.loader.load_state_dict(with_micro_batches(progress.loader, *sizes))
        self.learner.load(checkpoint)
        self.earlier_s = progress.figures.seconds if progress.figures else 0.0
        self.step = self.saving.saved = self.began_at = progress.step
        self.evaluator.best = self.world.from_rank_0(self.checkpoints.best)
        self.step_sync.begin(progress.tokens, progress.slots)
