"""Settings for a purpose, by name: `train --preset NAME`.

A preset overrides the defaults that suit the data. A file and the command line override a preset.
The presets for GPUs train on documents for one epoch, with a warm-up of 3.7 % of the steps, at most
700. Their micro-batches fit according to `train --dry-run --preset NAME --gpu NAME`.
"""

from typing import Any, Literal, get_args

__all__ = ["PRESETS", "PresetName"]

PresetName = Literal["quick", "t4", "rtx4090", "h100", "production"]

PRESETS: dict[PresetName, dict[str, Any]] = {
    # A run in a minute, with evaluations, checkpoints and a report.
    "quick": {
        "steps": 20,
        "warmup_steps": 2,
        "eval_every": 10,
        "save_every": 10,
        "log_every": 2,
    },
    # 16 GB, half precision only in fp16: a small model that starts without compiling.
    "t4": {
        "model": "small",
        "sequence_length": 512,
        "micro_batch_tokens": 16_384,
        "step_tokens": 65_536,
        "epochs": 1,
        "learning_rate": 1e-3,
    },
    # 24 GB, bf16.
    "rtx4090": {
        "model": "gpt2",
        "sequence_length": 1024,
        "micro_batch_tokens": 16_384,
        "step_tokens": 262_144,
        "epochs": 1,
        "learning_rate": 6e-4,
        "compile": True,
    },
    # 80 GB, bf16: GPT-2 as its reproductions train it.
    "h100": {
        "model": "gpt2",
        "sequence_length": 1024,
        "micro_batch_tokens": 65_536,
        "step_tokens": 524_288,
        "epochs": 1,
        "learning_rate": 6e-4,
        "compile": True,
    },
    # A run of days: rare evaluations, more checkpoints, a schedule that can be extended.
    "production": {
        "epochs": 1,
        "schedule": "wsd",
        "warmup_steps": 500,
        "eval_every": 1000,
        "save_every": 1000,
        "keep": 3,
        "log_every": 20,
    },
}
assert set(PRESETS) == set(get_args(PresetName))
