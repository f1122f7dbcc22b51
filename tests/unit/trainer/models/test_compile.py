"""--compile: the shapes it meets are known before training, and few."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import LONGEST, make_config, read_metrics, run, write_labelled
from torch import nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.trainer.config.run_config import MOST_SHAPES, PhaseSettings, TrainConfig
from tokenfeed.trainer.feeding.batch_policy import make_policy, shapes
from tokenfeed.trainer.loop import trainer as loop
from tokenfeed.trainer.models.build import compile_model

GRAPHS = 4
"""Of a block for one task, where three tasks need eight."""


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
@pytest.mark.parametrize("name", ["classify", "tag", "lm"])
def test_nothing_is_compiled_after_the_shapes_that_were_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_labelled(tmp_path / "shards", name, count=200)  # type: ignore[arg-type]
    config = make_config(
        folder,
        tmp_path / "run",
        compile=True,
        steps=60,
        sequence_length=LONGEST if name != "lm" else 32,
        micro_batch_tokens=128,
        step_tokens=128,
        eval_every=8,
    )
    compiled: list[tuple[int, ...]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.extend(tuple(i.shape) for i in inputs if i.dim() == 3)
        return module.forward

    plain_compile, plain_evaluate = nn.Module.compile, loop.Trainer._evaluate
    monkeypatch.setattr(nn.Module, "compile", lambda m, **o: plain_compile(m, backend=backend, **o))

    def noted(trainer: loop.Trainer, **options: bool) -> None:
        plain_evaluate(trainer, **options)
        torch.compiler.set_stance("fail_on_recompile")  # from before the first step on

    monkeypatch.setattr(loop.Trainer, "_evaluate", noted)
    torch._dynamo.reset()
    try:
        with caplog.at_level("INFO"):
            run(config)
    finally:
        torch.compiler.set_stance("default")
    [told] = [r.message for r in caplog.records if r.message.startswith("compiles micro-batches")]
    shapes = told.removeprefix("compiles micro-batches of ").removesuffix(" tokens").split(", ")
    assert {f"{rows} x {length}" for rows, length, _ in compiled} == set(shapes)
    assert len(compiled) <= 2 * len(shapes), "at most to train and to evaluate"
    assert len(read_metrics(tmp_path / "run", "loss")) == 60


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_nothing_is_compiled_when_another_phase_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_labelled(tmp_path / "shards", "lm", count=200)
    patterns = (r"blocks\.1", "norm", ".", r"blocks\.0\.feed")
    phases = tuple(PhaseSettings(steps=2, trainable=pattern) for pattern in patterns)
    config = make_config(folder, tmp_path / "run", compile=True, phases=phases)
    run(dataclasses.replace(config, compile=False, run_dir=tmp_path / "eager"))
    plain_compile, plain_evaluate = nn.Module.compile, loop.Trainer._evaluate
    graphs = {"backend": lambda module, inputs: module.forward}
    monkeypatch.setattr(nn.Module, "compile", lambda m, **o: plain_compile(m, **graphs, **o))

    def noted(trainer: loop.Trainer, **options: bool) -> None:
        plain_evaluate(trainer, **options)
        torch.compiler.set_stance("fail_on_recompile")

    monkeypatch.setattr(loop.Trainer, "_evaluate", noted)
    torch._dynamo.reset()
    try:
        run(config)
    finally:
        torch.compiler.set_stance("default")
    compiled = read_metrics(tmp_path / "run", "loss")
    assert compiled == pytest.approx(read_metrics(tmp_path / "eager", "loss"), rel=1e-4)


class Blockless(nn.Module):
    """A model with nothing to compile."""

    def repeated_blocks(self) -> list[nn.Module]:
        return []


@pytest.mark.slow
def test_compiler_may_make_the_graphs_of_every_phase() -> None:
    """Each has eight lengths, packed and padded, to train and to evaluate, and frozen in parts."""
    limits = torch._dynamo.config
    with limits.patch(recompile_limit=8, accumulated_recompile_limit=256):
        found = []
        for choices in (1, 3):
            compile_model(Blockless(), choices)
            found.append((limits.recompile_limit, limits.accumulated_recompile_limit))
    least = 2 * 2 * MOST_SHAPES
    assert found[0][0] >= least
    assert min(found[1]) >= 3 * least
