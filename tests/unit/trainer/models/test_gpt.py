"""The built-in transformer: what a position sees, rotary positions, sizes and initial weights."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.training import make_head, make_transformer, one_document_a_row
from torch.utils._python_dispatch import TorchDispatchMode

from tokenfeed.trainer.models.gpt import ModelSize, Rotary, Transformer, rotate


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


@torch.no_grad()
def test_every_position_sees_all_earlier_tokens(model: Transformer) -> None:
    ids_BT = torch.randint(0, UNPADDED, (1, 24))
    changed_BT = ids_BT.clone()
    changed_BT[0, 0] = (changed_BT[0, 0] + 1) % UNPADDED
    difference_T = (
        (model(one_document_a_row(ids_BT)) - model(one_document_a_row(changed_BT)))
        .abs()
        .amax(-1)[0]
    )
    assert (difference_T > 0).all()


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


@torch.no_grad()
def test_a_new_model_knows_nothing(model: Transformer) -> None:
    ids_BT = torch.randint(0, UNPADDED, (4, 32))
    loss = F.cross_entropy(
        model(one_document_a_row(ids_BT)).flatten(0, 1), torch.randint(0, UNPADDED, (128,))
    )
    assert loss.item() == pytest.approx(math.log(1024), abs=0.2)


def test_the_vocabulary_is_padded_to_a_multiple_of_64(model: Transformer) -> None:
    assert model(one_document_a_row(torch.zeros(1, 3, dtype=torch.int64))).shape == (1, 3, 1024)
    assert make_transformer("tiny", 1024).embedding.num_embeddings == 1024


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 1.2), ("mini", 10.6), ("small", 25.2), ("gpt2", 85.0)]
)
def test_sizes_are_what_the_help_says(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = make_transformer(name, 50257)
    body = count(model) - model.embedding.weight.numel()
    assert body / 1e6 == pytest.approx(millions, rel=0.02)


def test_projections_into_the_residual_stream_start_smaller() -> None:
    torch.manual_seed(0)
    block = make_transformer("mini", UNPADDED).blocks[0]
    assert block.feed_in.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.feed_out.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.02)


class Operators(TorchDispatchMode):
    """Counts operators that compute: on a GPU, each is at least one kernel that the host starts."""

    _VIEWS = ("view", "_unsafe_view", "as_strided", "detach", "expand", "permute", "transpose", "t")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        is_view = name in (*self._VIEWS, "slice", "split", "unbind", "alias")
        self.count += not is_view and not name.startswith(("empty", "new_empty"))
        return function(*args, **(kwargs or {}))


def test_a_layer_starts_few_kernels() -> None:
    """In bf16, forward and backward, without a compiler: the host of small models decides."""
    counts = []
    for layers in (1, 2):
        model = Transformer(ModelSize(layers=layers, width=64, heads=2), make_head())
        micro_batch = one_document_a_row(torch.randint(0, 64, (2, 24)))
        with Operators() as operators:
            with torch.autocast("cpu", torch.bfloat16):
                total = model(micro_batch).sum()
            total.backward()
        counts.append(operators.count)
    assert counts[1] - counts[0] <= 50
