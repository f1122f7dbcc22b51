"""`train` under torchrun: ranks that are killed, told to stop, or on several machines."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import children_of, free_ports
from support.training import load_weights, read_metrics

from tokenfeed.trainer.checkpoints.checkpoint_files import Checkpoints

pytestmark = pytest.mark.slow

STEPS = 120


@pytest.fixture(scope="module")
def undisturbed(lm_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with started(train(lm_rows, run_dir)) as alone:
        assert alone.wait(300) == 0
    return run_dir


def train(lm_rows: Path, run_dir: Path, *more: str) -> list[str]:
    settings = {
        "--shards": lm_rows,
        "--run-dir": run_dir,
        "--model": "support.training:double_model",
        "--steps": STEPS,
        "--sequence-length": 32,
        "--micro-batch-tokens": 64,
        "--step-tokens": 256,
        "--save-every": 10,
        "--eval-every": 60,
        "--log-every": 10,
        "--device": "cpu",
    }
    words = [str(word) for pair in settings.items() for word in pair]
    return ["-m", "tokenfeed.tools.train", *words, *more]


def torchrun(ranks: int, *options: str) -> list[str]:
    how = options or ("--standalone",)
    return ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *how]


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def rank_of(process: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank."""
    for child in children_of(process.pid):
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return child
    raise AssertionError("no such rank")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoint(run_dir: Path, step: int) -> Path:
    return Checkpoints.of_run(run_dir).path(step)


def assert_ends_alike(run_dir: Path, undisturbed: Path) -> None:
    assert read_metrics(run_dir, "loss") == pytest.approx(read_metrics(undisturbed, "loss"), 1e-6)
    weights, others = load_weights(run_dir, STEPS), load_weights(undisturbed, STEPS)
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-9, name


@pytest.mark.long
def test_a_killed_rank_is_restarted_and_the_run_goes_on_from_its_checkpoint(
    lm_rows: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ("--standalone", "--max-restarts=1")
    with started(torchrun(2, *options) + train(lm_rows, run_dir, "--resume", "auto")) as run:
        wait_for(checkpoint(run_dir, 20), run)
        os.kill(rank_of(run, 1), signal.SIGKILL)
        _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    ends = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(ends) <= 1, "the other rank, where it was quicker than torchrun"
    assert all("rank 0 ends: another rank is gone" in line for line in ends)
    assert "Traceback" not in errors
    assert_ends_alike(run_dir, undisturbed)


@pytest.mark.long
def test_sigterm_at_one_rank_ends_all_with_a_checkpoint_that_goes_on(
    lm_rows: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with started(torchrun(2) + train(lm_rows, run_dir, "--save-every", "1000")) as run:
        wait_for(run_dir / "metrics.jsonl", run)
        while len(read_metrics(run_dir, "loss")) < 2:
            time.sleep(0.05)
        os.kill(rank_of(run, 1), signal.SIGTERM)
        _, errors = run.communicate(timeout=300)
    assert errors.count("stopping: saving") == 1, errors
    assert len(list(Checkpoints.of_run(run_dir).path(0).parent.iterdir())) == 1
    with started(torchrun(3) + train(lm_rows, run_dir, "--resume", "--save-every", "10")) as run:
        _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    losses, whole = read_metrics(run_dir, "loss"), read_metrics(undisturbed, "loss")
    alike = whole.keys() & losses.keys()  # the stop wrote a line of its own
    assert losses[STEPS] == pytest.approx(whole[STEPS], 1e-6)
    assert len(alike) > 10
    weights, others = load_weights(run_dir, STEPS), load_weights(undisturbed, STEPS)
    assert all((weights[name] - others[name]).abs().max() < 1e-9 for name in weights)


@pytest.mark.long
def test_two_machines_train_as_one_process(
    lm_rows: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    [port] = free_ports()
    options = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=two")
    words = torchrun(1, *options, f"--rdzv-endpoint=localhost:{port}") + train(lm_rows, run_dir)
    with started(words) as one, started(words) as other:
        for machine in (one, other):
            _, errors = machine.communicate(timeout=300)
            assert machine.returncode == 0, errors
    assert_ends_alike(run_dir, undisturbed)
