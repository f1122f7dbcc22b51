"""--eval-micro-batch-tokens: micro-batches of evaluations, which need no gradients."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import RUNS, make_config, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.loop.trainer import Trainer


def out_of_memory(head: Any) -> torch.nn.Module:
    """A model that has no memory for evaluations of more than 200 slots."""
    from support.training import one_layer_model

    model = one_layer_model(head)

    def check(module: torch.nn.Module, given: tuple[MicroBatch]) -> None:
        if not module.training and given[0].num_slots > 200:
            raise torch.OutOfMemoryError

    model.register_forward_pre_hook(check)
    return model


@pytest.mark.parametrize(
    ("way", "settings", "slots"),
    [
        ("lm packed", {}, 256),
        ("lm packed", {"eval_micro_batch_tokens": 96}, 96),
        ("lm packed", {"eval_tokens": 200}, 128),  # the whole evaluation is smaller
        ("classify padded", {"step_rows": 4}, 256),
        ("classify padded", {"step_rows": 4, "eval_micro_batch_tokens": 64}, 64),
        ("tag padded", {}, 256),
    ],
)
def test_evaluation_has_micro_batches_of_its_size(
    way: str, settings: dict[str, Any], slots: int, every_task: Path, tmp_path: Path
) -> None:
    given = RUNS[way] | {"model": "support.training:one_layer_model"} | settings
    config = make_config(every_task / given.pop("shards"), tmp_path / "run", **given)
    assert config.for_evaluation.micro_batch_slots == slots
    with contextlib.closing(Trainer(config)) as trainer:
        sizes = [each.num_slots for each in trainer.loaders.evaluation_batches("validation", None)]
    assert slots / 2 < max(sizes) <= slots


def test_evaluation_out_of_memory_names_its_option(every_task: Path, tmp_path: Path) -> None:
    config = make_config(every_task / "lm", tmp_path / "run", model=f"{__name__}:out_of_memory")
    with pytest.raises(ConfigError, match=r"`--eval-micro-batch-tokens`=256 .* Give 128"):
        run(config)
    run(
        make_config(
            every_task / "lm", tmp_path / "b", model=config.model, eval_micro_batch_tokens=128
        )
    )
