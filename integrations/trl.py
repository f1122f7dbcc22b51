"""TRL's `SFTTrainer` over ShardLoaders of conversations, completions or documents.

    settings = SFTConfig("runs/chat", max_steps=1000, gradient_accumulation_steps=4)
    loader = ShardLoader("chat/", batching=Packed(2048, 8), device=settings.device, epochs=None,
                         micro_batches_per_step=4 * settings.world_size)
    ShardSFTTrainer("Qwen/Qwen3-0.6B", args=settings, train_dataset=loader).train()

`pretokenize --task chat` has rendered the chat template, and `ShardLoader(..., targets=...)`
selects the tokens with a loss. So TRL prepares nothing: its settings for templates, lengths and
assistant tokens have no effect. Its losses, metrics, PEFT and callbacks work as always. Checkpoints
and resuming are those of `ShardTrainer`.
"""

# pyright: reportPrivateImportUsage=false, reportGeneralTypeIssues=false
# TRL finds its names when they are first used, so their types are unknown.

from typing import Any

import datasets
from trl import SFTConfig, SFTTrainer

from tokenfeed.integrations.transformers import ShardTrainerMixin
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader

_PREPARED = {"input_ids": [[0, 0]], "labels": [[0, 0]]}


class _PreparedTrainer(SFTTrainer):  # type: ignore[misc]  # untyped
    """An SFTTrainer that is constructed with one prepared row, and gets its loaders afterwards."""

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        *,
        train_dataset: ShardLoader,
        eval_dataset: ShardLoader | dict[str, ShardLoader] | None = None,
        **settings: Any,
    ) -> None:
        args = args or SFTConfig()
        if args.packing or args.padding_free or args.assistant_only_loss:
            raise ConfigError(
                "`packing`, `padding_free` and `assistant_only_loss` of SFTConfig are for TRL's "
                "own data. Leave them out, and make the loader with `batching=Packed(...)` and "
                "`targets='assistant'`."
            )
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        row = datasets.Dataset.from_dict(_PREPARED)
        evaluated = None if eval_dataset is None else row
        super().__init__(model, args, train_dataset=row, eval_dataset=evaluated, **settings)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def evaluate(self, eval_dataset: Any = None, *args: Any, **settings: Any) -> Any:
        """See `transformers.Trainer.evaluate`. TRL would prepare the data set."""
        return super(SFTTrainer, self).evaluate(eval_dataset, *args, **settings)


class ShardSFTTrainer(ShardTrainerMixin, _PreparedTrainer):
    """An `SFTTrainer` over ShardLoaders, for training and evaluation.

    With several rows per micro-batch, TRL's metric `num_tokens` counts one of them.
    """
