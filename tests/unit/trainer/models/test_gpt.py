"""The built-in transformer: what a position sees, rotary positions, sizes and initial weights."""

import pytest
import torch
from support.training import make_transformer, one_document_a_row

from tokenfeed.trainer.models.gpt import Rotary, Transformer, rotate


def count(model: Transformer) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


UNPADDED = 1000
"""A vocabulary size that is no multiple of 64."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return make_transformer("tiny", UNPADDED)


@torch.no_grad()
def test_no_position_sees_a_later_token(model: Transformer) -> None:
    ids_BT = torch.randint(0, UNPADDED, (2, 24))
    changed_BT = ids_BT.clone()
    changed_BT[:, 10:] = (changed_BT[:, 10:] + 1) % UNPADDED
    before, after = model(one_document_a_row(ids_BT)), model(one_document_a_row(changed_BT))
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


def test_rotary_attention_depends_on_the_distance_only() -> None:
    rotary = Rotary(16)(torch.arange(64)[None], torch.float32)
    query, key = torch.randn(2, 16)
    rotated_query = rotate(query.expand(1, 64, 1, 16), rotary)[0, :, 0]
    rotated_key = rotate(key.expand(1, 64, 1, 16), rotary)[0, :, 0]
    scores = rotated_query @ rotated_key.T
    for distance in (0, 5, 40):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert scores[5, 0] != pytest.approx(scores[0, 0].item(), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 1.2), ("mini", 10.6), ("small", 25.2), ("gpt2", 85.0)]
)
def test_sizes_are_what_the_help_says(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = make_transformer(name, 50257)
    body = count(model) - model.embedding.weight.numel()
    assert body / 1e6 == pytest.approx(millions, rel=0.02)
