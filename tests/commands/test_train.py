"""Training end to end, on a corpus small enough to be learnt in seconds."""

import dataclasses
import functools
import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PROGRAMS, training, warm
from support.commands import call
from support.data_sets import WriteDataset
from support.training import (
    VOCABULARY,
    assert_same_run,
    counting_rows,
    load_weights,
    run,
    write_counting,
)

from tokenfeed.pipeline.errors import ResumeError
from tokenfeed.tools import train
from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints
from tokenfeed.trainer.config.run_config import TrainConfig
from tokenfeed.trainer.report.run_files import Report

MODULE = ("-m", "tokenfeed.tools.train")
make_config = functools.partial(training.make_config, model="shallow")  # what a process finds


@pytest.fixture(scope="module")
def finished(counting: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run(make_config(counting, run_dir))
    return run_dir


def words_of(config: TrainConfig) -> list[str]:
    """The command line that means `config`, without the name of the command."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False and value is not None and value != ():
            words += [flag, str(value)]
    return words


def start(config: TrainConfig, program: Sequence[str] = MODULE) -> warm.Popen:
    return warm.Popen([*program, *words_of(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_command_with_a_checkpoint_and_a_report(
    number: signal.Signals, exit_code: int, counting: Path, tmp_path: Path
) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("runs under nohup, where the command must go on")
    run_dir = tmp_path / "run"
    config = make_config(counting, run_dir, steps=100_000, save_every=100_000, json=True)
    process = start(config)
    wait_for_step(2, run_dir, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == exit_code, errors
    report = json.loads(output)
    assert report == json.loads((run_dir / "report.json").read_text())
    assert report["finished"] is False
    assert load_weights(run_dir, report["steps"])


def wait_for_step(step: int, run_dir: Path, process: subprocess.Popen[str]) -> None:
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and f'"step":{step},' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_sigusr1_saves_and_the_run_goes_on_until_sigterm(counting: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = make_config(counting, run_dir, steps=100_000, save_every=100_000)
    process = start(config)
    wait_for_step(2, run_dir, process)
    process.send_signal(signal.SIGUSR1)
    checkpoints = Checkpoints.of_run(run_dir)
    while checkpoints.latest() is None:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    saved = checkpoints.open().meta
    wait_for_step(saved.step + 2, run_dir, process)
    process.terminate()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors
    assert "saving after this step" in errors
    report = Report.of_run(run_dir)
    assert report
    assert load_weights(run_dir, report.steps)


ON_A_DISK_THAT_HANGS = """
import atexit, sys, time
from tokenfeed.trainer.checkpoints import async_saver
write = async_saver.write_tensors
def hang(path, *rest):
    if "step-00000002" not in str(path):
        time.sleep(1000)
    return write(path, *rest)
atexit.register(print, "Python ends while a thread writes, which may abort", file=sys.stderr)
async_saver.write_tensors = hang
from tokenfeed.tools.train import main
main()
"""


def test_a_second_ctrl_c_ends_a_run_whose_disk_hangs_and_damages_nothing(
    counting: Path, finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = make_config(counting, run_dir, save_every=2, eval_every=4)
    process = start(config, ("-c", ON_A_DISK_THAT_HANGS))
    wait_for_step(6, run_dir, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr
    assert any(line.startswith("stopping: ") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Python ends" not in errors
    assert Checkpoints.of_run(run_dir).latest() == run_dir / "checkpoints" / "step-00000002"
    run(make_config(counting, run_dir, resume=True))
    assert_same_run(run_dir, finished, 8)


def test_the_command_prints_progress_and_summary(counting: Path, tmp_path: Path) -> None:
    config = make_config(counting, tmp_path / "run", steps=2)
    result = warm.run([*MODULE, *words_of(config)])
    assert result.returncode == 0, result.stderr
    assert "step 2/2 | loss " in result.stderr
    assert "real tok/s | stall " in result.stderr
    sections = [line.split()[0] for line in result.stdout.splitlines() if line[0] != " "]
    assert [name for name in sections if name != "advice"] == [
        *("verdict", "reason", "next"),
        "model",
        "trained",
        "loss",
        "metrics",
        "batch",
        "speed",
        "time",
        "stall",
        "report",
    ]


def test_the_test_split_is_evaluated_with_the_best_weights(
    write_dataset: WriteDataset, tmp_path: Path
) -> None:
    splits = {"train": 200, "validation": 24, "test": 30}
    rows = {split: counting_rows(count) for split, count in splits.items()}
    shards = write_dataset(tmp_path / "shards", rows, VOCABULARY)

    def report_of(steps: int) -> dict[str, Any]:
        """The report of a run whose steps are too large to improve for long."""
        run_dir = tmp_path / f"run of {steps}"
        config = make_config(shards, run_dir, steps=steps, learning_rate=0.3, save_every=1, keep=9)
        config = dataclasses.replace(config, eval_every=1, schedule="constant", warmup_steps=0)
        return json.loads(call(train.main, *words_of(config), "--json").stdout)

    whole = report_of(4)
    best = whole["best_step"]
    assert 0 < best < 4
    assert whole["metrics"] == report_of(best)["metrics"]


def test_killed_run_without_checkpoint_says_how_to_start_again(
    counting: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(make_config(counting, run_dir, steps=100_000, save_every=100_000))
    wait_for_step(2, run_dir, process)
    process.kill()
    process.communicate()
    report = Report.of_run(run_dir)
    assert report
    assert "start it again without --resume" in report.summary()
    with pytest.raises(ResumeError, match="leave --resume out to start again"):
        run(make_config(counting, run_dir, resume=True))
    assert run(make_config(counting, run_dir, steps=2)).finished


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_reports_its_stall(counting: Path, tmp_path: Path) -> None:
    config = make_config(counting, tmp_path / "run", device="cuda", steps=20, num_workers=1)
    report = run(config)
    assert report.loss_last < report.loss_first
    assert 0 < report.stall.steps <= 15
    assert 0 <= report.stall.stall < 1
    assert "events" in report.stall.method


@pytest.mark.slow
@pytest.mark.parametrize("kills", [12, pytest.param(60, marks=pytest.mark.long)])
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one(
    kills: int, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    shards = write_counting(write_dataset, tmp_path / "shards", rows=400, validation_rows=20)
    program = [PROGRAMS / "killed_training.py", shards, tmp_path, kills]
    ended = warm.run(program)
    assert ended.returncode == 0, ended.stderr
    seen: dict[str, int] = json.loads(ended.stdout)
    assert seen["kills"] >= kills
    assert seen["runs"] > 0
    assert seen["during_saves"] > kills // 8
