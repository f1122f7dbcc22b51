"""What a training does occasionally, between two steps. Each part says when it is due, and runs.

The trainer asks the parts after each step, in this order: progress lines, evaluation, progress
lines again if a better result made a checkpoint due, checkpoint, trace. If the run is to stop, the
checkpoint comes before the evaluation. A part charges its time to its own cause of stall. To add a
part, write a class with these two methods, and put it into `Trainer.parts`.
"""

import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import numpy as np

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.data_set import open_splits
from tokenfeed.pipeline.format.storage import atomic_write
from tokenfeed.pipeline.planning.stages import paths_of
from tokenfeed.pipeline.text import count_of
from tokenfeed.pipeline.windows.origins import origins_of
from tokenfeed.trainer.checkpoints.async_saver import Saver
from tokenfeed.trainer.checkpoints.checkpoint_files import CheckpointMeta
from tokenfeed.trainer.data.datasets import training_source
from tokenfeed.trainer.loop.evaluation import Evaluator, Sampler
from tokenfeed.trainer.loop.reporting import Reporter
from tokenfeed.trainer.loop.run_state import Run
from tokenfeed.trainer.report.progress_lines import MOST_SKIPPED, Skips
from tokenfeed.trainer.step import Trained

_BAD_STEP_FILE = "bad-step.jsonl"
"""Files and records of the first step that was skipped."""
_MOST_SECONDS = 900
"""A checkpoint is due after this time without one, however many steps --save-every has. A run that
is killed loses no more than that."""

_log = logging.getLogger(__name__)


class Part(Protocol):
    """Something that happens after some steps."""

    def due(self, step: int) -> bool:
        """Return whether the part is to run after this step."""
        ...

    def run(self, step: int) -> None:
        """Do it."""
        ...


class Evaluation:
    """Evaluates the validation split, notes the best step, and ends a run that does not improve.

    The evaluation comes before the checkpoint, which records the best step. If the run is to stop,
    it saves first, and the resumed run evaluates. Then the last checkpoint does not record its own
    step as the best one.
    """

    def __init__(self, run: Run, evaluator: Evaluator, sampler: Sampler | None) -> None:
        self._run, self._evaluator, self._sampler = run, evaluator, sampler
        self.improved: int | None = None
        """The latest step whose weights are the best so far: to be saved, whether or not a
        checkpoint is due."""

    def due(self, step: int) -> bool:
        """See `Part`."""
        return self._run.is_due(step, self._run.config.eval_every)

    def run(self, step: int) -> None:
        """Evaluate. A resumed run reuses the metrics in metrics.jsonl. The weights before the first
        step cannot be the best ones."""
        run = self._run
        metrics = run.known_metrics("validation") if step == run.began_at else {}
        if not metrics:
            with run.timed("evaluation"):
                metrics = self._evaluator.evaluate("validation", step, run.metrics)
                if metrics and self._sampler:
                    self._sample(step, self._sampler)
        if metrics and step:
            if self._evaluator.note_best(step, metrics):
                self.improved = step
            self._end_without_gain(step)

    def _sample(self, step: int, sampler: Sampler) -> None:
        found = sampler.samples()
        for sample in found:
            _log.info("step %d | sample: %r -> %r", step, *sample.values())
        if self._run.metrics:
            self._run.metrics.write({"step": step, "samples": found})

    def _end_without_gain(self, step: int) -> None:
        """Make this step the last one if --patience evaluations found no better weights.

        The settings of the run then have this number of steps, so the run is finished.
        """
        run, best = self._run, self._evaluator.best
        config, since = run.config, best.step if best else 0
        if not config.patience or step >= config.steps:
            return
        if step - since >= config.patience * config.eval_every:
            why, remedy = (
                f"no better result since step {since}",
                f"Raise --patience {config.patience}",
            )
            if best is None:
                why = "no evaluation had a finite result"
                remedy = "Lower --learning-rate, take --precision fp32, or set --patience 0"
            _log.info("step %d | %s: the run ends. %s to go on", step, why, remedy)
            run.config = dataclasses.replace(config, steps=step)
            if run.world.is_main:
                run.config.write()


class Saving:
    """Saves checkpoints: at intervals of steps and of time, on request, and of the best step."""

    def __init__(
        self, run: Run, saver: Saver | None, evaluation: Evaluation, reporter: Reporter
    ) -> None:
        """
        Args:
            run: The run.
            saver: Writes the checkpoints. None on ranks that write nothing.
            evaluation: Knows the best step.
            reporter: Knows the figures of the run so far.
        """
        self._run, self.saver = run, saver
        self._evaluation, self._reporter = evaluation, reporter
        self._is_requested = False
        self.saved = 0
        """The latest step whose checkpoint was started."""
        self._since_s = monotonic()

    def is_late(self) -> bool:
        """Return whether to request a checkpoint because the latest one is old: on rank 0, once in
        `_MOST_SECONDS`, unless a checkpoint is still being written."""
        if not self.saver or not self._run.world.is_main:
            return False
        if monotonic() - self._since_s < _MOST_SECONDS:
            return False
        self._since_s = monotonic()
        return not self.saver.is_writing

    def request(self) -> None:
        """Make a checkpoint due after this step."""
        self._is_requested = True

    def due(self, step: int) -> bool:
        """See `Part`."""
        is_new = self._evaluation.improved == step
        every = self._run.config.save_every
        return self.saved != step and (
            self._is_requested or is_new or self._run.is_due(step, every)
        )

    def run(self, step: int) -> None:
        """Start to save a checkpoint."""
        run = self._run
        with run.timed("checkpoint"):
            self.wait()
            if self.saver:
                meta = CheckpointMeta(
                    step=step,
                    tokens=run.step_sync.tokens,
                    slots=run.step_sync.slots,
                    loader=run.loader.state_dict(),
                    best=self._reporter.evaluator.best,
                    config=run.config.as_dict(),
                    figures=self._reporter.figures(),
                    tokenizer=run.task.manifest.tokenizer.xxh3,
                )
                self.saver.save(meta, run.learner.state_dict())
        self.saved, self._is_requested, self._since_s = step, False, monotonic()

    def wait(self) -> None:
        """Wait until the previous checkpoint is on the disk, on all ranks."""
        self._run.world.run_slow(self.saver.wait if self.saver else lambda: None)


class SkippedSteps:
    """Remembers the rows of the latest steps, to name the records of a skipped one."""

    def __init__(self, run: Run, saving: Saving) -> None:
        self._run, self._saving = run, saving
        most = MOST_SKIPPED + run.config.log_every
        self._rows_of_steps = deque[tuple[int, Sequence[np.ndarray]]](maxlen=most)
        """The latest steps, and the rows of each of their micro-batches."""
        self._has_named = False

    def add(self, step: int, rows: Sequence[np.ndarray]) -> None:
        """Add the rows of the micro-batches of a step."""
        self._rows_of_steps.append((step, rows))

    def name(self, skips: Skips, *, ends: bool) -> None:
        """Log the records of the first skipped step, once per session. If the run ends, raise.

        If that step was before the run was resumed, take the first step since.

        Raises:
            ConfigError: `ends` is true.
        """
        if self._has_named and not ends:
            return
        self._has_named, run = True, self._run
        step, named = max(skips.first, self._rows_of_steps[0][0]), "see rank 0"
        own = dict(self._rows_of_steps)[step]
        rows = np.concatenate(run.world.all_gather(np.concatenate(own)))
        if run.world.is_main:
            with contextlib.suppress(TokenfeedError, OSError):  # records may be gone
                named = f"its records, {self._write_records(rows)}"
        if not ends:
            reason = "its loss or gradients are not finite"
            _log.warning("step %d was skipped: %s; %s", step, reason, named)
            return
        if self._saving.saver:
            self._saving.saver.wait_after_error()
        other = "or take --precision fp32, " if run.learner.precision.is_scaled else ""
        again = "If the run fails again from there, delete that checkpoint to use the one before."
        raise ConfigError(
            f"loss or gradients are not finite, {count_of(skips.in_a_row, 'step')} in a row, from "
            f"step {skips.first} on. Lower --learning-rate or raise --warmup-steps, {other}and "
            f"{run.checkpoints.way_on()}. {f'{again} ' if run.checkpoints.latest() else ''}"
            f"Step {step}: {named}."
        )

    def _write_records(self, rows: np.ndarray) -> str:
        """Write the origin of each row to bad-step.jsonl, and return words for a message. Rows are
        numbers in the train split, counted through all data sets."""
        config = self._run.config
        sources = open_splits(paths_of(training_source(config)), "train")
        rows = np.unique(rows)
        whole = np.zeros(len(rows), np.int64)
        places = origins_of(sources, rows, whole, whole)
        keys = ("file", "record", "data_set", "row")
        lines = [json.dumps({key: getattr(each, key) for key in keys}) for each in places]
        path = config.run_dir / _BAD_STEP_FILE
        atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
        return f"{places[0].file} record {places[0].record} and others, are listed in {path}"


class Lines:
    """Writes progress lines, and an interim report for the first step and beside checkpoints.

    The host reads from the device here only.
    """

    def __init__(self, run: Run, saving: Saving, reporter: Reporter) -> None:
        self._run, self._saving, self._reporter = run, saving, reporter
        self._skipped = SkippedSteps(run, saving)

    def add(self, trained: Trained) -> None:
        """Add a step to the next line."""
        self._skipped.add(trained.step, trained.tally.rows)
        self._run.progress_log.add(*trained)

    def due(self, step: int) -> bool:
        """See `Part`."""
        is_step = step == 1 or step % self._run.config.log_every == 0
        return self._run.progress_log.is_behind and (is_step or self._saving.due(step))

    def run(self, step: int) -> None:
        """Write a line.

        Raises:
            ConfigError: The run has skipped too many steps in a row.
        """
        run, saving = self._run, self._saving.due(step)
        if self._saving.saver:
            self._saving.saver.check()
        with run.stall.cause("log"):
            run.step_sync.wait()
            skips = run.progress_log.write(step, run.step_sync.tokens)
            # Objects that outlive a line are collected with checkpoints only: this takes longer.
            run.stall.collect(2 if saving else 1)
            ends = skips is not None and skips.in_a_row >= MOST_SKIPPED
            if not ends:
                run.gather_stall()
                if saving or step == 1:
                    self._reporter.write_draft()
            if skips:
                self._skipped.name(skips, ends=ends)


class Tracing:
    """Steps the profiler of --profile."""

    def __init__(self, run: Run, advance: Callable[[], None]) -> None:
        self._run, self._advance = run, advance

    def due(self, step: int) -> bool:
        """See `Part`."""
        return True

    def run(self, step: int) -> None:
        """Begin or end the trace, if its time has come."""
        with self._run.stall.cause("other"):
            self._advance()
