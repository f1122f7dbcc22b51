"""Which weight is updated by what, and that a step is the plain optimizer's."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.training import make_head, make_transformer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tokenfeed.trainer.config.run_config import OptimizerName
from tokenfeed.trainer.models.gpt import ModelSize, Transformer
from tokenfeed.trainer.optim.optimizer import hidden_matrices, make_optimizer, set_learning_rate

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


def names_of(model: nn.Module, parameters: Iterable[torch.Tensor]) -> set[str]:
    """Their names in the model, the first where one has several."""
    chosen = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


class Counts(nn.Module):
    """A table whose weights follow their gradients, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.table = nn.Embedding(3, 2)
        self.table.by_gradient = 1e5


class Expert(nn.Module):
    """A feed-forward network with a router, a gate and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.router = nn.Linear(16, 4)
        self.inner = nn.ModuleDict({"gate": nn.Linear(16, 64), "gate_proj": nn.Linear(16, 64)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 2)})


BLOCK = ("attention_in.weight", "attention_out.weight", "feed_in.weight", "feed_out.weight")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (make_transformer(), {f"blocks.{layer}.{name}" for layer in range(6) for name in BLOCK}),
        (Tagger(), {f"layers.{layer}.weight" for layer in range(3)}),
        (Expert(), {"inner.gate.weight", "inner.gate_proj.weight"}),
    ],
    ids=["blocks alone", "no tables, heads or ties", "no routers or adapters"],
)
def test_muon_gets_linear_layers_of_blocks_only(model: nn.Module, expected: set[str]) -> None:
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


def test_muon_moves_matrices_in_the_direction_of_torch_and_the_rest_by_adamw() -> None:
    ours, optimizer = make_tagger("muon")
    plain, _ = make_tagger("muon")
    start, _ = make_tagger("muon")
    train(ours, optimizer.step, optimizer, 1)
    matrices = hidden_matrices(plain)
    rest = [p for p in plain.parameters() if p not in matrices]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    muon = torch.optim.Muon([*matrices], lr=1e-2, weight_decay=0.1)
    train(plain, lambda: (muon.step(), adamw.step())[0], adamw, 1)
    for one, other, before in zip(
        ours.parameters(), plain.parameters(), start.parameters(), strict=True
    ):
        if other in matrices:
            moved = [(each - before * (1 - 1e-3)).flatten() for each in (one, other)]
            assert torch.cosine_similarity(*moved, dim=0) > 0.999
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("scales", [(1.0, 1.0, 50.0), (1e-3, 1.0, 30.0)])
def test_muon_moves_queries_keys_and_values_equally(scales: tuple[float, ...]) -> None:
    """Whatever the sizes of their gradients are."""
    model = make_transformer()
    optimizer = make_optimizer(model, "muon", 0.0)
    set_learning_rate(optimizer, 1e-2)
    weight = model.blocks[0].attention_in.weight
    before = weight.detach().clone()
    random = torch.Generator().manual_seed(0)
    weight.grad = torch.cat(
        [
            scale * torch.randn(part.shape, generator=random)
            for part, scale in zip(weight.chunk(3), scales, strict=True)
        ]
    )
    optimizer.step()
    sizes = [part.square().mean().sqrt().item() for part in (weight - before).chunk(3)]
    assert sizes == pytest.approx([0.2e-2] * 3, rel=0.01)


@pytest.mark.parametrize(
    ("architecture", "settings", "layer", "sizes"),
    [
        ("GPT2LMHeadModel", {}, "c_attn", [(768, 768)] * 3),
        (
            "Phi3ForCausalLM",
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
            "qkv_proj",
            [(96, 96), (96, 32), (96, 32)],
        ),
        ("Phi3ForCausalLM", {"intermediate_size": 200}, "gate_up_proj", [(3072, 200)] * 2),
        ("ModernBertForMaskedLM", {}, "Wqkv", [(768, 768)] * 3),
    ],
)
def test_matrices_side_by_side_in_a_weight_are_found(
    architecture: str, settings: dict[str, int], layer: str, sizes: list[tuple[int, int]]
) -> None:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model(model.config_class(**settings, num_hidden_layers=1, pad_token_id=0))
    found = {
        name: sections.of(weight)
        for weight, sections in hidden_matrices(model).items()
        for name, other in model.named_parameters()
        if other is weight
    }
    [parts] = [parts for name, parts in found.items() if name.endswith(f"{layer}.weight")]
    assert [tuple(part.shape) for part in parts] == [(max(each), min(each)) for each in sizes]


class Operators(TorchDispatchMode):
    """Counts operators that compute: neither views nor marks of the profiler."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_view = function.is_view or function.name() == "aten::_unsafe_view"
        self.count += not (is_view or function.name().startswith("profiler::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [2, 12])
def test_muon_takes_few_operators_however_many_layers(layers: int) -> None:
    model = Transformer(ModelSize(layers=layers, width=16, heads=2), make_head())
    optimizer = make_optimizer(model, "muon", 0.1)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with Operators() as operators:
        optimizer.step()
    assert operators.count < 100


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_without_a_gradient_stays(name: OptimizerName) -> None:
    model, optimizer = make_tagger(name)
    unused = model.layers[1].weight.detach().clone()
    model.layers = nn.ModuleList([model.layers[0], model.layers[2]])
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    train(model, optimizer.step, optimizer, 2)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert any(torch.equal(p, unused) for p in held if p.shape == unused.shape)
