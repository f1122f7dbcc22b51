"""The training loop, and what it does now and then: log, evaluate, save.

`Trainer.train` is the hot part: it moves tensors and decides nothing. The only call in it that can
wait is `next(feed)`; the host reads from the device at progress lines only. Everything occasional
stands behind a step, in a bracket of the stall meter that says what it cost.

Gradients are weighted by real target tokens. Their number in a step is known only at its end, so
each loss is divided by a constant (which keeps fp16 in range) and the sum is corrected once.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.planning.policies import Packed
from tokenfeed.trainer.checkpoint import CheckpointMeta, Checkpoints, random_state, set_random_state
from tokenfeed.trainer.config import TrainConfig
from tokenfeed.trainer.model import SIZES, Transformer
from tokenfeed.trainer.objective import batch_loss, evaluate
from tokenfeed.trainer.optimizer import learning_rate, make_optimizer, set_learning_rate
from tokenfeed.trainer.precision import Precision, all_finite, choose_device, device_name
from tokenfeed.trainer.report import Report, stall_report, versions
from tokenfeed.trainer.stall import make_meter
from tokenfeed.trainer.telemetry import GpuGauge, MetricsFile, StepLog, Tally

__all__ = ["Trainer"]

WARMUP_STEPS = 5
"""Most steps left out of speed and stall: workers start, memory is allocated, kernels are compiled.
Of a short session half the steps, and always the first, which follows the first evaluation."""

_log = logging.getLogger(__name__)


class Trainer:
    """One run: what it trains, where it stands, what it says."""

    def __init__(self, config: TrainConfig) -> None:
        config.check()
        self._started_s = time.perf_counter()
        self.config = config
        self.device = choose_device(config.device)
        self.precision = Precision(config.precision, self.device)
        _check_task(config, Manifest.read(config.shards))
        self.loader = self._open_split("train", num_workers=self._num_workers(), epochs=None)
        self.vocabulary_size = self.loader.manifest.tokenizer.vocabulary_size
        torch.manual_seed(config.seed)
        self.model = Transformer(SIZES[config.model], self.vocabulary_size).to(self.device)
        if config.compile:
            self.model.compile()
        self.optimizer = make_optimizer(self.model, config.weight_decay)
        self.least_slots = config.micro_batch_tokens if config.compile else 0
        self.checkpoints = Checkpoints.of_run(config.run_dir)
        self.gauge = GpuGauge(self.device)
        self.step = self.saved_step = self.tokens = self.slots = 0
        self.since_log = self._new_tally()
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.device)
        self._resources = contextlib.ExitStack()
        self._resources.enter_context(self.loader)

    def train(self, should_stop: Callable[[], bool]) -> None:
        """Train until the last step, or until `should_stop` after some step."""
        self._begin()
        config, stall, precision = self.config, self.stall, self.precision
        feed = iter(self.loader)
        for step in range(self.step + 1, config.steps + 1):
            tally = self._new_tally()
            for _ in range(config.accumulation):
                with stall.cause("data"):
                    batch = next(feed)
                with precision.autocast():
                    loss = batch_loss(self.model, batch, self.least_slots) / config.step_tokens
                precision.backward(loss)
                slots = max(batch.num_slots, self.least_slots)
                tally.add(loss.detach(), batch.num_targets, batch.num_tokens, slots)
            set_learning_rate(self.optimizer, learning_rate(step, config))
            correction = config.step_tokens / max(1, tally.targets)
            norm = precision.step(self.model, self.optimizer, correction, config.clip_norm)
            stall.mark_step(tally.tokens)
            self._after_step(step, tally, norm)
            if should_stop():
                break

    def finish(self) -> Report:
        """Save what a stop left unsaved; write the report."""
        if self.since_log.tokens:
            self._write_log()
        if self.saved_step != self.step:
            self._save()
        report = self._report()
        report.write(self.config.run_dir)
        return report

    def close(self) -> None:
        """End the loader's workers, close files and let go of the run's folder."""
        self._resources.close()

    def _begin(self) -> None:
        """Take the run's folder, go on from its latest checkpoint if that is asked for, evaluate:
        a broken validation split is found, and all is compiled, before the first hour is over."""
        config = self.config
        self.metrics = MetricsFile(config.run_dir)
        self._resources.callback(self.metrics.close)
        if config.resume:
            self._resume()
        self.metrics.keep(until_step=self.step if config.resume else -1)
        config.write()
        self.stall = make_meter(self.device, _warmup_steps(config.steps - self.step))
        self.last_reading = self.stall.read()
        is_missing = not self.metrics.has("validation_loss", self.step)
        self._evaluate(note=is_missing and self._is_evaluated())

    def _after_step(self, step: int, tally: Tally, norm: Tensor) -> None:
        self.step, self.last_norm = step, norm
        self.skipped += ~norm.isfinite()
        self.tokens += tally.tokens
        self.slots += tally.slots
        self.since_log.add(tally.loss, tally.targets, tally.tokens, tally.slots)
        config, last = self.config, step == self.config.steps
        saving = last or step % config.save_every == 0
        if saving or step == 1 or step % config.log_every == 0:
            self._write_log()  # also before saving: a loss that is no number must not be kept
        if saving:
            self._save()
        if self._is_evaluated():
            self._evaluate()  # what it may fail on costs no step: they are saved

    def _is_evaluated(self) -> bool:
        return self.step == self.config.steps or self.step % self.config.eval_every == 0

    def _write_log(self) -> None:
        """One line on the console and in metrics.jsonl: the one place that waits for the device."""
        with self.stall.cause("log"):
            interval, self.since_log = self.since_log, self._new_tally()
            loss = interval.loss.item() * self.config.step_tokens / max(1, interval.targets)
            if not math.isfinite(loss):
                raise self._diverged(f"the loss is {loss}")
            reading = self.stall.read()
            window, self.last_reading = reading.since(self.last_reading), reading
            norm = self.last_norm.item()
            log = StepLog(
                step=self.step,
                loss=loss,
                learning_rate=learning_rate(self.step, self.config),
                gradient_norm=norm if math.isfinite(norm) else None,
                skipped_steps=int(self.skipped.item()),
                tokens=self.tokens,
                real_tokens_per_s=window.tokens_per_s if window.steps else None,
                stall=window.fraction if window.steps else None,
                gpu=self.gauge.read(),
            )
            self.skipped.zero_()
            self.metrics.write(dataclasses.asdict(log))
            _log.info("%s", log.line(self.config.steps))

    def _evaluate(self, *, note: bool = True) -> None:
        """The loss on the first micro-batches of the validation split, if there is one."""
        if "validation" not in self.loader.manifest.splits:
            return
        with (
            self.stall.cause("evaluation"),
            self._open_split("validation", num_workers=0, epochs=1) as feed,
        ):
            batches = itertools.islice(feed, self.config.eval_batches)
            loss = evaluate(self.model, batches, self.precision, self.least_slots)
            if note:
                self.metrics.write({"step": self.step, "validation_loss": loss})
                _log.info("step %d | validation loss %.4f", self.step, loss)

    def _save(self) -> None:
        """A checkpoint of everything that the next step depends on."""
        with self.stall.cause("checkpoint"):
            if not all_finite(self.model):
                raise self._diverged("weights have become infinite")
            progress = CheckpointMeta(
                step=self.step,
                tokens=self.tokens,
                slots=self.slots,
                model=self.config.model,
                vocabulary_size=self.vocabulary_size,
                loader=self.loader.state_dict(),
            )
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.precision.state_dict(),
                "random": random_state(self.device),
            }
            self.checkpoints.save(progress, state)
        self.saved_step = self.step

    def _diverged(self, finding: str) -> ConfigError:
        return ConfigError(
            f"{finding} at step {self.step}. Lower --learning-rate or raise --warmup-steps, and "
            f"{self.checkpoints.way_on()}. If a checkpoint leads here again, delete it to go on "
            "from the one before."
        )

    def _resume(self) -> None:
        """Take over the latest checkpoint, if it is one of this model on this data."""
        config = self.config
        progress, state = self.checkpoints.load(self.device)
        if progress.step > config.steps:
            raise ConfigError(
                f"`--steps`={config.steps}: {config.run_dir} has trained {progress.step} steps "
                "already. Raise it to go on."
            )
        _refuse_difference("--model", progress.model, config.model)
        _refuse_difference("vocabulary size", progress.vocabulary_size, self.vocabulary_size)
        self.loader.load_state_dict(progress.loader)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["scaler"])
        set_random_state(state["random"], self.device)
        self.step = self.saved_step = progress.step
        self.tokens, self.slots = progress.tokens, progress.slots

    def _report(self) -> Report:
        losses = self.metrics.values("loss")
        validation = self.metrics.values("validation_loss")
        reading = self.stall.read()
        return Report(
            run_dir=str(self.config.run_dir),
            finished=self.step == self.config.steps,
            steps=self.step,
            skipped_steps=sum(self.metrics.values("skipped_steps")),
            tokens=self.tokens,
            seconds=time.perf_counter() - self._started_s,
            real_tokens_per_s=reading.tokens_per_s if reading.steps else None,
            padding=1 - self.tokens / self.slots,
            stall=stall_report(reading, self.stall.method),
            loss_first=losses[0] if losses else None,
            loss_last=losses[-1] if losses else None,
            validation_loss_first=validation[0] if validation else None,
            validation_loss_last=validation[-1] if validation else None,
            model=self.config.model,
            parameters=self.model.num_parameters,
            vocabulary_size=self.vocabulary_size,
            device=device_name(self.device),
            precision=self.precision.name,
            versions=versions(),
        )

    def _open_split(self, split: str, *, num_workers: int, epochs: int | None) -> ShardLoader:
        """A loader of packed micro-batches. Validation is shuffled too, each time alike: packing in
        the order of length would let the longest documents alone speak for it."""
        config = self.config
        return ShardLoader(
            config.shards,
            batching=Packed(sequence_length=config.sequence_length, batch_size=config.rows),
            split=split,
            device=self.device,
            num_workers=num_workers,
            seed=config.seed,
            epochs=epochs,
        )

    def _num_workers(self) -> int:
        """As told, or 2 for a GPU and none on the CPU, where they would compete with training."""
        if self.config.num_workers is not None:
            return self.config.num_workers
        return 2 if self.device.type == "cuda" else 0

    def _new_tally(self) -> Tally:
        return Tally(torch.zeros((), device=self.device))


def _warmup_steps(steps: int) -> int:
    return max(1, min(WARMUP_STEPS, steps // 2))


def _refuse_difference(name: str, saved: object, ours: object) -> None:
    if saved != ours:
        raise ResumeError(
            f"cannot resume: the checkpoint has {name} {saved}, this run has {ours}. Use the same, "
            "or start a new run in another --run-dir."
        )


def _check_task(config: TrainConfig, manifest: Manifest) -> None:
    """Without its labels a labelled data set would be learnt as mere text."""
    if manifest.task != "lm":
        raise ConfigError(
            f"{config.shards}: was made for `--task {manifest.task}`, and `train` learns only `lm` "
            "so far. Run `pretokenize --task lm`."
        )
