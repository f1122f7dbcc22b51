"""What one step computes: the loss, and the weight of a token in it."""

import pytest
import torch
import torch.nn.functional as F
from training import make_transformer, one_document_a_row

from tokenfeed.trainer.config.run_config import PrecisionName
from tokenfeed.trainer.models.transformer import Transformer
from tokenfeed.trainer.optim.optimizer import make_optimizer
from tokenfeed.trainer.optim.precision import Precision
from tokenfeed.trainer.tasks.language_modeling import LanguageModelling

CPU = torch.device("cpu")
TASK = LanguageModelling(None, 0)  # type: ignore[arg-type] - the loss needs no data set


def loss_sum(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return TASK.loss_of(logits_BTV, one_document_a_row(labels_BT, labels_BT)).sum


def make_labels(ids_BT: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    labels_BT = ids_BT.clone()
    labels_BT[:, 0] = -100
    for row, length in enumerate(lengths):
        labels_BT[row, length:] = -100
    return labels_BT


def test_the_loss_is_the_sum_over_targets_of_the_next_token() -> None:
    torch.manual_seed(0)
    ids_BT = torch.randint(0, 11, (2, 6))
    labels_BT = make_labels(ids_BT, [6, 3])
    logits_BTV = torch.randn(2, 6, 11)
    expected = torch.zeros(())
    for row, position in ((0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)):
        log_probabilities = logits_BTV[row, position - 1].log_softmax(0)
        expected -= log_probabilities[ids_BT[row, position]]
    torch.testing.assert_close(loss_sum(logits_BTV, labels_BT), expected)


def test_the_softmax_is_fp32_whatever_the_logits_are() -> None:
    logits_BTV = torch.randn(1, 4, 50).bfloat16()
    labels_BT = torch.tensor([[-100, 3, 4, 5]])
    loss = loss_sum(logits_BTV, labels_BT)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, loss_sum(logits_BTV.float(), labels_BT))


def test_a_batch_without_targets_gives_zero_loss_and_zero_gradients() -> None:
    logits_BTV = torch.randn(1, 4, 50, requires_grad=True)
    loss = loss_sum(logits_BTV, torch.full((1, 4), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits_BTV.grad is not None
    assert not logits_BTV.grad.any()


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
        precision.backward(loss)
    targets = int((labels_BT != -100).sum())
    norm = precision.step(optimizer, nominal / targets, 1e9)
    return model, norm.item()


@pytest.mark.slow
def test_accumulated_micro_batches_weigh_every_target_token_the_same() -> None:
    whole, whole_norm = step_in_parts(Precision("fp32", CPU), [slice(0, 4)])
    parts, parts_norm = step_in_parts(Precision("fp32", CPU), [slice(0, 1), slice(1, 4)])
    assert parts_norm == pytest.approx(whole_norm, rel=1e-4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


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


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_steps_like_fp32(name: PrecisionName) -> None:
    _, expected = step_in_parts(Precision("fp32", CPU), [slice(0, 4)])
    precision = Precision(name, CPU)
    model, norm = step_in_parts(precision, [slice(0, 4)])
    assert norm == pytest.approx(expected, rel=0.05)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert bool(precision.state_dict()["scaler"]) == (name == "fp16")
