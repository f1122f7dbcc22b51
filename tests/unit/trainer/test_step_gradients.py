"""A micro-batch that is too large for the memory: the step goes on in smaller pieces."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training import RUNS, make_config, read_metrics, run, write_every_task

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.micro_batch import MicroBatch
from tokenfeed.trainer.models.attention import Scope
from tokenfeed.trainer.models.transformer import Transformer

LIMIT = 2
"""Rows that there is memory for."""


class Backward(torch.autograd.Function):
    """Fails on its way back, when the gradients behind it are there already."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if len(gradient) > LIMIT:
            raise torch.OutOfMemoryError("simulated")
        return gradient


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_every_task(tmp_path_factory.mktemp("data"))


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[Tensor]"]:
    """Weak references to what entered and left forward passes that were too large."""
    seen: list[weakref.ref[Tensor]] = []
    hidden = Transformer.hidden

    def limited(model: Transformer, micro_batch: MicroBatch) -> Tensor:
        out = Backward.apply(hidden(model, micro_batch))
        if torch.is_grad_enabled() and len(out) > LIMIT:
            seen.append(weakref.ref(out))
        return out

    monkeypatch.setattr(Transformer, "hidden", limited)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in RUNS if "row" not in way])
def test_the_run_learns_the_same_in_pieces_and_nothing_leaks(
    way: str, data: Path, tmp_path: Path, alive: list["weakref.ref[Tensor]"], caplog: Any
) -> None:
    settings = RUNS[way] | {"steps": 2, "micro_batch_tokens": 192, "step_tokens": 576}
    shards = data / settings.pop("shards")
    with caplog.at_level("WARNING"):
        cut = run(make_config(shards, tmp_path / "cut", **settings))
    assert alive
    assert not any(reference() is not None for reference in alive)
    assert "out of memory: micro-batches are computed in" in caplog.text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.LIMIT", 1000)
        whole = run(make_config(shards, tmp_path / "whole", **settings))
    assert cut.tokens == whole.tokens
    for key in ("loss", "gradient_norm", "validation_loss"):
        ours, theirs = (read_metrics(tmp_path / name, key) for name in ("cut", "whole"))
        assert ours == pytest.approx(theirs, rel=2e-4)


@pytest.mark.slow
def test_one_row_that_is_too_large_ends_the_run_in_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: Any
) -> None:
    monkeypatch.setattr(f"{__name__}.LIMIT", 0)
    with pytest.raises(ConfigError, match="needs more memory than there is"):
        run(make_config(data / "lm", tmp_path / "run"))


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_parts_hold_every_row_once_with_its_own_documents(number: int) -> None:
    ids_BT = torch.arange(20).view(5, 4)
    ends = torch.tensor([0, 3, 4, 8, 10, 12, 16, 20, 20, 20], dtype=torch.int32)
    whole = MicroBatch(ids_BT, ids_BT, ids_BT % 4, Scope(True, None, ends, 4), ids_BT > 0)
    parts = whole.parts(number)
    assert len(parts) == min(number, 5)
    assert torch.equal(torch.cat([part.ids_BT for part in parts]), ids_BT)
    assert torch.equal(torch.cat([part.positions_BT for part in parts]), ids_BT % 4)
    lengths = torch.cat([part.scope.cu_seqlens.diff() for part in parts])  # type: ignore[union-attr]
    assert lengths[lengths > 0].tolist() == [3, 1, 4, 2, 2, 4, 4]
    for part in parts:
        assert part.scope.cu_seqlens is not None
        assert part.scope.cu_seqlens[-1] == part.num_slots
