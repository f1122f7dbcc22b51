"""--eval-micro-batch-tokens: micro-batches of evaluations, which need no gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import make_config, run

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.data.micro_batch import MicroBatch


def out_of_memory(head: Any) -> torch.nn.Module:
    """A model that has no memory for evaluations of more than 200 slots."""
    from support.training import one_layer_model

    model = one_layer_model(head)

    def check(module: torch.nn.Module, given: tuple[MicroBatch]) -> None:
        if not module.training and given[0].num_slots > 200:
            raise torch.OutOfMemoryError

    model.register_forward_pre_hook(check)
    return model


def test_evaluation_out_of_memory_names_its_option(every_task: Path, tmp_path: Path) -> None:
    config = make_config(every_task / "lm", tmp_path / "run", model=f"{__name__}:out_of_memory")
    with pytest.raises(ConfigError, match=r"`--eval-micro-batch-tokens`=256 .* Give 128"):
        run(config)
    run(
        make_config(
            every_task / "lm", tmp_path / "b", model=config.model, eval_micro_batch_tokens=128
        )
    )


def out_of_memory_later(head: Any) -> torch.nn.Module:
    """A model that has memory for an evaluation only before it has trained."""
    from support.training import one_layer_model

    model, trained = one_layer_model(head), []

    def check(module: torch.nn.Module, _: object) -> None:
        if not module.training and trained:
            raise torch.OutOfMemoryError
        trained.extend([True] * module.training)

    model.register_forward_pre_hook(check)
    return model


def test_evaluation_that_fails_loses_no_checkpoint_that_is_due(
    every_task: Path, tmp_path: Path
) -> None:
    model = f"{__name__}:out_of_memory_later"
    config = make_config(every_task / "lm", tmp_path, model=model, eval_every=4, save_every=4)
    with pytest.raises(ConfigError, match="with --resume if the run has saved"):
        run(config)
    assert Checkpoints.of_run(tmp_path).steps() == [4]
