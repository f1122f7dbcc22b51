"""What torch's compiler makes of Muon and of fp16: half a minute of a core."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import make_config, make_head, read_metrics, run, write_labelled

from tokenfeed.trainer.models.gpt import ModelSize, Transformer
from tokenfeed.trainer.optim.optimizer import make_optimizer, set_learning_rate

pytestmark = pytest.mark.long


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_muon_steps_as_the_eager_one() -> None:
    size = ModelSize(layers=2, width=16, heads=2)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Transformer(size, make_head())
        optimizer = make_optimizer(model, "muon", 0.1, compiled=compiled)
        set_learning_rate(optimizer, 1e-2)
        before = [weight.detach().clone() for weight in model.parameters()]
        for _ in range(2):
            for weight in model.parameters():
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        found.append([w - b for w, b in zip(model.parameters(), before, strict=True)])
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager, rtol=0, atol=0.03 * eager.abs().max().item())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_compiled_fp16_trains_as_eager_fp16(tmp_path: Path) -> None:
    folder, found = write_labelled(tmp_path / "shards", "lm", count=100), []
    own: dict[str, Any] = {"model": "support.training:one_layer_model", "precision": "fp16"}
    for compiled in (False, True):
        run_dir = tmp_path / str(compiled)
        run(make_config(folder, run_dir, compile=compiled, batching="packed", steps=4, **own))
        found.append([read_metrics(run_dir, key) for key in ("loss", "validation_loss")])
        assert {*read_metrics(run_dir, "loss_scale").values()} == {65536}
    for each, other in zip(*found, strict=True):
        assert each == pytest.approx(other, rel=1e-4)
