"""GELU in the kernels of products: values, and when the kernel is kept."""

import logging

import pytest
import torch
from torch import Tensor

from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models import gelu_products
from tokenfeed.trainer.models.gpt import ModelSize, Transformer


def make_model() -> Transformer:
    torch.manual_seed(0)
    head = Head(kind="vocabulary", outputs=64, vocabulary_size=64)
    return Transformer(ModelSize(layers=2, width=64, heads=2), head)


def values(*, fuses_gelu: bool, is_half: bool) -> list[Tensor]:
    """The output of a model, and its gradients."""
    model = make_model()
    for block in model.blocks:
        block.fuses_gelu = fuses_gelu
    micro_batch = MicroBatch.of_ids(torch.randint(0, 64, (2, 33)), causal=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        out = model(micro_batch)
    out.float().square().sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    return [out, *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("is_half", [False, True])
def test_fused_gelu_has_the_same_values_bit_for_bit(is_half: bool) -> None:
    fused, apart = (values(fuses_gelu=each, is_half=is_half) for each in (True, False))
    assert len(fused) == 1 + len(list(make_model().parameters()))
    assert all(map(torch.equal, fused, apart))


@pytest.mark.parametrize(
    ("gains", "says"),
    [
        ((1.3, 1.2), "GELU is in the products' kernels: 1.30 and, of its gradient, 1.20 times"),
        ((1.3, 0.9), "GELU stays out of the products' kernels: 1.30 and, of its gradient, 0.90"),
        ((1.3, None), "GELU stays a kernel of its own: no such instruction"),
    ],
)
def test_kernel_is_kept_where_it_is_faster(
    gains: tuple[float | None, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def measured(x: Tensor, weight: Tensor, *, is_gradient: bool) -> float:
        assert (x.shape, weight.shape) == ((640, 64), (256, 64))
        gain = gains[is_gradient]
        if gain is None:
            raise RuntimeError("no such instruction")
        return gain

    monkeypatch.setattr(gelu_products, "can_fuse", lambda *_: True)
    monkeypatch.setattr(gelu_products, "_try", measured)
    model = make_model()
    with caplog.at_level(logging.INFO):
        gelu_products.fuse_gelu(model, 640, torch.float32)
    assert says in caplog.text
    assert {block.fuses_gelu for block in model.blocks} == {gains == (1.3, 1.2)}
