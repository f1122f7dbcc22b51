"""What torch's compiler makes of the loss, of Muon and of fp16: half a minute of a core."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import make_config, make_head, read_metrics, run, write_labelled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tokenfeed.pipeline.format.schema import IGNORED
from tokenfeed.trainer.models.gpt import ModelSize, Transformer
from tokenfeed.trainer.optim.optimizer import make_optimizer, set_learning_rate
from tokenfeed.trainer.tasks import vocabulary_loss as chunked

pytestmark = pytest.mark.long


class Traffic(TorchDispatchMode):
    """Bytes that operators read from and write to tensors as wide as the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary, self.bytes = vocabulary, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        few = ("aten::gather", "aten::scatter", "aten::new_full")  # touch single elements
        for value in () if function.name().startswith(few) else tree_iter((args, out)):
            if isinstance(value, Tensor) and value.shape[-1:] == (self._vocabulary,):
                self.bytes += value.nbytes
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_error_takes_a_quarter_of_the_eager_traffic() -> None:
    """Bytes per logit. Softmax of the CPU reads logits twice, and of a GPU once."""
    from torch._inductor.utils import run_and_get_code

    tokens, vocabulary = 32, 5056
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocabulary).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[3] = IGNORED
    with Traffic(vocabulary) as eager:
        loss, error = chunked.loss_and_error(logits, targets, wants_error=True)
    assert eager.bytes / logits.numel() == 32
    compiled = torch.compile(chunked.loss_and_error, dynamic=False)
    (ours, found), [code] = run_and_get_code(compiled, logits, targets, wants_error=True)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    # Compiled `exp` may differ in its last bit, and then bf16 rounds a few values to a neighbour.
    torch.testing.assert_close(found, error, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)
    assert (found != error).float().mean() < 1e-3
    made = re.findall(rf"empty_strided_cpu\(\({tokens}, {vocabulary}\),.*, torch.(\w+)\)", code)
    assert made == ["bfloat16"], "the error, and nothing else of this size"
    read = len(re.findall(r"loadu\(in_ptr0 \+ static_cast<int64_t>\(x1", code))
    written = len(re.findall(r"\.store\(out_ptr\d \+ static_cast<int64_t>\(x1", code))
    assert 2 * (read + written) <= 8


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
