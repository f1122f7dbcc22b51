"""--compile: the shapes it meets are known before training, and few."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import varlen_on_cpu
from support.training import (
    LONGEST,
    make_config,
    make_head,
    read_metrics,
    run,
    small_model,
    write_labelled,
)
from torch import nn

from tokenfeed import Packed, ShardLoader
from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import MOST_SHAPES, TrainConfig
from tokenfeed.trainer.data.attention import Separation
from tokenfeed.trainer.data.datasets import make_policy
from tokenfeed.trainer.data.micro_batch import MicroBatch, Shaper
from tokenfeed.trainer.loop.evaluation import Evaluator
from tokenfeed.trainer.loop.loaders import shapes
from tokenfeed.trainer.models.build import compile_model
from tokenfeed.trainer.tasks.task import Metrics


@given(
    sequence_length=st.integers(2, 5000),
    longest=st.integers(1, 9000),
    rows=st.integers(2, 40),
    packed=st.booleans(),
)
def test_there_are_at_most_eight_shapes_of_at_least_two_rows(
    sequence_length: int, longest: int, rows: int, packed: bool
) -> None:
    budget = rows * (sequence_length if packed else (sequence_length + 63) // 64 * 64)
    config = TrainConfig(
        shards="out",
        compile=True,
        sequence_length=sequence_length,
        micro_batch_tokens=budget,
        step_tokens=budget,
    )
    found = shapes(make_policy(config, packed=packed, on_gpu=True), longest)
    assert 1 <= len(found) <= MOST_SHAPES
    assert all(count >= 2 and count * length <= budget for count, length in found)
    assert found[-1][1] >= min(longest, sequence_length)


def test_a_micro_batch_of_one_row_is_refused() -> None:
    config = TrainConfig(shards="out", compile=True, sequence_length=256, micro_batch_tokens=300)
    with pytest.raises(ConfigError, match=r"only 1\. Raise --micro-batch-tokens to at least 512"):
        shapes(make_policy(config, packed=False, on_gpu=False), 256)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_nothing_is_compiled_after_the_shapes_that_were_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of padded rows. Packed rows have one shape (`test_trainer.py`)."""
    folder = write_labelled(tmp_path / "shards", "classify", count=200)
    config = make_config(
        folder,
        tmp_path / "run",
        compile=True,
        model="support.training:one_layer_model",
        steps=16,
        sequence_length=LONGEST,
        micro_batch_tokens=128,
        step_tokens=128,
        eval_every=8,
    )
    compiled: list[tuple[int, ...]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.extend(tuple(i.shape) for i in inputs if i.dim() == 3)
        return module.forward

    plain_compile, plain_evaluate = nn.Module.compile, Evaluator.evaluate
    monkeypatch.setattr(nn.Module, "compile", lambda m, **o: plain_compile(m, backend=backend, **o))

    def noted(*given: Any) -> Metrics:
        found = plain_evaluate(*given)
        torch.compiler.set_stance("fail_on_recompile")  # from before the first step on
        return found

    monkeypatch.setattr(Evaluator, "evaluate", noted)
    torch._dynamo.reset()
    try:
        with caplog.at_level("INFO"):
            run(config)
    finally:
        torch.compiler.set_stance("default")
    [told] = [r.message for r in caplog.records if r.message.startswith("compiles micro-batches")]
    shapes = told.removeprefix("compiles micro-batches of ").removesuffix(" tokens").split(", ")
    assert {f"{rows} x {length}" for rows, length, _ in compiled} == set(shapes)
    parts = 3  # a block, the last norm, and what makes a vector of a row
    assert len(compiled) <= 2 * parts * len(shapes), "at most to train and to evaluate"
    assert len(read_metrics(tmp_path / "run", "loss")) == 16


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled."""
    found: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        found.append(module)
        return module.forward

    plain_compile, plain_method = torch.compile, nn.Module.compile
    patched = {"backend": backend}
    monkeypatch.setattr(torch, "compile", lambda f, **o: plain_compile(f, **o | patched))
    monkeypatch.setattr(nn.Module, "compile", lambda m, **o: plain_method(m, **o | patched))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def documents(folder: Path, separation: Separation) -> list[MicroBatch]:
    """Packed micro-batches with documents of other lengths each, of one shape."""
    shape = Shaper(causal=True, apart=True, separation=separation, compiled=True)
    batching = Packed(LONGEST, batch_size=3, last="fill")
    with ShardLoader(folder, batching=batching, epochs=1, num_workers=0) as loader:
        return [shape(batch) for batch in loader]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_packed_documents_of_any_length_share_a_graph(
    tmp_path: Path, graphs: list[torch.fx.GraphModule]
) -> None:
    calls = varlen_on_cpu.register()
    folder = write_labelled(tmp_path / "shards", "complete", count=60)
    by_ends, by_mask = documents(folder, "ends"), documents(folder, "mask")
    model, plain = small_model(make_head()), small_model(make_head())
    plain.load_state_dict(model.state_dict())
    compile_model(model)
    calls.clear()
    counts = []
    for ours, theirs in zip(by_ends, by_mask, strict=True):
        compiled, eager = model.hidden(ours), plain.hidden(theirs)
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
        for module, hidden in ((model, compiled), (plain, eager)):
            module.zero_grad()
            hidden[..., 0].mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
        counts.append(len(graphs))
    assert len(set(calls)) > 3, "other numbers of documents, and other lengths"
    assert set(counts) == {3}, "a block, the angles of positions, and the last norm"
