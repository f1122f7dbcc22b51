"""`transformers.Trainer` as benchmarks/trainer/ compares it: our model, its loop and its feed."""

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.trainer.systems import RATE, Case, Clock, Run, model_of, parts, validation_loss
from tokenfeed.pipeline.feeding.batch import Batch
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.pipeline.planning.policies import Fixed
from tokenfeed.trainer.data.attention import Scope
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.models.transformer import Transformer
from tokenfeed.trainer.tasks.task import Task

__all__ = ["by_peer"]


class Adapted(nn.Module):
    """The model as `transformers.Trainer` calls one: it is given labels, and gives their loss."""

    def __init__(self, model: Transformer, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        causal = self.task.head.causal
        mask = None if causal else attention_mask[:, None, None, :]
        shown = MicroBatch(
            ids_BT=input_ids,
            targets=self._targets(labels),
            positions_BT=torch.arange(input_ids.shape[1])[None],
            scope=Scope(causal=causal, mask_BHTT=mask),
            is_token_BT=attention_mask,
        )
        logits = self.model(shown)
        loss = self.task.loss_of(logits, shown)
        return {"loss": loss.sum / loss.targets, "logits": logits}

    def _targets(self, labels: Tensor) -> Tensor:
        """Return what each slot predicts: in a causal model, the label of the next slot."""
        if not self.task.head.causal:
            return labels
        return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def rows_of(shards: Path) -> list[dict[str, list[int]]]:
    """Ids and labels of every row of the train split, as a `datasets.Dataset` would give them."""
    rows = []
    with ShardLoader(shards, batching=Fixed(256), split="train", epochs=1, device="cpu") as loader:
        for batch in loader:
            rows += split(batch)
    return rows


def split(batch: Batch) -> list[dict[str, Any]]:
    is_token, labels = batch["attention_mask"], batch["labels"]
    return [
        {
            "input_ids": batch["input_ids"][row][is_token[row]].tolist(),
            "labels": labels[row][is_token[row]].tolist() if labels.dim() > 1 else int(labels[row]),
        }
        for row in range(len(is_token))
    ]


def grouped(rows: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Documents laid end to end and cut, as the examples of transformers do."""
    ids = list(itertools.chain.from_iterable(row["input_ids"] for row in rows))
    cut = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": row, "labels": row} for row in cut]


def by_peer(case: Case, shards: Path, steps: int, *, by_length: bool = False) -> Run:
    """`transformers.Trainer`, with a collator that pads to the longest row of a batch."""
    import transformers

    transformers.logging.set_verbosity_error()
    _, task, loaders = parts(case, shards, steps)
    rows = rows_of(shards)
    if case.packed:
        rows = grouped(rows, case.length)
    clock, seen = Clock(), _Seen()

    class Marks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    model = model_of(task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=Adapted(model, task),
            args=_arguments(transformers, folder, case, steps, by_length=by_length),
            train_dataset=rows,  # type: ignore[arg-type] - a list is a dataset
            data_collator=seen.collate,
            callbacks=[Marks()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.remove_callback(transformers.ProgressCallback)
        trainer.train()
    return Run(clock, seen.tokens[:steps], seen.slots, validation_loss(model, task, loaders))


def _arguments(transformers: Any, folder: str, case: Case, steps: int, *, by_length: bool) -> Any:
    return transformers.TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=case.rows,
        learning_rate=RATE,
        warmup_steps=steps // 10,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        weight_decay=0.1,
        adam_beta2=0.95,
        optim="adamw_torch_fused",
        train_sampling_strategy="group_by_length" if by_length else "random",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        disable_tqdm=True,
    )


@dataclass(slots=True)
class _Seen:
    """Pads rows, and counts what it has padded."""

    tokens: list[int] = field(default_factory=list)
    slots: int = 0

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        lengths = torch.tensor([len(row) for row in ids])
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        labels = [torch.tensor(row["labels"]) for row in rows]
        self.tokens.append(int(lengths.sum()))
        self.slots += padded.numel()
        return {
            "input_ids": padded,
            "attention_mask": torch.arange(padded.shape[1])[None] < lengths[:, None],
            "labels": nn.utils.rnn.pad_sequence(labels, True, IGNORED)
            if labels[0].dim()
            else torch.stack(labels),
        }
