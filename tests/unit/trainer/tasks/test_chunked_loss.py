"""The loss over a vocabulary in chunks: it is the loss of all logits, and these never exist."""

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.training import make_config, write_labelled
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.pipeline.format.manifest import Manifest
from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.pipeline.planning.policies import Packed
from tokenfeed.trainer.data.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.models.gpt import ModelSize, Transformer
from tokenfeed.trainer.tasks import vocabulary_loss as chunked
from tokenfeed.trainer.tasks.registry import make_task
from tokenfeed.trainer.tasks.task import Loss, Task

CPU = torch.device("cpu")
SIZE = ModelSize(layers=1, width=16, heads=2)
WAYS: tuple[Literal["lm", "complete"], ...] = ("lm", "complete")
CHUNK = 19
_PADDED = 128
"""Width of all logits here, which nothing else has."""


class Largest(TorchDispatchMode):
    """Keeps the most elements of a tensor that is as wide as the vocabulary."""

    def __init__(self, width: int = _PADDED) -> None:
        super().__init__()
        self._width = width
        self.rows = self.made = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor) and value.dim() and value.shape[-1] == self._width:
                self.rows = max(self.rows, value.numel() // self._width)
                given = (each for each in tree_iter(args) if isinstance(each, Tensor))
                self.made += value.data_ptr() not in {each.data_ptr() for each in given}
        return out


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "WORTH_BYTES", 0)
    monkeypatch.setattr(chunked, "MOST_TOKENS", CHUNK)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Task, MicroBatch]]:
    """A micro-batch of each task, as the model gets it."""
    found = {}
    for way in WAYS:
        folder = write_labelled(tmp_path_factory.mktemp(way) / "shards", way)
        task = make_task(make_config(folder, folder), Manifest.read(folder), CPU)
        shape = Shaper(causal=task.head.causal, apart=True, separation="mask")
        with ShardLoader(folder, batching=Packed(32, batch_size=8), num_workers=0) as loader:
            found[way] = task, shape(next(iter(loader)))
    return found


def model_of(task: Task) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(SIZE, task.head)
    model.embedding = nn.Embedding(_PADDED, SIZE.width)
    nn.init.normal_(model.embedding.weight, std=0.3)
    return model


def gradients(model: nn.Module, loss: Loss) -> list[Tensor]:
    model.zero_grad()
    (loss.sum / 100).backward()  # type: ignore[no-untyped-call]
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def of_all_logits(task: Task, model: nn.Module, micro_batch: MicroBatch) -> Loss:
    return task.loss_of(model(micro_batch), micro_batch)


@pytest.mark.parametrize("way", WAYS)
def test_chunks_have_the_loss_and_the_gradients_of_all_logits(
    shown: dict[str, tuple[Task, MicroBatch]], way: str, small_chunks: None
) -> None:
    task, micro_batch = shown[way]
    model = model_of(task)
    whole = of_all_logits(task, model, micro_batch)
    wanted = gradients(model, whole)
    loss = task.loss(model, micro_batch)
    assert loss.targets == whole.targets > 10
    torch.testing.assert_close(loss.sum, whole.sum, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(model, loss), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_in_half_precision_they_differ_by_less_than_that_does(
    shown: dict[str, tuple[Task, MicroBatch]], way: str, dtype: torch.dtype, small_chunks: None
) -> None:
    task, micro_batch = shown[way]
    model = model_of(task)
    exact = gradients(model, of_all_logits(task, model, micro_batch))
    with torch.autocast("cpu", dtype):
        whole, loss = of_all_logits(task, model, micro_batch), task.loss(model, micro_batch)
    assert loss.sum.dtype == torch.float32
    torch.testing.assert_close(loss.sum, whole.sum, rtol=1e-3, atol=0)
    theirs, ours = gradients(model, whole), gradients(model, loss)
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert (one - true).norm() < 2.5 * (other - true).norm() + 1e-3 * true.norm()
    one, other, true = (torch.cat([g.flatten() for g in all_]) for all_ in (ours, theirs, exact))
    assert (one - true).norm() < 1.2 * (other - true).norm()


@pytest.mark.parametrize("way", WAYS)
def test_logits_exist_for_a_chunk_at_most(
    shown: dict[str, tuple[Task, MicroBatch]], way: str, small_chunks: None
) -> None:
    task, micro_batch = shown[way]
    model = model_of(task)
    with Largest() as largest:
        gradients(model, task.loss(model, micro_batch))
        assert 0 < largest.rows <= CHUNK
        of_all_logits(task, model, micro_batch)
        assert largest.rows == micro_batch.num_slots


def test_a_frozen_head_gets_no_gradient(
    shown: dict[str, tuple[Task, MicroBatch]], small_chunks: None
) -> None:
    task, micro_batch = shown["lm"]
    model = model_of(task)
    wanted = gradients(model, task.loss(model, micro_batch))[1:]
    model.embedding.weight.requires_grad_(False)
    assert all(map(torch.equal, gradients(model, task.loss(model, micro_batch)), wanted))
    assert model.embedding.weight.grad is None


@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 5),
    vocabulary=st.integers(1, 9),
    most=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_any_chunk_gives_the_same(
    tokens: int, width: int, vocabulary: int, most: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=random, dtype=torch.float64).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=random, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=random)
    targets[torch.rand(tokens, generator=random) < 0.3] = IGNORED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(chunked, "MOST_TOKENS", most)
        loss = chunked.vocabulary_loss(hidden, weight, targets)
    whole = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, whole)
    ours = torch.autograd.grad(3 * loss, (hidden, weight))
    theirs = torch.autograd.grad(3 * whole, (hidden, weight))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("learns", [True, False])
def test_an_evaluation_computes_no_gradient_of_the_head(learns: bool) -> None:
    weight_VD = nn.Parameter(torch.randn(512, 16))
    hidden_ND = torch.randn(64, 16, requires_grad=True)
    with torch.set_grad_enabled(learns), FlopCounterMode(display=False) as seen:
        chunked.vocabulary_loss(hidden_ND, weight_VD, torch.randint(0, 512, (64,)))
    assert seen.get_total_flops() == (3 if learns else 1) * 2 * 64 * 16 * 512


def test_a_smaller_scale_cures_a_sum_that_leaves_the_range_of_fp16() -> None:
    """All targets are one id, so the gradient of its row is a sum over all tokens."""
    hidden_ND = torch.full((4096, 16), 60.0)
    targets_N = torch.full((4096,), 3)
    found = {}
    for factor in (None, 1.0, 2.0**-4):
        weight_VD = nn.Parameter(torch.zeros(64, 16))
        scale = None if factor is None else torch.tensor(factor)
        with torch.autocast("cpu", torch.float16, enabled=factor is not None):
            loss = chunked.vocabulary_loss(hidden_ND, weight_VD, targets_N, factor=scale)
        (loss * (factor or 1.0)).backward()  # type: ignore[no-untyped-call]
        assert weight_VD.grad is not None
        found[factor] = weight_VD.grad / (factor or 1.0)
    assert not found[1.0].isfinite().all()
    torch.testing.assert_close(found[2.0**-4], found[None], rtol=2e-3, atol=0)


def test_the_gradient_of_the_head_is_added_without_rounding_where_a_gpu_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, one kernel adds in fp32. Here a function of the same meaning stands for it."""
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(40, 16), torch.randn(_PADDED, 16)
    targets_N, products = torch.randint(0, _PADDED, (40,)), list[Tensor]()

    def gradient() -> Tensor:
        weight = nn.Parameter(weight_VD.clone())
        with torch.autocast("cpu", torch.bfloat16):
            loss = chunked.vocabulary_loss(hidden_ND, weight, targets_N)
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return weight.grad

    monkeypatch.setattr(chunked, "MOST_TOKENS", CHUNK)
    rounded = gradient()
    monkeypatch.setattr(chunked, "adds_in_fp32", lambda *_: True)

    def addmm(total: Tensor, left: Tensor, right: Tensor, **how: Any) -> Tensor:
        assert (how["out_dtype"], left.dtype, total.dtype) == (
            torch.float32,
            torch.bfloat16,
            torch.float32,
        )
        products.append(left.double() @ right.double())
        return how["out"].add_(products[-1].float())  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "addmm", addmm)
    exact = gradient()
    assert len(products) == 3, "chunks"
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.02)
    wanted = sum(products)
    assert (exact - wanted).abs().max() < 1e-4 * (rounded - wanted).abs().max()
