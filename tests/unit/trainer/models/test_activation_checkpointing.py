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

from benchmarks.gpu.memory import PeakBytes
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.models.build import recompute_layers
from tokenfeed.trainer.models.gpt import ModelSize, Transformer

SIZE = ModelSize(layers=2, width=64, heads=2)


def model_of(dropout: float = 0.0, *, recompute: bool) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(SIZE, make_head(), dropout)
    if recompute:
        recompute_layers(model)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    ids_BT = torch.randint(0, 64, (4, 32))
    model(one_document_a_row(ids_BT)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_gradients_of_a_compiled_layer_are_the_same_to_the_last_bit() -> None:
    dropout = 0.3
    model = model_of(dropout, recompute=True)
    torch._dynamo.reset()
    model.blocks[0].compile(dynamic=False, backend="aot_eager", fullgraph=True)
    wanted = gradients(model_of(dropout, recompute=False))
    assert all(map(torch.equal, gradients(model), wanted))


def test_a_run_is_the_same(tmp_path: Path) -> None:
    folder = write_labelled(tmp_path / "shards", "tag", count=60)
    settings: dict[str, Any] = {"steps": 4, "dropout": 0.2, "precision": "bf16"}
    run(make_config(folder, tmp_path / "kept", **settings))
    run(make_config(folder, tmp_path / "recomputed", recompute=True, **settings))
    assert_same_run(tmp_path / "kept", tmp_path / "recomputed", 4)


def test_a_layer_keeps_what_enters_it_alone() -> None:
    kept = []
    for recompute in (False, True):
        model = model_of(recompute=recompute)
        with PeakBytes() as memory:
            logits = model(one_document_a_row(torch.zeros((8, 64), dtype=torch.int64)))
        kept.append(memory.now)
        del logits
    assert kept[1] < 0.25 * kept[0]  # one width a token, of 16


def test_parameters_keep_their_names_and_nothing_is_kept_where_nothing_is_learnt() -> None:
    model = model_of(recompute=True)
    assert list(model.state_dict()) == list(model_of(recompute=False).state_dict())
    with torch.no_grad():
        logits = model(one_document_a_row(torch.zeros((1, 8), dtype=torch.int64)))
    assert not logits.requires_grad


def test_a_model_that_does_not_tell_its_layers_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"`--recompute`: Linear has no `repeated_blocks\(\)`"):
        recompute_layers(nn.Linear(1, 1))
