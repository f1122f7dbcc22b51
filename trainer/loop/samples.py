"""Samples: how a model continues the beginnings of validation rows, with the likeliest tokens.

A prompt is the part of a row before its first target, or the first tokens of a document. In a
conversation this is everything before the first reply of the assistant (with `--targets last`, the
last reply), and a sample ends before a stop token. Every rank generates the same samples, because a
sharded model needs all ranks. All forward passes have one shape: causal models do not see the empty
slots at the end of a row.
"""

import itertools
from collections.abc import Iterator

import torch

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.schema import IGNORED, INPUT_IDS
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.pipeline.windows.rank_slice import TARGETS
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.data.datasets import DataSets, first_of, open_tokenizer
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.fsdp import reshard
from tokenfeed.trainer.optim.train_state import Learner

_PROMPT, _NEW = 16, 48
"""Tokens of the beginning of a document, and most tokens of a sample."""


class Sampler:
    """Generates the samples of a run.

    Args:
        config: Settings with the number of samples and the data sets.
        learner: The model and its task.

    Raises:
        ConfigError: The task does not continue texts, or the tokenizer cannot be read.
    """

    def __init__(self, config: TrainConfig, learner: Learner) -> None:
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
        self._prompts = [prompt for prompt, _ in _rows(config, chosen)]
        if task.manifest.task == "chat":
            stops: set[int | None] = {id for _, ids in _rows(config, "stop") for id in ids}
            # A template may say that the assistant writes the line break behind a stop token too.
            self._end_ids = stops & {*self._tokenizer.get_added_tokens_decoder()} or stops

    @torch.no_grad()
    def samples(self) -> list[dict[str, str]]:
        """Return the prompt and the generated text of each sample."""
        if not self._prompts:
            return []
        model, vocabulary_size = self._learner.model, self._tokenizer.get_vocab_size()
        device = next(model.parameters()).device
        ends_N = torch.tensor([len(prompt) for prompt in self._prompts], device=device)
        rows_N = torch.arange(len(ends_N), device=device)
        ids_NT = torch.zeros(
            (len(ends_N), int(ends_N.max()) + _NEW), dtype=torch.int64, device=device
        )
        for number, prompt in enumerate(self._prompts):
            ids_NT[number, : len(prompt)] = torch.tensor(prompt, device=device)
        model.eval()
        for _ in range(_NEW):
            with self._learner.precision.autocast():
                logits_NTV = model(MicroBatch.of_ids(ids_NT, causal=True))
            ids_NT[rows_N, ends_N] = logits_NTV[rows_N, ends_N - 1, :vocabulary_size].argmax(-1)
            ends_N += 1
        model.train()
        reshard(model)
        pairs = zip(self._prompts, ids_NT.tolist(), strict=True)
        return [self._texts(prompt, ids[len(prompt) :][:_NEW]) for prompt, ids in pairs]

    def _texts(self, prompt: list[int], ids: list[int]) -> dict[str, str]:
        generated = itertools.takewhile(lambda id: id not in self._end_ids, ids)
        texts = (self._tokenizer.decode([*part]) for part in (prompt, generated))
        return dict(zip(("prompt", "text"), texts, strict=True))


def _rows(config: TrainConfig, targets: str | None) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the prompt and the targets of the first rows of a validation split, if there is one."""
    folders = DataSets.read(config.shards).having("validation")
    if not folders:
        return
    with ShardLoader(
        folders[0],
        batching=Fixed(1),
        split="validation",
        rank=0,
        world_size=1,
        num_workers=0,
        seed=config.seed,
        epochs=1,
        targets=targets,
        cache_dir=config.cache_dir,
        cache_bytes=config.cache_bytes,
    ) as loader:
        for batch in itertools.islice(loader, config.samples):
            ids, labels = batch[INPUT_IDS][0].tolist(), batch[TARGETS][0].tolist()
            given = next((at for at, label in enumerate(labels) if label != IGNORED), len(ids))
            end = given if given > 1 else max(1, min(_PROMPT, len(ids) // 2))
            first = max(0, end - max(1, config.sequence_length - _NEW))
            yield ids[first:end], [label for label in labels if label != IGNORED]
