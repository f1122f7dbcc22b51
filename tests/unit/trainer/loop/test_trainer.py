"""What may go wrong inside a training: overflows, compilation, figures of short runs."""

import dataclasses
import gc
import itertools
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import (
    make_config,
    read_metrics,
    run,
    write_counting,
)
from torch import nn

from tokenfeed.pipeline.errors import ConfigError
from tokenfeed.pipeline.feeding.loader import ShardLoader
from tokenfeed.trainer import step as training_step
from tokenfeed.trainer.config.run_config import StageSettings
from tokenfeed.trainer.loop import evaluation as judge
from tokenfeed.trainer.models.gpt import Transformer
from tokenfeed.trainer.optim.precision import allow_tf32
from tokenfeed.trainer.report.progress_lines import ProgressLog
from tokenfeed.trainer.report.run_files import MetricsFile
from tokenfeed.trainer.stall import StallMeter

READS_GRAD = pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # the compiler does, of inputs


def spoil(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Put it into the gradient of every weight."""
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        weight.grad[..., 0] = value


def test_diverged_run_that_resumes_ends_in_one_line_again(counting: Path, tmp_path: Path) -> None:
    config = make_config(counting, tmp_path, steps=40, learning_rate=1e30, save_every=1)
    with pytest.raises(ConfigError, match=r"from step 2 on\..* Step 2: its records, ") as error:
        run(config)
    newest = max(tmp_path.glob("checkpoints/step-*"))
    latest = int(newest.name[5:])
    assert f"go on with --resume from {newest}. If the run fails again" in str(error.value)
    message = rf"20 steps in a row, from step 2 on\..* Step {latest + 1}: its records, "
    assert read_metrics(tmp_path, "validation_loss")[latest] is None  # not finite, and read again
    with pytest.raises(ConfigError, match=message):
        run(dataclasses.replace(config, resume=True))


def test_skipped_step_names_records_of_the_mixing(
    counting: Path,
    tmp_path: Path,
    write_dataset: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = write_counting(write_dataset, tmp_path / "other", rows=3000)
    plain, calls = training_step.scale_and_clip, itertools.count(1)

    def spoiled(optimizer: torch.optim.Optimizer, *rest: Any) -> torch.Tensor:
        if next(calls) == 2:
            spoil(optimizer, torch.nan)
        return plain(optimizer, *rest)

    monkeypatch.setattr(training_step, "scale_and_clip", spoiled)
    mixing = (StageSettings(shards=str(other)),)
    run(make_config(counting, tmp_path / "run", steps=2, mixing=mixing, log_every=4))
    assert "step 2 was skipped" in caplog.text
    bad = (tmp_path / "run/bad-step.jsonl").read_text()
    assert max(json.loads(line)["record"] for line in bad.splitlines()) >= 2000


@pytest.fixture
def open_causes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The causes whose bracket of the stall meter is open now."""
    causes: list[str] = []
    bracket = StallMeter.cause

    def cause(meter: StallMeter, name: Any) -> Any:
        class Tracked:
            def __enter__(self) -> None:
                self.inner = bracket(meter, name)
                self.inner.__enter__()
                causes.append(name)

            def __exit__(self, *error: Any) -> None:
                causes.pop()
                self.inner.__exit__(*error)

        return Tracked()

    monkeypatch.setattr(StallMeter, "cause", cause)
    return causes  # type: ignore[return-value]


def test_all_host_work_of_saving_and_evaluating_is_charged(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_causes: list[str]
) -> None:
    seen = []

    def watch(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen.append((name, *open_causes))
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(ShardLoader, "state_dict")
    watch(Transformer, "state_dict")
    watch(MetricsFile, "write")
    watch(judge._log, "info")
    watch(ProgressLog, "write")
    run(make_config(counting, tmp_path, steps=2, eval_every=2, save_every=2))
    assert set(seen) == {
        ("state_dict", "checkpoint"),
        *(("write", cause) for cause in ("log", "evaluation")),
        ("info", "evaluation"),
    }


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Compile by a backend that only notes the shapes of activations. Angles of positions have
    none."""
    compiled: list[tuple[int, ...]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.extend(tuple(i.shape) for i in inputs if i.dim() == 3)
        return module.forward

    compile_with(monkeypatch, backend)
    return compiled


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Callable[..., Any]) -> None:
    plain = nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda m, dynamic, **_: plain(m, dynamic=dynamic, backend=backend),
    )


@pytest.fixture
def few_rows(tmp_path: Path, write_dataset: Callable[..., Path]) -> Path:
    """An epoch, and a validation split, that end in the middle of a micro-batch."""
    return write_counting(write_dataset, tmp_path / "shards", rows=21, validation_rows=10)


@READS_GRAD
@pytest.mark.slow
def test_the_tail_of_a_window_compiles_nothing_anew(
    few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(make_config(few_rows, tmp_path / "plain", eval_every=2))
    compiled = count_compilations(monkeypatch)
    torch._dynamo.reset()
    run_dir = tmp_path / "run"
    report = run(make_config(few_rows, run_dir, eval_every=2, compile=True))
    # Block and last norm: with gradients, and without them in evaluations of twice the size.
    assert compiled == [(4, 32, 64)] * 2 + [(8, 32, 64)] * 2
    for key in ("loss", "validation_loss"):
        expected = read_metrics(tmp_path / "plain", key)
        assert read_metrics(run_dir, key) == pytest.approx(expected, rel=1e-3)
    assert report.tokens == plain.tokens
    assert report.padding > plain.padding  # empty rows are padding, too


@pytest.mark.slow
@READS_GRAD
def test_compiling_without_a_compiler_is_one_line(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(*_: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nin many lines")

    compile_with(monkeypatch, backend)
    message = r"`--compile`: .*No working C\+\+ compiler found.*leave --compile out"
    with pytest.raises(ConfigError, match=message):
        run(make_config(counting, tmp_path, compile=True))


def test_a_checkpoint_frees_cycles_that_outlived_progress_lines(
    tmp_path: Path, write_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    held, seen, steps = [Cycle()], [], itertools.count(1)
    gone = weakref.ref(held[0])
    update = training_step.update

    def watched(*given: Any) -> torch.Tensor:
        number = next(steps)
        if number == 6:
            held.clear()  # a line after each of five steps has looked at it
        seen.append(gone() is None)
        return update(*given)

    monkeypatch.setattr(training_step, "update", watched)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    shards = write_counting(write_dataset, tmp_path / "shards", rows=300)
    run(make_config(shards, tmp_path / "run", steps=10, save_every=8, eval_every=10))
    assert seen == [False] * 8 + [True] * 2


@pytest.mark.filterwarnings("ignore:Please use the new API")  # torch 2.9 says it to all who read
def test_tf32_leaves_the_older_switches_readable() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        allow_tf32(torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
