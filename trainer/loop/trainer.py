"""The training loop, and what it does occasionally: log, evaluate, save.

`Trainer.train` is the hot part: it moves tensors and decides nothing. Its only call that can wait
is the one for the next batch. The host reads from the device at progress lines only. Everything
occasional comes after a step, in a block of the stall meter that measures its cost.

Gradients are weighted by targets. The number of a step's targets is known only at its end, so the
sum is corrected once, there.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from tokenfeed.pipeline.arithmetic import ceil_div
from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.feeding.devices import cuda
from tokenfeed.pipeline.feeding.placement import cores_per_rank
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.format.store import StorePath, open_store
from tokenfeed.pipeline.planning.stages import paths_of
from tokenfeed.pipeline.planning.state import with_micro_batches
from tokenfeed.pipeline.text import count_of
from tokenfeed.pipeline.windows.origins import origins_of
from tokenfeed.trainer.checkpoints.async_saver import Saver
from tokenfeed.trainer.checkpoints.checkpoint_files import (
    Checkpoint,
    CheckpointMeta,
    Checkpoints,
    Figures,
)
from tokenfeed.trainer.config.run_config import Settle, TrainConfig
from tokenfeed.trainer.data.attention import separation
from tokenfeed.trainer.data.datasets import Epoch, epoch_of, is_packed, training_source
from tokenfeed.trainer.distributed.world import StepSync, World, device_named
from tokenfeed.trainer.loop.evaluation import Evaluator, Sampler
from tokenfeed.trainer.loop.initial_weights import read_initial_weights
from tokenfeed.trainer.loop.loaders import SplitLoaders, choose_micro_batch, fill_step
from tokenfeed.trainer.loop.profile import open_profiler, trace_of
from tokenfeed.trainer.loop.uploads import Uploads
from tokenfeed.trainer.optim.train_state import Learner, Tally
from tokenfeed.trainer.report.page import write_page
from tokenfeed.trainer.report.progress_lines import (
    MOST_SKIPPED,
    NO_TARGET,
    ProgressLog,
    Skips,
    device_name,
    divergence,
    log_beginning,
    machine_means,
    notes_on,
    peak_memory,
    remedies,
)
from tokenfeed.trainer.report.recommendations import Readings, recommended
from tokenfeed.trainer.report.run_files import (
    MetricsFile,
    Report,
    StageTokens,
    Trackers,
    planned_tokens,
    versions,
)
from tokenfeed.trainer.stall import StallMeter, warmup_steps
from tokenfeed.trainer.tasks.registry import task_of
from tokenfeed.trainer.tasks.task import Metrics

_BAD_STEP_FILE = "bad-step.jsonl"
"""Files and records of the first step that was skipped."""
_LARGEST_JUMP = 0.1
"""Relative change of the learning rate on a resume that needs no warning."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, as in malloc.h."""
_LARGEST_IN_HEAP = 32 << 20
"""The largest value that glibc accepts. Larger blocks still go back at once."""
_KEPT_BYTES = 1 << 30
SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")

_log = logging.getLogger(__name__)


class Trainer:
    """One run: its parts, its progress and its loop."""

    metrics: MetricsFile | None
    """None on ranks other than 0, like `saver` if weights are whole."""
    stall: StallMeter
    progress_log: ProgressLog
    last_norm: Tensor
    """`train` sets these. Before, the run has no folder, and nothing is measured."""

    def __init__(
        self, config: TrainConfig, world: World | None = None, settle: Settle | None = None
    ) -> None:
        """
        Args:
            config: The settings.
            world: The ranks. Default: this process alone.
            settle: Returns the settings for the step that fills the devices, which is at most that
                of `config`. None: the step of `config`.
        """
        config.check()
        self.started_s = time.perf_counter()
        self.world = world or World(device_named(config.device))
        self.device = self.world.device
        keep_freed_memory(self.device)
        self.task = task_of(config, self.device)
        self.learner = Learner(config, self.task, self.world, read_initial_weights)
        config = choose_micro_batch(config, self.learner, self.loaders_of, self.world)
        if settle:
            config = fill_step(config, settle, self.world)
        self.learner.use(config)
        self.config, self.loaders = config, self.loaders_of(config)

        self.loader = self.loaders.train_loader()
        self.evaluator = Evaluator(config, self.loaders, self.learner, self.world, self._is_stopped)
        self.sampler = Sampler(config, self.learner, self.loaders) if config.samples else None
        self.checkpoints = Checkpoints.of_run(config.run_dir)
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
        self.step = self.saved_step = self.began_at = self.skipped = 0
        self.earlier_s = 0.0
        """Wall time of the run's earlier sessions, until the checkpoint that this one resumes."""
        self.rows_of_steps = deque[tuple[int, np.ndarray]](
            maxlen=config.accumulation * (MOST_SKIPPED + config.log_every)
        )
        """Step and rows of the latest micro-batches, to name the records of a skipped step."""
        self.has_named_records = False
        self.seconds_of = dict.fromkeys(("evaluation", "checkpoint"), 0.0)
        """Seconds of the loop that were lost to each of them."""
        self.step_sync = StepSync(self.world)
        self._should_stop: Callable[[], bool] = bool

        self._resources = contextlib.ExitStack()
        self._resources.callback(self.loader.close)
        if self.saver:
            self._resources.callback(self.saver.close)

    def loaders_of(self, config: TrainConfig) -> SplitLoaders:
        """Return the loaders of the run with some settings."""
        dtype = self.learner.precision.dtype
        apart_by = separation(self.device, dtype, compiled=bool(config.compile))
        return SplitLoaders(config, self.task, self.device, separation=apart_by)

    def train(
        self, should_stop: Callable[[], bool], should_save: Callable[[], bool] = bool
    ) -> None:
        """Train until the last step, or until a stop is requested.

        Args:
            should_stop: Returns whether to save and end. Called after each step, and before each
                micro-batch of an evaluation.
            should_save: Returns whether to save. Called after each step.
        """
        self._should_stop = should_stop
        self._begin()
        self._profiler = open_profiler(self.config, self.step) if self.world.is_main else None
        if not self.step_sync.stop:
            with self._profiler or contextlib.nullcontext(), _collections_at_log_lines():
                self._train(should_save)

    def _train(self, should_save: Callable[[], bool]) -> None:
        config, batches = self.config, iter(self.loader)
        learner, stall, shape = self.learner, self.stall, self.loaders.shape
        step_sync, is_sharded = self.step_sync, config.shard_model and self.world.size > 1
        for step in range(self.step + 1, config.steps + 1):
            tally = Tally.zero(self.device)
            number, ends_step = step * config.accumulation + self.world.rank, False
            while not ends_step:
                with stall.cause("data"):
                    batch = next(batches)
                ends_step = batch.ends_step
                micro_batch = shape(batch)
                if is_sharded:  # wait for late ranks here: within the step it would show as work
                    with stall.cause("communication"):
                        self.world.all_reduce([torch.zeros((), device=self.device)])
                learner.draw_for(number)
                waiting = stall.cause("communication")
                loss = learner.add_gradients(micro_batch, last=ends_step, waiting=waiting)
                tally.add(loss, batch.num_tokens, 0 if batch.is_filler else micro_batch.num_slots)
                self.rows_of_steps.append((step, batch.rows))
                number += self.world.size
            if self.world.size > 1:  # gradients are summed already
                with stall.cause("communication"):
                    self.world.all_reduce([tally.loss, tally.targets])
            if self.saver:
                self.saver.before_update()
            norm = learner.step(step, tally.loss, tally.targets)
            requests = {"save": should_save(), "stop": self._should_stop()}
            counts = step_sync.after_step(**requests, tokens=tally.tokens, slots=tally.slots)
            stall.step(*counts)
            self._after_step(step, tally, norm)
            if step_sync.stop or step == self.config.steps:
                break

    def try_steps(self, count: int) -> list[float]:
        """Train some steps, and return their seconds. Write nothing.

        A step before them is not counted: it allocates memory and starts workers. The weights
        change, so no run can follow.
        """
        learner, batches, seconds = self.learner, iter(self.loader), []
        if self.config.compile:
            learner.compile(*self.loaders.blanks())
        for step in range(1, count + 2):
            began_s = time.perf_counter()
            tally, ends_step = Tally.zero(self.device), False
            while not ends_step:
                batch = next(batches)
                ends_step, micro_batch = batch.ends_step, self.loaders.shape(batch)
                loss = learner.add_gradients(micro_batch, last=ends_step)
                tally.add(loss, batch.num_tokens, micro_batch.num_slots)
            self.world.all_reduce([tally.loss, tally.targets])
            learner.step(step, tally.loss, tally.targets)
            if self.device.type != "cpu":
                cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began_s)
        return seconds[1:]

    def finish(self) -> Report:
        """Save what a stop left unsaved, and write the report. Call this after `train`."""
        if self.progress_log.is_behind:
            self._write_log()
        if self.saved_step != self.step:
            self._save()
        self._wait_for_save()
        self.step_sync.wait()
        self._gather_stall()
        report = self._report_of_finished() or self._report(self._final_metrics())
        if self.world.is_main:
            report.write(self.config.run_dir)
            write_page(self.config.run_dir)
        if self.config.upload:
            self.world.run_slow(self.uploads.finish if self.uploads else lambda: None)
        if self.world.is_main:
            self._check_targets()
        return report

    def _check_targets(self) -> None:
        """Raise if no step of the run had a target: neither a loss nor a skip is known.

        Raises:
            ConfigError: The run has learnt nothing.
        """
        lines = [line for line in self.metrics.read() if "learning_rate" in line]  # type: ignore[union-attr]
        if lines and not any("loss" in line or "skipped_steps" in line for line in lines):
            raise ConfigError(
                f"{self.config.run_dir}: no step of the training had a target, so the model has "
                f"learnt nothing. {NO_TARGET}"
            )

    def _report_of_finished(self) -> Report | None:
        """Return the report of a finished run that was started again. It has the stall of the part
        that trained."""
        if self.step > self.began_at:
            return None
        earlier = self.world.from_rank_0(lambda: Report.of_run(self.config.run_dir))
        return earlier if earlier and earlier.finished and earlier.steps == self.step else None

    def _report(self, metrics: dict[str, Metrics]) -> Report:
        """Return the report so far, with metrics of the best weights by split.

        On ranks other than 0, which have no metrics.jsonl, the report has no losses.
        """
        lines = self.metrics.read() if self.metrics else []
        losses, validation, skipped, scales = (
            [line[name] for line in lines if name in line]
            for name in ("loss", "validation_loss", "skipped_steps", "loss_scale")
        )
        step_sync, manifest, stall = self.step_sync, self.task.manifest, self.stall.report()
        delivered = self.loader.stats().epoch_tokens if self.config.mixing else {}
        config, epoch, on_gpu = self.config, self.epoch, self.device.type != "cpu"
        mean_rows = manifest.split("train").rows / epoch.steps
        speed = stall.steps / stall.seconds if stall.seconds else None
        notes = notes_on(self.task, metrics, lines) if self.is_finished else []
        report = Report(
            run_dir=str(self.config.run_dir),
            finished=self.is_finished,
            steps=self.step,
            skipped_steps=sum(skipped),
            loss_scale=scales[-1] if scales else None,
            tokens=step_sync.tokens,
            seconds=time.perf_counter() - self.started_s,
            total_seconds=self.earlier_s + time.perf_counter() - self.started_s,
            real_tokens_per_s=stall.real_tokens_per_s,
            padding=1 - step_sync.tokens / step_sync.slots if self.step else 0.0,
            stall=stall,
            remote=self.loader.stats().remote,
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            validation_loss_first=validation[0] if validation else None,
            validation_loss_last=validation[-1] if validation else None,
            task=self.task.name,
            metrics={split: dict(found) for split, found in metrics.items()},
            notes=notes if config.mixing else [*notes, *divergence(losses)],
            best_step=self.evaluator.best.step if self.evaluator.best else None,
            model=self.config.model,
            parameters=sum(parameter.numel() for parameter in self.learner.model.parameters()),
            trained_parameters=self.learner.trained_parameters,
            vocabulary_size=manifest.tokenizer.vocabulary_size,
            device=device_name(self.device),
            precision=self.learner.precision.name,
            versions=versions(),
            stages=self.planned_stages(sum(delivered.values())),
            delivered=delivered,
            rows_by_length=list(manifest.split("train").length_histogram),
            steps_per_s=speed,
            rows_per_s=speed and speed * mean_rows,
            epoch_seconds=epoch.steps / speed if speed else None,
            step_rows=config.step_rows or mean_rows,
            step_tokens=step_sync.tokens / self.step if self.step else None,
            accumulation=config.accumulation,
            micro_batch_tokens=config.micro_batch_slots,
            num_workers=self.loader.num_workers,
            prefetch=self.loader.prefetch,
            pinned=self.loader.copies_ahead and not self.loader.stats().pageable,
            state_bytes=self.learner.state_bytes // self.learner.ranks,
            peak_gpu_bytes=peak_memory(self.device) if on_gpu else None,
            evaluation_seconds=self.seconds_of["evaluation"],
            checkpoint_seconds=self.seconds_of["checkpoint"],
            machine=machine_means(lines),
            trace=trace_of(config.run_dir),
        )
        named = {advice.cause for advice in stall.advice}
        found = recommended(report.readings).items()
        texts = [text for name, text in found if name not in named]
        return dataclasses.replace(report, recommendations=texts)

    @functools.cached_property
    def epoch(self) -> Epoch:
        """Estimated figures of a pass over the train split."""
        on_gpu = self.device.type != "cpu"
        return epoch_of(self.config, self.task.manifest, on_gpu=on_gpu)

    @contextlib.contextmanager
    def _timed(self, cause: Literal["evaluation", "checkpoint"]) -> Iterator[None]:
        """Charge a block to a cause of stall, and count its seconds."""
        began_s = time.perf_counter()
        with self.stall.cause(cause):
            yield
        self.seconds_of[cause] += time.perf_counter() - began_s

    def planned_stages(self, tokens: int) -> list[StageTokens]:
        """Return what the stages of the data read in this many tokens of the run."""

        def shares(weights: Mapping[StorePath, float]) -> dict[str, float]:
            whole = sum(weights.values())
            return {open_store(path).name: weight / whole for path, weight in weights.items()}

        stages = [(each.until_tokens, shares(each.weights)) for each in self.loader.stages]
        return planned_tokens(stages, tokens)

    def _final_metrics(self) -> dict[str, Metrics]:
        """Return metrics by split: of the best weights if they are known, else of the last."""
        best = self.evaluator.best
        found = {"validation": best.metrics} if best else {}
        if self.step == self.config.steps and self.evaluator.has("test"):
            if best and best.step != self.step:
                self.learner.load_weights(self._open_checkpoint(best.step))
            known = self._known_metrics("test")
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
            self.skipped,
            readings,
            config.phase,
        )
        if self._is_due(config.eval_every):
            self._evaluate()

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
                "follows --steps, --warmup-steps and --learning-rate, which changed. constant, and "
                "wsd before its last fifth, take more --steps without a jump",
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

    def _after_step(self, step: int, tally: Tally, norm: Tensor) -> None:
        self.step, self.last_norm = step, norm
        self.progress_log.add(step, tally, norm)
        config = self.config
        saving = self.step_sync.take_save() or self._is_due(config.save_every)
        if saving or step == 1 or step % config.log_every == 0:
            self._write_log(saving=saving)
        stops = self.step_sync.stop and step < config.steps
        if saving and stops:  # the process may be killed within seconds
            self._save()
        try:
            improves = self._is_due(config.eval_every) and self._evaluate()
        except Exception:
            if saving and not stops and not config.shard_model:  # sharded ranks must save together
                self._save()
            raise
        if improves and self.progress_log.is_behind:  # a resumed run begins a new line there too
            self._write_log(saving=True)
        if (saving or improves) and not stops:
            self._save()
        if self._profiler:
            with self.stall.cause("other"):
                self._profiler.step()

    def _is_due(self, every: int) -> bool:
        return self.step == self.config.steps or self.step % every == 0

    def _write_log(self, *, saving: bool = False) -> None:
        """Write a progress line, and an interim report for the first step, and if a checkpoint
        follows.

        Raises:
            ConfigError: The run has skipped too many steps in a row.
        """
        if self.saver:
            self.saver.check()
        with self.stall.cause("log"):
            self.step_sync.wait()
            skips = self.progress_log.write(self.step, self.step_sync.tokens, self.last_norm)
            # Objects that outlive a line are collected with checkpoints only: this takes longer.
            gc.collect(2 if saving else 1)
            ends = skips is not None and skips.in_a_row >= MOST_SKIPPED
            if not ends:
                self._gather_stall()
                if saving or self.step == 1:
                    self.write_draft()
            if skips:
                self._name_skipped(skips, ends=ends)

    def write_draft(self) -> None:
        """Write report.json while the run goes on, so that a killed run keeps what it measured."""
        if not self.world.is_main:
            return
        try:
            dataclasses.replace(self._report({}), finished=False).write(self.config.run_dir)
        except OSError as error:
            _log.warning("report.json cannot be written, training goes on: %s", error)

    def _gather_stall(self) -> None:
        if self.world.size > 1:
            self.stall.gather(self.world.all_gather)

    def _evaluate(self) -> bool:
        """Evaluate the validation split, if there is one. Return whether this step is the best one
        so far: its weights are then saved, whether or not a checkpoint is due.

        A resumed run reuses the metrics in metrics.jsonl. The weights before the first step cannot
        be the best ones. The evaluation comes before the checkpoint, which records the best step.
        If the run is to stop, it saves first, and the resumed run evaluates. Then the last
        checkpoint does not record its own step as the best one.
        """
        is_again = self.step == self.began_at
        metrics = self._known_metrics("validation") if is_again else {}
        if not metrics:
            with self._timed("evaluation"):
                metrics = self.evaluator.evaluate("validation", self.step, self.metrics)
                if metrics and self.sampler:
                    self._sample(self.sampler)
        if not metrics or not self.step:
            return False
        improves = self.evaluator.note_best(self.step, metrics)
        self._end_without_gain()
        return improves

    def _sample(self, sampler: Sampler) -> None:
        found = sampler.samples()
        for sample in found:
            _log.info("step %d | sample: %r -> %r", self.step, *sample.values())
        if self.metrics:
            self.metrics.write({"step": self.step, "samples": found})

    def _end_without_gain(self) -> None:
        """Make this step the last one if --patience evaluations found no better weights.

        The settings of the run then have this number of steps, so the run is finished.
        """
        config, best = self.config, self.evaluator.best
        if not config.patience or best is None or self.step >= config.steps:
            return
        if self.step - best.step >= config.patience * config.eval_every:
            _log.info(
                "step %d | no better result since step %d: the run ends. Raise --patience %d to go "
                "on",
                self.step,
                best.step,
                config.patience,
            )
            self.config = dataclasses.replace(config, steps=self.step)
            if self.world.is_main:
                self.config.write()

    def _known_metrics(self, split: str) -> Metrics:
        """Return the metrics of a split at this step in metrics.jsonl, on all ranks."""
        return self.world.from_rank_0(
            lambda: self.metrics.evaluation(self.step, split) if self.metrics else {}
        )

    def _is_stopped(self) -> bool:
        """Return whether to end an evaluation early."""
        return self.step_sync.ask(stop=self._should_stop())

    @property
    def is_finished(self) -> bool:
        """Whether all steps are trained and evaluated."""
        return self.step == self.config.steps and not self.evaluator.was_stopped

    def _save(self) -> None:
        """Start to save a checkpoint."""
        with self._timed("checkpoint"):
            self._wait_for_save()
            if self.saver:
                meta = CheckpointMeta(
                    step=self.step,
                    tokens=self.step_sync.tokens,
                    slots=self.step_sync.slots,
                    loader=self.loader.state_dict(),
                    best=self.evaluator.best,
                    config=self.config.as_dict(),
                    figures=self._figures(),
                    tokenizer=self.task.manifest.tokenizer.xxh3,
                )
                self.saver.save(meta, self.learner.state_dict())
        self.saved_step = self.step

    def _figures(self) -> Figures:
        stall = self.stall.report()
        return Figures(
            seconds=self.earlier_s + time.perf_counter() - self.started_s,
            real_tokens_per_s=stall.real_tokens_per_s,
            stall=stall.stall,
            stall_causes={k: part.fraction for k, part in stall.causes.items() if part.fraction},
            peak_memory_bytes=peak_memory(self.device),
            versions=versions(),
        )

    def _wait_for_save(self) -> None:
        """Wait until the previous checkpoint is on the disk, on all ranks."""
        self.world.run_slow(self.saver.wait if self.saver else lambda: None)

    def _name_skipped(self, skips: Skips, *, ends: bool) -> None:
        """Log the records of the first skipped step, once per session. If the run ends, raise.

        If that step was before the run was resumed, take the first step since.

        Raises:
            ConfigError: `ends` is true.
        """
        if self.has_named_records and not ends:
            return
        self.has_named_records = True
        step, named = max(skips.first, self.rows_of_steps[0][0]), "see rank 0"
        own = [rows for number, rows in self.rows_of_steps if number == step]
        rows = np.concatenate(self.world.all_gather(np.concatenate(own)))
        if self.world.is_main:
            with contextlib.suppress(TokenfeedError, OSError):  # records may be gone
                named = f"its records, {self._write_records(rows)}"
        if not ends:
            reason = "its loss or gradients are not finite"
            _log.warning("step %d was skipped: %s; %s", step, reason, named)
            return
        if self.saver:
            self.saver.wait_after_error()
        other = "or take --precision fp32, " if self.learner.precision.is_scaled else ""
        again = "If the run fails again from there, delete that checkpoint to use the one before."
        raise ConfigError(
            f"loss or gradients are not finite, {count_of(skips.in_a_row, 'step')} in a row, from "
            f"step {skips.first} on. Lower --learning-rate or raise --warmup-steps, {other}and "
            f"{self.checkpoints.way_on()}. {f'{again} ' if self.checkpoints.latest() else ''}"
            f"Step {step}: {named}."
        )

    def _write_records(self, rows: np.ndarray) -> str:
        """Write the origin of each row to bad-step.jsonl, and return words for a message. Rows are
        numbers in the train split, counted through all data sets."""
        sources = open_splits(paths_of(training_source(self.config)), "train")
        rows = np.unique(rows)
        whole = np.zeros(len(rows), np.int64)
        places = origins_of(sources, rows, whole, whole)
        keys = ("file", "record", "data_set", "row")
        lines = [json.dumps({key: getattr(each, key) for key in keys}) for each in places]
        path = self.config.run_dir / _BAD_STEP_FILE
        atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
        return f"{places[0].file} record {places[0].record} and others, are listed in {path}"

    def _resume(self) -> None:
        """Load the latest checkpoint, if it fits this model and data."""
        config = self.config
        checkpoint = self._open_checkpoint()
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
        self.skipped = int(self.learner.precision.skips[0])
        self.earlier_s = progress.figures.seconds if progress.figures else 0.0
        self.step = self.saved_step = self.began_at = progress.step
        self.evaluator.best = self.world.from_rank_0(self.checkpoints.best)
        self.step_sync.begin(progress.tokens, progress.slots)

    def _open_checkpoint(self, step: int | None = None) -> Checkpoint:
        """Open the checkpoint of a step, or the latest one. Rank 0 verifies it."""

        def verify() -> Checkpoint | None:
            return self.checkpoints.open(step) if self.world.is_main else None

        verified = self.world.run_slow(verify)
        return self.world.from_rank_0(lambda: cast(Checkpoint, verified))


def keep_freed_memory(device: torch.device) -> None:
    """Keep up to 1 GiB of the memory that a step on the CPU frees, for the next step.

    glibc returns large blocks to the system. The next step then gets new pages, which the system
    clears: thousands per step, in a tenth of its processor time. In return, the process stays as
    large as its largest step. Other allocators, and glibc settings in the environment, are not
    changed.
    """
    is_glibc = platform.libc_ver()[0] == "glibc"
    if device.type != "cpu" or not is_glibc or any(name in os.environ for name in SET_BY_USER):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


@contextlib.contextmanager
def _collections_at_log_lines() -> Iterator[None]:
    """Stop Python's garbage collector, which log lines call, for what is made from now on.

    A full collection looks at all objects that imports have made, and if it stops one rank, all
    others wait. Objects that exist now are never looked at again, unless the program has frozen
    objects itself.
    """
    freezes, was_enabled = not gc.get_freeze_count(), gc.isenabled()
    gc.disable()
    if freezes:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
