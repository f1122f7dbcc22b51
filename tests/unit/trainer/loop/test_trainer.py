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
    follow_brackets,
    load_weights,
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
from tokenfeed.trainer.loop import trainer as loop
from tokenfeed.trainer.models.gpt import Transformer
from tokenfeed.trainer.optim.precision import allow_tf32
from tokenfeed.trainer.report.progress_lines import ProgressLog
from tokenfeed.trainer.report.run_files import MetricsFile
from tokenfeed.trainer.stall import StallMeter

READS_GRAD = pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # the compiler does, of inputs


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


def spoil(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Put it into the gradient of every weight."""
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        weight.grad[..., 0] = value


def test_skipped_steps_are_counted_and_the_checkpoints_stay_finite(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = training_step.scale_and_clip, iter(range(1, 100))

    def spoiled(optimizer: torch.optim.Optimizer, *rest: Any) -> torch.Tensor:
        if next(calls) in (3, 5):
            spoil(optimizer, torch.inf)
        return plain(optimizer, *rest)

    monkeypatch.setattr(training_step, "scale_and_clip", spoiled)
    report = run(make_config(counting, tmp_path, steps=6, log_every=2, save_every=3, eval_every=3))
    assert read_metrics(tmp_path, "skipped_steps") == {3: 1, 6: 1}
    assert [*read_metrics(tmp_path, "gradient_norm")] == [1, 2, 4, 6]
    assert report.skipped_steps == 2
    assert "trained  6 steps (2 skipped)" in report.summary()
    for step in (3, 6):
        assert all(bool(w.isfinite().all()) for w in load_weights(tmp_path, step).values())


def test_progress_line_of_skipped_steps_shows_no_loss(
    counting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = make_config(counting, tmp_path, steps=4, learning_rate=1e30, log_every=2)
    report = run(config)
    assert (report.finished, report.skipped_steps) == (True, 3)
    (line,) = (line for line in caplog.messages if line.startswith("step 4/4"))
    assert "loss" not in line
    assert line.endswith("2 skipped")


def test_diverged_run_without_checkpoint_advises_none(counting: Path, tmp_path: Path) -> None:
    config = make_config(counting, tmp_path, steps=40, learning_rate=1e30, save_every=100)
    with pytest.raises(ConfigError, match=r"start again: nothing was saved\. Step 2: "):
        run(config)


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


def test_the_first_evaluation_of_a_run_of_one_step_is_no_stall(
    counting: Path, tmp_path: Path
) -> None:
    report = run(make_config(counting, tmp_path, steps=1))
    assert report.stall.steps == 0
    assert report.stall.causes["evaluation"].seconds == 0.0
    assert report.stall.stall is None
    assert report.real_tokens_per_s is None
    assert report.summary().count("not measured") == 2


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


@READS_GRAD
@pytest.mark.slow
def test_a_resumed_compiled_run_compiles_before_its_first_step(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compilations(monkeypatch)
    run(make_config(counting, tmp_path, steps=4, eval_every=100, compile=True), stop_after=1)
    torch._dynamo.reset()
    compiled.clear()
    plain, after_first_step = loop.Trainer._run_parts, []

    def noted(*args: Any, **options: Any) -> None:
        after_first_step.append(len(compiled))
        plain(*args, **options)

    monkeypatch.setattr(loop.Trainer, "_run_parts", noted)
    run(make_config(counting, tmp_path, steps=4, eval_every=100, compile=True, resume=True))
    assert after_first_step[0] == len(compiled) == 4  # as above
    assert list(read_metrics(tmp_path, "validation_loss")) == [0, 4]


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


@pytest.mark.parametrize("is_frozen", [False, True])
def test_garbage_is_collected_at_log_lines_only(
    is_frozen: bool, counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: int(is_frozen))
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    bracket = follow_brackets(monkeypatch)
    causes: list[str | None] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():  # the last save goes on behind the loop
            causes.append(bracket())

    def make_cycles() -> bool:
        assert not gc.isenabled()
        for _ in range(10_000):
            cycle: list[object] = []
            cycle.append(cycle)
        if not steps:
            gc.callbacks.append(note)
        steps.append(len(causes))
        return False

    steps: list[int] = []
    trainer = loop.Trainer(make_config(counting, tmp_path / "run", steps=4, log_every=2))
    try:
        trainer.train(bool, make_cycles)
    finally:
        gc.callbacks.remove(note)
        trainer.close()
    assert set(causes) == {"log"}
    assert len(causes) == 3, "after steps 1, 2 and 4"
    assert gc.isenabled()
    assert calls == ([] if is_frozen else ["freeze", "unfreeze"])


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
