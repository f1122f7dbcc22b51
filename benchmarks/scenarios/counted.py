"""The memory of a step, counted: by batch size, number format and accumulation.

The model is BERT-base (110 M parameters) with rows of 128 tokens and one label each. Its steps run
on tensors without values, whose bytes are counted (benchmarks/gpu/memory.py). Kernels' own memory,
the CUDA context and gaps between blocks are not in these figures.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.gpu.memory import RunPlan
from tokenfeed import pretokenize
from tokenfeed.trainer.config.run_config import TrainConfig

__all__ = ["accumulated", "by_batch", "by_precision"]

Entry = dict[str, Any]

LENGTH = 128
BATCHES = (8, 16, 32, 64, 128, 256)
CARDS_GB = (12, 16, 24, 40, 80)
LEFT_FREE = 0.1
"""Share of a card for the CUDA context, kernels and gaps between blocks."""


def by_batch(folder: Path) -> Iterator[Entry]:
    """Yield peak bytes by rows of a batch, and the largest batch of each card, in bf16."""
    for recompute in (False, True):
        plan, config = _plan(folder, precision="bf16", recompute=recompute)
        peaks = {rows: plan.peak(_with_rows(config, rows)) for rows in BATCHES}
        fewer, most = BATCHES[-2:]  # where activations, and not moments, make the peak
        a_row = (peaks[most] - peaks[fewer]) / (most - fewer)
        fixed = peaks[most] - most * a_row
        yield {
            "recompute": recompute,
            "gb_by_rows": {str(rows): _gb(peak) for rows, peak in peaks.items()},
            "largest_batch_by_card_gb": {
                str(card): int((card * 1e9 * (1 - LEFT_FREE) - fixed) / a_row) for card in CARDS_GB
            },
        }


def by_precision(folder: Path, rows: int = 32) -> Iterator[Entry]:
    """Yield peak bytes of a step in each number format."""
    for precision in ("fp32", "bf16", "fp16"):
        plan, config = _plan(folder, precision=precision)
        yield {"precision": precision, "rows": rows, "gb": _gb(plan.peak(_with_rows(config, rows)))}


def accumulated(folder: Path, rows: int = 64) -> Iterator[Entry]:
    """Yield peak bytes of a step of 64 rows in 1, 2 and 4 micro-batches."""
    plan, config = _plan(folder, precision="bf16")
    for parts in (1, 2, 4):
        split = _with_rows(config, rows, rows // parts)
        yield {"micro_batches": parts, "rows": rows, "gb": _gb(plan.peak(split))}


def _with_rows(config: TrainConfig, rows: int, micro_batch: int | None = None) -> TrainConfig:
    size = (micro_batch or rows) * LENGTH
    return dataclasses.replace(config, step_rows=rows, micro_batch_tokens=size)


def _plan(folder: Path, **settings: Any) -> tuple[RunPlan, TrainConfig]:
    shards, model = _data(folder)
    config = TrainConfig(
        shards=str(shards),
        model=f"hf:{model}",
        from_scratch=True,
        sequence_length=LENGTH,
        step_rows=8,
        micro_batch_tokens=8 * LENGTH,
        run_dir=folder / "run",
        device="cpu",
        **settings,
    )
    return RunPlan(config, on_gpu=False), config


def _data(folder: Path) -> tuple[Path, Path]:
    """Make shards whose rows have 128 tokens, and the config of BERT-base."""
    shards, model = folder / "counted", folder / "bert"
    if not shards.exists():
        words = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "word"))}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "words.json"))
        rows = [{"text": "word " * LENGTH, "label": n % 2} for n in range(300)]
        pretokenize(rows, shards, task="classify", tokenizer=folder / "words.json")
        transformers.BertConfig(num_labels=2).save_pretrained(model)
    return shards, model


def _gb(count: int) -> float:
    return round(count / 1e9, 2)
