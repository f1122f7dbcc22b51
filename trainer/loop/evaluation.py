"""Evaluate splits: the loss and the scores of the model, on the same rows each time.

Results go to the metrics file and the progress lines. The best step is noted.

Samples show how a model continues the beginnings of validation rows, with the likeliest tokens. A
prompt is the part of a row before its first target, or the first tokens of a document. In a
conversation this is everything before the first reply of the assistant (with `--targets last`, the
last reply), and a sample ends before a stop token. Every rank generates the same samples, because a
sharded model needs all ranks. A model with a cache of keys and values computes only the new tokens,
and a model of one's own the whole row for each. Neither is compiled.
"""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError, TokenfeedError
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.pipeline.windows.rank_slice import TARGETS
from tokenfeed.trainer.checkpoints.checkpoint_files import Best
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import DataSets, first_of, open_tokenizer
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.data.recommended import PROMPT_TOKENS, SAMPLE_TOKENS
from tokenfeed.trainer.distributed.world import World, reshard
from tokenfeed.trainer.loop.loaders import SplitLoaders
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner, is_out_of_memory
from tokenfeed.trainer.report.run_files import INTERVAL, MetricsFile, shown_metrics
from tokenfeed.trainer.tasks.language_modeling import has_hidden
from tokenfeed.trainer.tasks.task import Answers, Metrics, Task

_SECONDS_BETWEEN = 10.0
"""Seconds between two progress lines of an evaluation."""

_LEAST_ROWS, _NORMAL_95 = 5, 1.96
"""Rows from which an interval is computed, and half of its width in standard errors."""

_log = logging.getLogger(__name__)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    micro_batches: Iterable[MicroBatch],
    precision: Precision,
    world: World,
) -> Metrics:
    """Return the metrics of a model on a split; empty if the split has no targets.

    Waits for the device at the end.

    Args:
        model: The model, in training mode, as it is again afterwards.
        task: The task.
        micro_batches: This rank's micro-batches.
        precision: The number format of the computation.
        world: The ranks, which have the rest of the split.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    targets = torch.zeros((), dtype=torch.int64, device=device)
    num_bytes = torch.zeros((), dtype=torch.int64, device=device)
    moments = torch.zeros(4, dtype=torch.float64, device=device)
    """Sums over rows: squared losses, losses times targets, squared targets, rows with targets."""
    answers: list[tuple[Tensor, Tensor]] = []
    model.eval()
    for micro_batch in micro_batches:
        task.begin_pass()
        with precision.autocast():
            if task.kind == "vocabulary":
                losses = task.losses(model, micro_batch)
            else:
                logits = model(micro_batch)
                losses = task.losses_of(logits, micro_batch)
                answers.append((micro_batch.targets, task.predict(logits)))
        losses_B = losses.view(len(losses), -1).sum(1, dtype=torch.float64)
        targets_B = micro_batch.targets_B
        total += losses_B.sum()
        targets += targets_B.sum()
        products = (losses_B**2, losses_B * targets_B, targets_B**2, targets_B > 0)
        moments += torch.stack([product.sum().double() for product in products])
        num_bytes += task.bytes_of_targets(micro_batch)
    model.train()
    reshard(model)
    world.all_reduce([total, targets, num_bytes, moments])
    if not int(targets):
        return {}
    mean, found = float(total) / int(targets), {}
    if task.kind != "vocabulary":
        own = [Answers.of(*pair) for pair in answers]
        parts = itertools.chain(*world.all_gather(own))
        found = task.scores(Answers(*map(np.concatenate, zip(*parts, strict=True))))
    if math.isnan(mean):  # then predictions are NaN too, and their scores mean nothing
        found = dict.fromkeys(found, math.nan)
    if int(num_bytes):
        found["bits_per_byte"] = float(total) / math.log(2) / int(num_bytes)
    return {"loss": mean} | _interval(mean, int(targets), moments) | task.of_loss(mean) | found


def _interval(mean: float, targets: int, moments: Tensor) -> Metrics:
    """Return half of the 95 % interval of a mean loss per target, as if the rows were drawn at
    random; nothing for few rows.

    Args:
        mean: The loss of all rows, divided by their targets.
        targets: Number of targets.
        moments: See `evaluate`.
    """
    losses2, products, targets2, rows = moments.tolist()
    if rows < _LEAST_ROWS or not math.isfinite(mean):
        return {}
    variance = (losses2 - 2 * mean * products + mean**2 * targets2) * rows / (rows - 1)
    return {INTERVAL: _NORMAL_95 * math.sqrt(max(0.0, variance)) / targets}


def over_all(found: Mapping[str, Metrics], data: DataSets, task: Task) -> Metrics:
    """Combine the metrics of several data sets: their weighted mean, and those of each data set.

    The mean has the plain name of a metric, and a data set has "metric/name". With a single data
    set, return its metrics as they are.

    Args:
        found: Metrics by folder. Data sets with empty metrics are left out.
        data: The data sets, with weights and names.
        task: The task, which derives further metrics from the mean loss.
    """
    known = {folder: metrics for folder, metrics in found.items() if metrics}
    if len(found) == 1 or not known:
        return next(iter(known.values()), {})
    shares = {folder: data.weights[folder] for folder in known}
    total = sum(shares.values())
    means = {
        metric: sum(shares[folder] / total * known[folder][metric] for folder in known)
        for metric in next(iter(known.values()))
        if all(metric in metrics for metrics in known.values())
    }
    if INTERVAL in means:  # the rows of different data sets differ independently
        halves = (shares[folder] / total * known[folder][INTERVAL] for folder in known)
        means[INTERVAL] = math.hypot(*halves)
    names = data.names
    each = {f"{m}/{names[folder]}": value for folder in known for m, value in known[folder].items()}
    return means | task.of_loss(means["loss"]) | each


class Evaluator:
    """Evaluates the splits of a run's data sets, and notes the best step.

    Args:
        config: Settings with the size of evaluations.
        loaders: Yields the micro-batches of a split.
        learner: The model and its task.
        world: The ranks, which share a split.
        should_stop: Called before each micro-batch, on all ranks. True ends the evaluation.
    """

    def __init__(
        self,
        config: TrainConfig,
        loaders: SplitLoaders,
        learner: Learner,
        world: World,
        should_stop: Callable[[], bool],
    ) -> None:
        self._data, self._config = DataSets.read(config.shards), config
        self._loaders, self._learner, self._world = loaders, learner, world
        self._should_stop, self._best_by = should_stop, learner.task.best_by
        self._is_new = True
        self.was_stopped = False
        """Whether an evaluation was ended before its last micro-batch."""
        self.best: Best | None = None
        """The best step so far."""

    def has(self, split: str) -> bool:
        """Return whether any data set has this split."""
        return bool(self._data.having(split))

    def evaluate(self, split: str, step: int, metrics_file: MetricsFile | None) -> Metrics:
        """Evaluate a split, and log the metrics.

        Args:
            split: The split, of all data sets that have it.
            step: The latest step.
            metrics_file: The file to write the metrics to; None on ranks other than 0.

        Returns:
            The metrics; empty if there is no such split, if it has no targets, or if stopped.
        """
        if not self.has(split):
            return {}
        metrics = self.metrics_of(split)
        if self.was_stopped:
            _log.info("step %d | the evaluation of %s was stopped", step, split)
        elif not metrics:
            _log.warning("the split %s has no target: nothing to evaluate", split)
        elif metrics_file is not None:
            metrics_file.write({"step": step} | {f"{split}_{k}": v for k, v in metrics.items()})
            _log.info("step %d | %s %s", step, split, " ".join(shown_metrics(metrics)))
        return metrics

    def note_best(self, step: int, metrics: Metrics) -> bool:
        """Note a step as the best one and return True, unless an earlier step is as good."""
        lack, before = self._best_by.lack(metrics), self.best
        is_best = math.isfinite(lack) and (
            before is None or lack < self._best_by.lack(before.metrics)
        )
        if is_best:
            self.best = Best(step=step, metric=self._best_by.metric, metrics=metrics)
        return is_best

    def metrics_of(self, split: str) -> Metrics:
        """Return the metrics of a split over all data sets that have it; empty if stopped."""
        folders = self._data.having(split)
        found = {folder: self._metrics_on(folder, split, len(folders)) for folder in folders}
        self._is_new = False
        return {} if self.was_stopped else over_all(found, self._data, self._learner.task)

    def _metrics_on(self, folder: str, split: str, folders: int) -> Metrics:
        learner, info = self._learner, self._data.manifest_of(folder).split(split)
        limit, config = self._config.eval_tokens, self._config
        if limit is not None and split == "test":  # evaluated once, so it may be larger
            limit *= 1 + math.ceil(config.steps / config.eval_every)
        tokens = info.tokens
        if limit is not None:  # a single token may have no target
            tokens = min(tokens, max(limit // folders, config.sequence_length))
        due = self._loaders.micro_batches_of(tokens, info)
        part = tokens if tokens < info.tokens else None
        if self._is_new:
            _log.info("evaluating about %s tokens of %s in %s", f"{tokens:,}", split, folder)
        with contextlib.closing(self._loaders.evaluation_batches(split, folder, part)) as shown:
            watched = self._watched(shown, split, due)
            try:
                return evaluate(
                    learner.model, learner.task, watched, learner.precision, self._world
                )
            except RuntimeError as error:
                if isinstance(error, TokenfeedError) or not is_out_of_memory(error):
                    raise
                size = config.for_evaluation.micro_batch_slots
                raise ConfigError(
                    f"`--eval-micro-batch-tokens`={size} needs more memory than there is. Give "
                    f"{max(config.sequence_length, size // 2)}, with --resume if the run has saved."
                ) from error

    def _watched(
        self, micro_batches: Iterable[MicroBatch], split: str, due: int
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches until the run is to stop. Log progress now and then.

        Args:
            micro_batches: This rank's micro-batches.
            split: The name of the split, for the log.
            due: Approximate number of micro-batches of all ranks.
        """
        logged_s = time.monotonic()
        for nth, micro_batch in enumerate(micro_batches):
            if self._should_stop():
                self.was_stopped = True
                return
            if time.monotonic() - logged_s > _SECONDS_BETWEEN:
                logged_s = time.monotonic()
                done = min(0.99, nth * self._world.size / due)
                _log.info("evaluating %s: %.0f %% done", split, 100 * done)
            yield micro_batch


class Sampler:
    """Generates the samples of a run.

    Args:
        config: Settings with the number of samples and the data sets.
        learner: The model and its task.
        loaders: Opens the validation split.

    Raises:
        ConfigError: The task does not continue texts, or the tokenizer cannot be read.
    """

    def __init__(self, config: TrainConfig, learner: Learner, loaders: SplitLoaders) -> None:
        task = learner.task
        if not task.head.causal:
            raise ConfigError(
                f"`--samples`={config.samples}: a model of {task.name} does not continue texts. "
                "Leave it out."
            )
        self._learner = learner
        self._end_ids: set[int | None] = {task.manifest.tokenizer.end_id}
        self._tokenizer = open_tokenizer(first_of(config.shards))
        chosen = "last" if config.targets == "last" else None
        self._prompts = [prompt for prompt, _ in _rows(config, loaders, chosen)]
        if task.manifest.task == "chat":
            stops: set[int | None] = {id for _, ids in _rows(config, loaders, "stop") for id in ids}
            # A template may say that the assistant writes the line break behind a stop token too.
            self._end_ids = stops & {*self._tokenizer.get_added_tokens_decoder()} or stops

    @torch.no_grad()
    def samples(self) -> list[dict[str, str]]:
        """Return the prompt and the generated text of each sample."""
        if not self._prompts:
            return []
        model: Any = self._learner.model
        has_cache = getattr(model, "new_cache", lambda: None)() is not None
        model.eval()
        with torch.compiler.set_stance("force_eager"):  # lengths grow, and each is a graph
            if has_cache:
                found = self._continue(self._prompts)
            else:  # a model of one's own may not hide padding before a prompt
                found = [ids for prompt in self._prompts for ids in self._continue([prompt])]
        model.train()
        reshard(model)
        return [self._texts(*pair) for pair in zip(self._prompts, found, strict=True)]

    def _continue(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the likeliest tokens after each prompt. Short prompts begin with padding."""
        model: Any = self._learner.model
        vocabulary_size, longest = self._tokenizer.get_vocab_size(), max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[0] * lack + prompt for lack, prompt in zip(padding, prompts, strict=True)]
        ids_NT = torch.tensor(rows, device=self._learner.device)
        padding_N1 = torch.tensor(padding, device=self._learner.device)[:, None]
        cache = model.new_cache() if hasattr(model, "new_cache") else None
        new = longest
        for _ in range(SAMPLE_TOKENS):
            self._learner.task.begin_pass()
            if cache is None:
                shown = MicroBatch.of_ids(ids_NT, causal=True)
            else:
                shown = MicroBatch.to_continue(ids_NT, padding_N1, new, cache)
            with self._learner.precision.autocast():
                if has_hidden(model):  # logits of all slots may not fit into memory
                    logits_NV = F.linear(model.hidden(shown)[:, -1], model.head_weight)
                else:
                    logits_NV = model(shown)[:, -1]
            chosen_N = logits_NV[:, :vocabulary_size].argmax(-1)
            ids_NT, new = torch.cat((ids_NT, chosen_N[:, None]), dim=1), 1
        found: list[list[int]] = ids_NT[:, longest:].tolist()
        return found

    def _texts(self, prompt: list[int], ids: list[int]) -> dict[str, str]:
        generated = itertools.takewhile(lambda id: id not in self._end_ids, ids)
        texts = (self._tokenizer.decode([*part]) for part in (prompt, generated))
        return dict(zip(("prompt", "text"), texts, strict=True))


def _rows(
    config: TrainConfig, loaders: SplitLoaders, targets: str | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the prompt and the targets of the first rows of a validation split, if there is one."""
    folders = DataSets.read(config.shards).having("validation")
    if not folders:
        return
    alone = {"rank": 0, "world_size": 1, "targets": targets}
    with loaders.open("validation", Fixed(1), folders[0], **alone) as loader:
        for batch in itertools.islice(loader, config.samples):
            ids, labels = batch[INPUT_IDS][0].tolist(), batch[TARGETS][0].tolist()
            given = next((at for at, label in enumerate(labels) if label != IGNORED), len(ids))
            end = given if given > 1 else max(1, min(PROMPT_TOKENS, len(ids) // 2))
            first = max(0, end - max(1, config.sequence_length - SAMPLE_TOKENS))
            yield ids[first:end], [label for label in labels if label != IGNORED]
