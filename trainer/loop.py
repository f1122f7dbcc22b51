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
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfeed.pipeline.errors import ConfigError, ResumeError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.planning.policy import Packed
from tokenfeed.trainer.checkpoint import Checkpoints, Progress, random_state, set_random_state
from tokenfeed.trainer.config import CHECKPOINTS_FOLDER, TrainConfig
from tokenfeed.trainer.model import SIZES, Transformer
from tokenfeed.trainer.objective import evaluate, loss_sum
from tokenfeed.trainer.optimizer import learning_rate, make_optimizer, set_learning_rate
from tokenfeed.trainer.precision import Precision, choose_device, device_name
from tokenfeed.trainer.report import Report, stall_report, versions
from tokenfeed.trainer.stall import make_meter
from tokenfeed.trainer.telemetry import GpuGauge, Metrics, StepLog

__all__ = ["Trainer", "train"]

WARMUP_STEPS = 5
"""Steps left out of speed and stall: workers start, memory is allocated, kernels are compiled."""

_log = logging.getLogger(__name__)


def train(config: TrainConfig, should_stop: Callable[[], bool]) -> Report:
    """Run a whole training; `should_stop` is asked after each step.

    Raises:
        TokenfeedError: Settings, shards, checkpoint or memory do not allow it; one line says why.
    """
    try:
        with contextlib.closing(Trainer(config)) as trainer:
            trainer.train(should_stop)
            return trainer.finish()
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one, too
        if not (isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)):
            raise
        raise ConfigError(
            f"`--micro-batch-tokens`={config.micro_batch_tokens} needs more memory than there is. "
            "Halve it: with --step-tokens unchanged, training is the same."
        ) from error


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches; the loss stays on the device, all else the host knows anyway."""

    loss: Tensor
    targets: int = 0
    tokens: int = 0
    slots: int = 0

    def add(self, loss: Tensor, targets: int, tokens: int, slots: int) -> None:
        """Add one micro-batch, or the sums of another tally."""
        self.loss += loss
        self.targets += targets
        self.tokens += tokens
        self.slots += slots


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
        self.checkpoints = Checkpoints(config.run_dir / CHECKPOINTS_FOLDER)
        self.step = self.saved_step = self.tokens = self.slots = 0
        if config.resume:
            self._resume()
        config.write()
        self.metrics = Metrics(config.run_dir / "metrics.jsonl", keep_until_step=self.step)
        self.gauge = GpuGauge(self.device)
        self.since_log = self._new_tally()
        steps_to_go = config.steps - self.step
        self.stall = make_meter(self.device, min(WARMUP_STEPS, steps_to_go // 2))
        self.last_reading = self.stall.read()

    def train(self, should_stop: Callable[[], bool]) -> None:
        """Train until the last step, or until `should_stop` after some step."""
        config, stall, precision = self.config, self.stall, self.precision
        if self.step == 0:
            self._evaluate()  # finds a broken validation split before the first hour is over
        feed = iter(self.loader)
        for step in range(self.step + 1, config.steps + 1):
            tally = self._new_tally()
            for _ in range(config.accumulation):
                with stall.cause("data"):
                    batch = next(feed)
                with precision.autocast():
                    logits_BTV = self.model(batch["input_ids"])
                    loss = loss_sum(logits_BTV, batch["labels"]) / config.step_tokens
                precision.backward(loss)
                tally.add(loss.detach(), batch.num_targets, batch.num_tokens, batch.num_slots)
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
        """End the loader's workers and close files."""
        self.loader.close()
        self.metrics.close()

    def _after_step(self, step: int, tally: Tally, norm: Tensor) -> None:
        self.step, self.last_norm = step, norm
        self.tokens += tally.tokens
        self.slots += tally.slots
        self.since_log.add(tally.loss, tally.targets, tally.tokens, tally.slots)
        config, last = self.config, step == self.config.steps
        saving = last or step % config.save_every == 0
        if saving or step == 1 or step % config.log_every == 0:
            self._write_log()  # also before saving: a loss that is no number must not be kept
        if last or step % config.eval_every == 0:
            self._evaluate()
        if saving:
            self._save()

    def _write_log(self) -> None:
        """One line on the console and in metrics.jsonl: the one place that waits for the device."""
        with self.stall.cause("log"):
            interval, self.since_log = self.since_log, self._new_tally()
            loss = interval.loss.item() * self.config.step_tokens / max(1, interval.targets)
            if not math.isfinite(loss):
                raise ConfigError(
                    f"the loss is {loss} at step {self.step}. Lower --learning-rate or raise "
                    "--warmup-steps; the latest checkpoint is kept."
                )
            reading = self.stall.read()
            window, self.last_reading = reading.since(self.last_reading), reading
            norm = self.last_norm.item()
            log = StepLog(
                step=self.step,
                loss=loss,
                learning_rate=learning_rate(self.step, self.config),
                gradient_norm=norm if math.isfinite(norm) else None,
                tokens=self.tokens,
                real_tokens_per_s=window.tokens_per_s if window.steps else None,
                stall=window.fraction if window.steps else None,
                gpu=self.gauge.read(),
            )
            self.metrics.write(dataclasses.asdict(log))
            _log.info("%s", log.line(self.config.steps))

    def _evaluate(self) -> None:
        """The loss on the first micro-batches of the validation split, if there is one."""
        validation = self.loader.manifest.splits.get("validation")
        if validation is None:
            return
        with (
            self.stall.cause("evaluation"),
            self._open_split("validation", num_workers=0, epochs=1) as feed,
        ):
            batches = itertools.islice(feed, self.config.eval_batches)
            loss = evaluate(self.model, batches, self.precision)
        self.metrics.write({"step": self.step, "validation_loss": loss})
        _log.info("step %d | validation loss %.4f", self.step, loss)

    def _save(self) -> None:
        """A checkpoint of everything that the next step depends on."""
        progress = Progress(
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
        with self.stall.cause("checkpoint"):
            self.checkpoints.save(progress, state)
        self.saved_step = self.step

    def _resume(self) -> None:
        """Take over the latest checkpoint, if it is one of this model on this data."""
        config = self.config
        progress, state = self.checkpoints.load(self.device)
        if progress.step >= config.steps:
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
            tokens=self.tokens,
            seconds=time.perf_counter() - self._started_s,
            real_tokens_per_s=reading.tokens_per_s,
            padding=1 - self.tokens / self.slots,
            stall=stall_report(reading, self.stall.method),
            loss_first=losses[0],
            loss_last=losses[-1],
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
            batching=Packed(sequence_length=config.sequence_length, rows=config.rows),
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
