"""--recompute: less memory, and the same gradients to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import (
    assert_same_run,
    make_config,
    make_head,
    one_document_a_row,
    run,
    write_labelled,
)
from torch import Tensor, nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import RecomputeName
from tokenfeed.trainer.models.activation_checkpointing import recompute_layers
from tokenfeed.trainer.models.transformer import ModelSize, Transformer
from tokenfeed.trainer.sizing.memory_model import PeakBytes

SIZE = ModelSize(layers=2, width=64, heads=2)
WAYS: tuple[RecomputeName, ...] = ("none", "selective", "full")


def model_of(how: RecomputeName, dropout: float = 0.0) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(SIZE, make_head(), dropout)
    recompute_layers(model, how)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    ids_BT = torch.randint(0, 64, (4, 32))
    model(one_document_a_row(ids_BT)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", WAYS[1:])
def test_gradients_are_the_same_to_the_last_bit(how: RecomputeName, compiled: bool) -> None:
    dropout = 0.3
    model = model_of(how, dropout)
    if compiled:
        torch._dynamo.reset()
        for block in model.repeated_blocks():
            block.compile(dynamic=False, backend="aot_eager", fullgraph=True)
    wanted = gradients(model_of("none", dropout))
    assert all(map(torch.equal, gradients(model), wanted))


def test_a_run_is_the_same(tmp_path: Path) -> None:
    folder = write_labelled(tmp_path / "shards", "tag", count=60)
    settings: dict[str, Any] = {"steps": 4, "dropout": 0.2, "precision": "bf16"}
    for how in WAYS:
        run(make_config(folder, tmp_path / how, recompute=how, **settings))
    for how in WAYS[1:]:
        assert_same_run(tmp_path / "none", tmp_path / how, 4)


def test_each_way_keeps_less_than_the_one_before() -> None:
    kept = []
    for how in WAYS:
        model = model_of(how)
        with PeakBytes() as memory:
            logits = model(one_document_a_row(torch.zeros((8, 64), dtype=torch.int64)))
        kept.append(memory.now)
        del logits
    # Of its 16 widths a token, a layer keeps 10; or the one that enters it.
    assert kept[1] < 0.75 * kept[0]
    assert kept[2] < 0.25 * kept[0]


def test_parameters_keep_their_names_and_nothing_is_kept_where_nothing_is_learnt() -> None:
    model = model_of("full")
    assert list(model.state_dict()) == list(model_of("none").state_dict())
    with torch.no_grad():
        logits = model(one_document_a_row(torch.zeros((1, 8), dtype=torch.int64)))
    assert not logits.requires_grad


def test_a_model_that_does_not_tell_its_layers_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"`--recompute`=full: Linear has no `repeated_blocks\(\)`"
    ):
        recompute_layers(nn.Linear(1, 1), "full")
    recompute_layers(nn.Linear(1, 1), "none")
