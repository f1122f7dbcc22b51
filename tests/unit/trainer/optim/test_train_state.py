"""What is saved of a model in training, and what loading it takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hub_models
from support.checkpoints import CPU, save
from support.training import make_config, run, write_counting
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.trainer import step as training_step
from tokenfeed.trainer.checkpoints.async_saver import Saver
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints, part_of
from tokenfeed.trainer.config.run_config import OptimizerName, TrainConfig
from tokenfeed.trainer.data.micro_batch import MicroBatch
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.tasks.registry import task_of


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., Path]) -> Path:
    return write_counting(write_dataset, tmp_path_factory.mktemp("shards"), validation_rows=0)


def learner_of(config: TrainConfig) -> Learner:
    return Learner(config, task_of(config, CPU), World(CPU))


def moments_of(learner: Learner) -> list[torch.Tensor]:
    return [tensor for values in learner.optimizer.state.values() for tensor in values.values()]


def test_state_dict_copies_buffers_and_no_weights(shards: Path, tmp_path: Path) -> None:
    learner = learner_of(make_config(shards, tmp_path))
    learner.model.register_buffer("seen", torch.zeros(1))
    state = part_of(learner.state_dict(), "model.")
    with torch.no_grad():
        for tensor in (*learner.model.parameters(), *learner.model.buffers()):
            tensor.fill_(3.0)
    assert state.pop("seen") == 0, "a forward pass may change buffers while they are copied"
    assert all(bool((weight == 3).all()) for weight in state.values())


def test_each_update_follows_the_copy_of_the_last_save(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def follow(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    follow(Saver, "save")
    follow(Saver, "before_update")
    follow(training_step, "update")
    run(make_config(shards, tmp_path, steps=4, save_every=2))
    step = ["before_update", "update"]
    assert calls == [*step, *step, "save", *step, *step, "save"]


def test_load_of_another_model_names_the_weight(shards: Path, tmp_path: Path) -> None:
    save(tmp_path, 1, {"model.weight": torch.ones(2)})
    learner = learner_of(make_config(shards, tmp_path))
    before = [weight.clone() for weight in learner.model.parameters()]
    with pytest.raises(ResumeError, match=r"weights than this model.*start a new run"):
        learner.load(Checkpoints(tmp_path).open())
    now = learner.model.parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_bytes_are_those_of_weights_gradients_and_moments(
    name: OptimizerName, shards: Path, tmp_path: Path
) -> None:
    learner = learner_of(make_config(shards, tmp_path, optimizer=name))
    predicted, weights = learner.state_bytes, list(learner.model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    learner.optimizer.step()
    moments = sum(tensor.nbytes for tensor in moments_of(learner) if tensor.dim())
    assert predicted == 2 * sum(weight.nbytes for weight in weights) + moments


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_operations_of_transformers_models_are_as_torch_counts(name: str, tmp_path: Path) -> None:
    folder = hub_models.save_model(tmp_path / "hub", "CausalLM", name)
    shards = hub_models.write_shards(tmp_path / "shards", "lm")
    config = hub_models.train_config(folder, shards=str(shards))
    learner = learner_of(config)
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            on_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
        },
    )
    with counter, torch.no_grad():
        learner.model(MicroBatch.of_ids(torch.zeros((2, 32), dtype=torch.int64), causal=True))
    counted = 3 * counter.get_total_flops() / (2 * 32)
    assert learner.operations_per_token(32) == pytest.approx(counted)


def test_weights_that_are_not_trained_cost_two_operations_less(
    shards: Path, tmp_path: Path
) -> None:
    learner = learner_of(make_config(shards, tmp_path))
    frozen, cost = learner.model.blocks[0].feed_in.weight, learner.operations_per_token(32)
    frozen.requires_grad_(False)
    assert cost - learner.operations_per_token(32) == pytest.approx(2 * frozen.numel())
