"""From gradients to a step: scaling, clipping, skipping, counting."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.training import make_config, make_transformer, one_document_a_row, write_labelled
from torch import nn

from tokenfeed.trainer.config.run_config import OptimizerName, PrecisionName
from tokenfeed.trainer.distributed.world import World
from tokenfeed.trainer.models.gpt import Transformer
from tokenfeed.trainer.optim.optimizer import make_optimizer, set_learning_rate
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.optim.train_state import Learner
from tokenfeed.trainer.step import add_gradients, scale_and_clip
from tokenfeed.trainer.tasks.language_modeling import LanguageModelling
from tokenfeed.trainer.tasks.registry import task_of

CPU = torch.device("cpu")
NO_LIMIT = 1e9

every_precision = pytest.mark.parametrize("precision_name", ["fp32", "bf16", "fp16"])
every_optimizer = pytest.mark.parametrize("optimizer_name", ["adamw", "muon"])


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


class Training:
    """A model, its optimizer and its precision, to be stepped."""

    def __init__(self, precision_name: PrecisionName, optimizer_name: OptimizerName) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model, optimizer_name, 0.1)
        set_learning_rate(self.optimizer, 1e-2)
        self.precision = Precision(precision_name, CPU)

    def backward(self, number: int) -> None:
        ids_BT = torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(number))
        with self.precision.autocast():
            loss = self.model(ids_BT).float().square().mean()
        (loss * self.precision.factor(1.0)).backward()

    def step(self, scale: torch.Tensor | float = 1.0, clip_norm: float = NO_LIMIT) -> torch.Tensor:
        return scale_and_clip(self.optimizer, self.precision, scale, clip_norm)

    def content(self) -> dict[str, Any]:
        """A copy of all that a skipped step must leave as it is."""
        state = self.optimizer.state_dict()["state"]
        return copy.deepcopy({"model": self.model.state_dict(), "state": state})

    def gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            yield parameter.grad


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [1.0, torch.ones(())])
def test_a_step_that_neither_scales_nor_clips_is_plain_adamw_bit_for_bit(
    scale: torch.Tensor | float,
) -> None:
    training, plain = Training("fp32", "adamw"), Training("fp32", "adamw")
    for number in range(5):
        training.backward(number)
        training.step(scale)
        plain.backward(number)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    assert_same(training.content(), plain.content())


@pytest.mark.slow
@given(
    scale=st.floats(1e-6, 1e3),
    clip_norm=st.floats(1e-3, 1e3),
    on_device=st.booleans(),
    number=st.integers(0, 1000),
)
def test_one_pass_scales_and_clips_as_two_passes_do(
    scale: float, clip_norm: float, on_device: bool, number: int
) -> None:
    training, expected = Training("fp32", "adamw"), Training("fp32", "adamw")
    seen: list[torch.Tensor] = []
    training.optimizer.step = lambda: seen.extend(  # type: ignore[method-assign, assignment]
        gradient / training.optimizer.grad_scale  # type: ignore[attr-defined]
        for gradient in training.gradients()
    )
    training.backward(number)
    norm = training.step(torch.tensor(scale) if on_device else scale, clip_norm)
    expected.backward(number)
    for gradient in expected.gradients():
        gradient.mul_(scale)
    expected_norm = nn.utils.clip_grad_norm_(expected.model.parameters(), clip_norm)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(seen, list(expected.gradients()), rtol=1e-6, atol=1e-12)


@every_precision
@every_optimizer
@pytest.mark.parametrize(
    ("spoiled", "bad"),
    [(0, math.inf), (3, math.nan), (6, -math.inf)],
)
def test_one_bad_number_in_one_gradient_leaves_no_trace(
    precision_name: PrecisionName, optimizer_name: OptimizerName, spoiled: int, bad: float
) -> None:
    training = Training(precision_name, optimizer_name)
    expected = Training(precision_name, optimizer_name)
    for number in (0, 1):
        training.backward(number)
        assert training.step().isfinite()
        expected.backward(number)
        expected.step()
    before = training.content()
    training.backward(2)
    list(training.gradients())[spoiled].view(-1)[0] = bad
    assert not training.step().isfinite()
    assert_same(training.content(), before)
    for number in (3, 4):
        training.backward(number)
        assert training.step().isfinite()
        expected.backward(number)
        expected.step()
    assert_same(training.content(), expected.content())


def test_gradients_that_a_graph_overwrites_are_copied_first(tmp_path: Path) -> None:
    """The second replay of a CUDA graph writes into the memory of the first one's gradients."""
    shards = write_labelled(tmp_path / "shards", "lm", count=30)
    config = make_config(shards, tmp_path / "run", model="support.training:one_layer_model")
    sums, in_memory_of_graph = [], list[torch.Tensor]()

    def remember(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        in_memory_of_graph.append(weight.grad)

    for has_graphs in (False, True):
        learner = Learner(config, task_of(config, CPU), World(CPU))
        micro_batch = one_document_a_row(torch.arange(64).view(2, 32))
        if has_graphs:
            learner.task.has_graphs = True
            learner.task.begin_pass = lambda: None  # type: ignore[method-assign]
            for weight in learner.model.parameters():
                weight.register_post_accumulate_grad_hook(remember)
        add_gradients(learner, micro_batch, last=False)
        for gradient in in_memory_of_graph:
            gradient.fill_(torch.nan)
        in_memory_of_graph.clear()
        add_gradients(learner, micro_batch)
        sums.append([weight.grad for weight in learner.model.parameters()])
    assert all(map(torch.equal, *sums))


TASK = LanguageModelling(None)  # type: ignore[arg-type] - the loss needs no data set


def make_labels(ids_BT: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    labels_BT = ids_BT.clone()
    labels_BT[:, 0] = -100
    for row, length in enumerate(lengths):
        labels_BT[row, length:] = -100
    return labels_BT


def step_in_parts(precision: Precision, parts: list[slice]) -> tuple[Transformer, float]:
    """One step over four rows with unequal numbers of targets, in micro-batches."""
    torch.manual_seed(0)
    model = make_transformer("tiny", 64)
    optimizer = make_optimizer(model, "adamw", 0.1)
    ids_BT = torch.randint(0, 64, (4, 16))
    labels_BT = make_labels(ids_BT, [16, 2, 9, 5])
    nominal = 64
    for part in parts:
        with precision.autocast():
            loss = TASK.loss(model, one_document_a_row(ids_BT[part], labels_BT[part])).sum / nominal
        loss.backward()
    targets = int((labels_BT != -100).sum())
    norm = scale_and_clip(optimizer, precision, nominal / targets, 1e9)
    return model, norm.item()


def test_the_norm_is_that_of_the_mean_loss() -> None:
    _, norm = step_in_parts(Precision("fp32", CPU), [slice(0, 2), slice(2, 4)])
    torch.manual_seed(0)
    model = make_transformer("tiny", 64)
    ids_BT = torch.randint(0, 64, (4, 16))
    labels_BT = make_labels(ids_BT, [16, 2, 9, 5])
    logits = model(one_document_a_row(ids_BT))[:, :-1].flatten(0, 1)
    F.cross_entropy(logits, labels_BT[:, 1:].flatten()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.slow
@given(st.lists(st.booleans(), max_size=8), st.integers(0, 8))
def test_skips_are_counted_in_all_and_in_a_row_across_a_checkpoint(
    bad: list[bool], saved_at: int
) -> None:
    training = Training("bf16", "adamw")
    for number, is_bad in enumerate(bad):
        if number == saved_at:
            state = training.precision.state_dict()
            training.precision = Precision("bf16", CPU)
            training.precision.load_state_dict(state)
        training.backward(number)
        training.step(math.nan if is_bad else 1.0)
    in_a_row = len(bad) if all(bad) else bad[::-1].index(False)
    assert training.precision.skips.tolist() == [sum(bad), in_a_row]


@every_optimizer
def test_a_first_step_that_is_skipped_leaves_an_optimizer_as_new(
    optimizer_name: OptimizerName,
) -> None:
    training, fresh = Training("fp32", optimizer_name), Training("fp32", optimizer_name)
    training.backward(0)
    next(training.gradients()).fill_(torch.nan)
    training.step()
    training.backward(1)
    training.step()
    fresh.backward(1)
    fresh.step()
    assert_same(training.content(), fresh.content())
