"""The prediction of a step on an H100, beside measurements; and what its rewrites leave equal."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import before, roofline
from benchmarks.gpu.roofline import GPT2, Kernels
from tokenfeed.trainer.data.micro_batch import Head, MicroBatch
from tokenfeed.trainer.models import build, gpt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo")


def test_published_steps_are_predicted_within_5_percent() -> None:
    """Tokens a second on one H100, from gpu-beside-h100.json."""
    narrow = replace(GPT2, heads=6)
    for name, size, kernels, measured in (
        ("llm.c", GPT2, roofline.llm_c(GPT2), 540_295),
        ("nanoGPT", GPT2, roofline.nanogpt(GPT2), 492_857),
        ("nanochat", narrow, roofline.nanochat(narrow), 472_279),
    ):
        found = roofline.predicted(name, size, kernels)["tokens_per_s"]
        assert found == pytest.approx(measured, rel=0.05), name


def test_counted_bytes_are_those_of_a_kernel_written_by_hand() -> None:
    """A sum that reads a row twice, forward and backward, and half of another one, once each."""
    rows, width = 2, 256

    def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + x.flip(-1) + y[:, :width]

    def make(count: int) -> object:
        run = torch.compile(halves, dynamic=False)
        x, y = torch.randn(count * rows, width), torch.randn(count * rows, 2 * width)
        return lambda: run(x, y) is None or None

    [found] = roofline.counted(replace(GPT2, tokens=2 * roofline.ROW), make)  # type: ignore[arg-type]
    assert found == Kernels("memory", 1, 2 * 3 * 4 * rows * width)


@pytest.mark.long
def test_rewritten_heads_move_fewer_bytes_to_the_same_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output and gradients are equal bit for bit, in fp32 and under autocast."""
    size = replace(GPT2, layers=1, width=128, heads=2, tokens=2 * roofline.ROW)
    monkeypatch.setattr(build, "CHOICES", dict(build.CHOICES))
    monkeypatch.setattr(gpt, "_Heads", gpt._Heads)
    ours, moved = values(size), sum(each.bytes for each in roofline.block_of(size))
    before.leave_out(["heads"])
    former, more = values(size), sum(each.bytes for each in roofline.block_of(size))
    assert all(map(torch.equal, ours, former))
    rows = 2 * size.width * size.tokens  # a row of `width` values for each token
    # Queries and keys copied again and values once, and gradients selected part by part.
    assert (more - moved) / rows == pytest.approx(10, abs=0.5)


def values(size: roofline.Size) -> list[torch.Tensor]:
    """The output of a model of one layer, and its gradients."""
    torch.manual_seed(0)
    head = Head(kind="vocabulary", outputs=64, vocabulary_size=64)
    model = gpt.Transformer(gpt.ModelSize(layers=1, width=size.width, heads=size.heads), head)
    micro_batch = MicroBatch.of_ids(torch.randint(0, 64, (2, 40)), causal=True)
    found = []
    for is_half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            out = model(micro_batch)
        out.float().square().sum().backward()
        found += [out.detach(), *(weight.grad for weight in model.parameters())]
        model.zero_grad()
    return found
