"""--recompute: less memory, and the same gradients to the last bit."""

import pytest
import torch
from support.training import (
    make_head,
    one_document_a_row,
)
from torch import Tensor, nn

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


def test_a_model_that_does_not_tell_its_layers_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"`--recompute`: Linear has no `repeated_blocks\(\)`"):
        recompute_layers(nn.Linear(1, 1))
