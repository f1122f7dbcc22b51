"""Which weight is updated by what, and that a step is the plain optimizer's."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import make_transformer
from torch import nn

from tokenfeed.trainer.config.run_config import OptimizerName
from tokenfeed.trainer.optim.optimizer import (
    hidden_matrices,
    make_optimizer,
    set_learning_rate,
)

NAMES: list[OptimizerName] = ["adamw", "muon"]


class Tagger(nn.Module):
    """A bit of everything: two tied tables, a convolution, norms, biases, a bare table, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))
        self.predictor = nn.Linear(8, 20, bias=False)
        self.predictor.weight = self.words.weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.words(ids_BT) + self.positions[: ids_BT.shape[1]]
        x_BTD = x_BTD + self.convolution(x_BTD.mT).mT
        for layer in self.layers:
            x_BTD = x_BTD + layer(self.norm(x_BTD)).relu()
        logits: torch.Tensor = self.classifier(x_BTD) + self.predictor(x_BTD)
        return logits


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    """Their names in the model, the first where one has several."""
    chosen = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def assert_each_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in model.parameters() if p.requires_grad}


MODELS = [Tagger(), make_transformer()]


@given(st.data(), st.sampled_from(MODELS), st.sampled_from(NAMES))
def test_each_trainable_weight_is_in_one_group_and_frozen_ones_in_none(
    data: st.DataObject, model: nn.Module, name: OptimizerName
) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(data.draw(st.booleans()))
    assert_each_once(model, make_optimizer(model, name, 0.1))


@pytest.mark.parametrize("name", NAMES)
def test_matrices_decay_and_gains_and_biases_do_not(name: OptimizerName) -> None:
    for model in (Tagger(), make_transformer()):
        for group in make_optimizer(model, name, 0.1).param_groups:
            expected = {0.1} if group["weight_decay"] else {0.0}
            assert {0.1 if p.dim() >= 2 else 0.0 for p in group["params"]} <= expected


def test_muon_gets_the_linear_layers_of_the_blocks_and_nothing_else() -> None:
    model = make_transformer()
    block = {"attention_in.weight", "attention_out.weight", "feed_in.weight", "feed_out.weight"}
    expected = {f"blocks.{layer}.{name}" for layer in range(6) for name in block}
    assert names_of(model, hidden_matrices(model)) == expected


def test_muon_gets_neither_tables_nor_heads_nor_what_is_tied_to_them() -> None:
    model = Tagger()
    expected = {f"layers.{layer}.weight" for layer in range(3)}
    assert names_of(model, hidden_matrices(model)) == expected


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("GPT2LMHeadModel", "lm_head"),
        ("GPT2ForSequenceClassification", "score"),
        ("LlamaForCausalLM", "lm_head"),
        ("BertForMaskedLM", "cls"),
        ("BertForTokenClassification", "classifier"),
        ("DistilBertForMaskedLM", "vocab_"),
        ("T5ForConditionalGeneration", "lm_head"),
        ("ModernBertForMaskedLM", "head"),
    ],
)
def test_muon_gets_the_hidden_layers_of_a_model_of_transformers(
    architecture: str, head: str
) -> None:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model(model.config_class())
    matrices = names_of(model, hidden_matrices(model))
    linear = {
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name
    }
    tables = {"shared.weight"} | {n for n in linear if "relative_attention_bias" in n}
    assert matrices == {n for n in linear - tables if not n.startswith(head)}
    assert matrices


def test_a_model_without_hidden_matrices_is_trained_by_adamw_alone() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
    assert type(make_optimizer(model, "muon", 0.1)) is torch.optim.AdamW


def train(
    model: nn.Module, step: Callable[[], None], optimizer: torch.optim.Optimizer, steps: int
) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randint(0, 20, (4, 16))).square().mean().backward()
        step()
        optimizer.zero_grad()


def make_tagger(name: OptimizerName, rate: float = 1e-2) -> tuple[Tagger, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = make_optimizer(model, name, 0.1)
    set_learning_rate(optimizer, rate)
    return model, optimizer


def test_muon_steps_as_torch_does_with_one_optimizer_for_each_kind() -> None:
    ours, optimizer = make_tagger("muon")
    train(ours, optimizer.step, optimizer, 5)
    plain, _ = make_tagger("muon")
    matrices = hidden_matrices(plain)
    taken = {id(matrix) for matrix in matrices}
    rest = [p for p in plain.parameters() if id(p) not in taken]
    muon = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        muon.step()
        adamw.step()
        muon.zero_grad()

    train(plain, step, adamw, 5)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_read_back_as_mere_tensors_goes_on_bit_for_bit(name: OptimizerName) -> None:
    expected, optimizer = make_tagger(name)
    train(expected, optimizer.step, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": expected.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(expected, optimizer.step, optimizer, 3)

    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    model, optimizer = make_tagger(name, rate=1.0)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer.step, optimizer, 3)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_set_is_the_rate_used_also_after_loading(name: OptimizerName) -> None:
    model, optimizer = make_tagger(name)
    train(model, optimizer.step, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    set_learning_rate(optimizer, 0.0)
    train(model, optimizer.step, optimizer, 1)
    assert all(map(torch.equal, before, model.parameters()))
    set_learning_rate(optimizer, 1e-2)
    train(model, optimizer.step, optimizer, 1)
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_without_a_gradient_stays(name: OptimizerName) -> None:
    model, optimizer = make_tagger(name)
    unused = model.layers[1].weight.detach().clone()
    model.layers = nn.ModuleList([model.layers[0], model.layers[2]])
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    train(model, optimizer.step, optimizer, 2)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert any(torch.equal(p, unused) for p in held if p.shape == unused.shape)
