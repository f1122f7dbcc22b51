"""Training on several ranks is training on one: the same rows in every step, the same losses."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PROGRAMS, warm
from support.training import RUNS, load_weights, read_metrics

from tokenfeed.trainer.report.run_folder import RunData

PROGRAM = PROGRAMS / "ranked_training.py"
SETTINGS: dict[str, Any] = {
    "model": "support.training:double_model",
    "sequence_length": 32,
    "micro_batch_tokens": 64,
    "step_tokens": 256,  # four micro-batches: three ranks need fillers
    "steps": 6,
    "save_every": 2,
    "eval_every": 2,
    "eval_tokens": 640,
    "keep": 9,
}
ALIKE = {"lm packed": (2,), "classify padded": (3,)}
"""Numbers of ranks of runs that are like one on one rank."""
IN_FP32 = {"classify padded": {"model": "support.training:small_model"}}
LATE_S = 0.1
KILLS = 100
KEYS = ("loss", "gradient_norm", "validation_loss", "tokens", "learning_rate")

Run = tuple[int, dict[str, Any]]


def train(runs: list[Run]) -> tuple[list[list[int]], str]:
    """Exit codes of each run's ranks, and what they said."""
    given = json.dumps(runs, default=str)
    result = warm.run([PROGRAM, given])
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def assert_alike(one: Path, other: Path) -> None:
    """In double precision nothing is left but the rounding of losses, which are summed in fp32. In
    fp32 AdamW makes of rounding what its first steps make of any gradient: some 1e-6."""
    weights, others = load_weights(one, 6), load_weights(other, 6)
    is_double = next(iter(weights.values())).dtype == torch.float64
    for key in KEYS:
        near = pytest.approx(read_metrics(other, key), rel=1e-6 if is_double else 2e-6)
        assert read_metrics(one, key) == near, key
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < (1e-9 if is_double else 2e-6), name


@pytest.fixture(scope="module")
def trained(every_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs on 1, 2 or 3 ranks; of one on 2, then 3, then 1; of one on two shares of the
    weights; and of one that goes on from two shares on three, with whole weights, and on four."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        (size, settings_of(name, every_task, folder / name / str(size)))
        for name, sizes in ALIKE.items()
        for size in (1, *sizes)
    ]
    next(of for size, of in runs if size == 2)["late"] = (1, LATE_S)
    going_on = settings_of("lm packed", every_task, folder / "lm packed" / "other shares")
    runs += [(2, going_on | {"shard_model": True, "ends": ("stop", 1, 2)})]
    going_on |= {"resume": True}
    runs += [(3, going_on | {"shard_model": True, "ends": ("stop", 2, 1)})]
    runs += [(1, going_on | {"ends": ("stop", 0, 1)})]
    runs += [(4, going_on | {"shard_model": True})]
    shares = settings_of("lm packed", every_task, folder / "lm packed" / "shares")
    runs += [(2, shares | {"shard_model": True, "late": (1, LATE_S)})]
    changing = settings_of("lm packed", every_task, folder / "lm packed" / "changing")
    changing["model"] = "support.training:dropping_double_model"
    runs += [(1, changing | {"run_dir": folder / "dropping"})]
    runs += [(2, changing | {"ends": ("stop", 1, 1)})]
    runs += [(3, changing | {"resume": True, "ends": ("stop", 2, 2)})]
    runs += [(1, changing | {"resume": True})]
    codes, errors = train(runs)
    assert not any(map(any, codes)), errors
    return folder


def settings_of(name: str, every_task: Path, run_dir: Path) -> dict[str, Any]:
    settings = SETTINGS | RUNS[name] | IN_FP32.get(name, {}) | {"run_dir": run_dir}
    return settings | {"shards": every_task / settings["shards"]}


@pytest.mark.parametrize(("name", "size"), [(name, n) for name in ALIKE for n in ALIKE[name]])
def test_any_number_of_ranks_has_the_losses_of_one(name: str, size: int, trained: Path) -> None:
    assert_alike(trained / name / str(size), trained / name / "1")


def test_a_run_goes_on_on_two_three_and_one_rank_with_the_same_dropout(trained: Path) -> None:
    assert_alike(trained / "lm packed" / "changing", trained / "dropping")


def test_two_ranks_with_shares_of_the_weights_train_as_one(trained: Path) -> None:
    assert_alike(trained / "lm packed" / "shares", trained / "lm packed" / "1")


@pytest.mark.parametrize("weights", ["2", "shares"])
def test_the_report_names_the_rank_that_is_late_on_whole_weights_and_on_shares(
    weights: str, trained: Path
) -> None:
    run_dir = trained / "lm packed" / weights
    stall = json.loads((run_dir / "report.json").read_text())["stall"]
    assert (stall["slowest_rank"]["rank"], stall["slowest_rank"]["cause"]) == (1, "data")
    slept = 2 * LATE_S * stall["steps"]  # before each of two micro-batches
    assert stall["ranks"][0]["waited_seconds"] == pytest.approx(slept, rel=0.2)


def test_a_wish_of_one_rank_ends_all_after_the_same_step(trained: Path) -> None:
    steps = [step for step in range(1, 7) if checkpoint_of(trained, step).exists()]
    assert steps == [1, 2, 3, 4, 6], "those of the wishes, those that are due"


def checkpoint_of(trained: Path, step: int) -> Path:
    return trained / "lm packed" / "changing" / "checkpoints" / f"step-{step:08d}"


def test_a_rank_that_dies_ends_the_others_with_one_line(every_task: Path, tmp_path: Path) -> None:
    settings = settings_of("lm packed", every_task, tmp_path / "run")
    started = time.monotonic()
    codes, errors = train([(3, settings | {"steps": 1000, "ends": ("kill", 1, 3)})])
    assert time.monotonic() - started < 60
    assert codes == [[1, -signal.SIGKILL, 1]], errors
    lines = [line for line in errors.splitlines() if line.startswith("rank ")]
    assert sorted(line.split(":")[0] for line in lines) == ["rank 0", "rank 2"]
    assert all("another rank is gone (" in line for line in lines), lines
    left = RunData.of_folder(tmp_path / "run")
    assert left.report is not None
    assert not left.report.finished
    assert left.report.steps >= 2
    assert len(left.report.stall.ranks) == 3
    assert "stopped before the end" in left.report.summary()


@pytest.mark.slow
def test_more_ranks_than_micro_batches_are_refused_in_one_line(
    every_task: Path, tmp_path: Path
) -> None:
    settings = settings_of("lm packed", every_task, tmp_path / "run") | {"step_tokens": 64}
    codes, errors = train([(2, settings)])
    assert codes == [[1, 1]]
    assert "`--micro-batch-tokens`: 2 ranks share 1 micro-batches of a step" in errors


SHARDED = {
    "classify padded": (2, {}),
    "complete packed": (3, {"recompute": True, "in_chunks": True}),
    "tag padded": (2, {"model": "support.training:frozen_model"}),
}


@pytest.fixture(scope="module")
def sharded(every_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs on shares of the weights, and of their likes on one rank."""
    folder, runs = tmp_path_factory.mktemp("sharded"), []
    for name, (size, more) in SHARDED.items():
        settings = settings_of(name, every_task, folder / name / "whole") | more
        runs += [(1, settings)]
        runs += [(size, settings | {"run_dir": folder / name / "shares", "shard_model": True})]
    codes, errors = train(runs)
    assert not any(map(any, codes)), errors
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_shares_of_the_weights_train_as_whole_ones(name: str, sharded: Path) -> None:
    assert_alike(sharded / name / "shares", sharded / name / "whole")


@pytest.mark.slow
def test_shares_keep_no_whole_weight_between_forward_and_backward(
    every_task: Path, tmp_path: Path
) -> None:
    size = 2
    program = [PROGRAMS / "sharded_memory.py", str(every_task / "lm"), str(tmp_path), str(size)]
    result = warm.run(program)
    assert result.returncode == 0, result.stderr
    ranks = json.loads(result.stdout.splitlines()[-1])
    assert [rank["kept"] for rank in ranks] == [0] * size


def test_a_run_goes_on_from_shares_to_whole_weights_and_to_other_shares(trained: Path) -> None:
    assert_alike(trained / "lm packed" / "other shares", trained / "lm packed" / "1")


@pytest.mark.slow
def test_killed_ranks_with_shares_leave_checkpoints_to_resume(
    trained: Path, every_task: Path, tmp_path: Path
) -> None:
    settings = settings_of("lm packed", every_task, tmp_path / "run") | {"shard_model": True}
    often = settings | {"save_every": 1}
    going_on = often | {"resume": True}
    runs: list[Run] = [
        (2, often | {"ends": ("kill", 1, 3)}),
        (3, going_on | {"ends": ("kill", 0, 2)}),
    ]
    runs += [(2, going_on)]
    codes, errors = train(runs)
    killed = -signal.SIGKILL
    assert codes == [[1, killed], [killed, 1, 1], [0, 0]], errors
    assert_alike(tmp_path / "run", trained / "lm packed" / "shares")


@pytest.mark.slow
def test_what_shares_cannot_do_is_refused_with_the_remedy(every_task: Path, tmp_path: Path) -> None:
    refused = {"optimizer": "muon", "precision": "fp16", "micro_batch_tokens": "auto"}
    settings = settings_of("lm packed", every_task, tmp_path / "run") | {"shard_model": True}
    plain = (1, settings | {"steps": 1, "run_dir": tmp_path / "plain"})
    codes, errors = train(
        [plain, *((2, settings | {key: value}) for key, value in refused.items())]
    )
    assert codes == [[0], [1, 1], [1, 1], [1, 1]]
    for key, value in refused.items():
        assert re.search(rf"`--{key.replace('_', '-')}`={value}\b.* with --shard-model", errors)


@pytest.mark.long
@pytest.mark.slow
def test_ranks_killed_at_100_random_moments_lose_nothing(every_task: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(PROGRAMS / "killed_ranks.py")]
    result = subprocess.run(
        [*program, str(every_task / "lm"), str(tmp_path), str(KILLS)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["kills"] == KILLS
    assert seen["during_saves"] > 0
    assert seen["same"] > 0
    assert seen["changing"] > 0


@pytest.mark.slow
def test_muon_on_ranks_trains_as_on_one(every_task: Path, tmp_path: Path) -> None:
    """Three ranks share stacks of eight and of four matrices."""
    more = {"optimizer": "muon", "model": "support.training:small_model"}
    runs: list[Run] = [
        (ranks, settings_of("lm packed", every_task, tmp_path / str(ranks)) | more)
        for ranks in (1, 3)
    ]
    codes, errors = train(runs)
    assert not any(map(any, codes)), errors
    one = read_metrics(tmp_path / "1", "loss")
    assert read_metrics(tmp_path / "3", "loss") == pytest.approx(one, rel=1e-4)


@pytest.mark.long
@pytest.mark.slow
def test_adapters_and_compiled_models_on_ranks_train_as_on_one(
    every_task: Path, tmp_path: Path
) -> None:
    hub = pytest.importorskip("support.hub_models", reason="needs transformers")
    pytest.importorskip("peft")
    folder = hub.save_model(tmp_path / "hub", "CausalLM", "Llama", vocab_size=64)
    cases: dict[str, dict[str, Any]] = {
        "adapters": {"model": f"hf:{folder}", "lora": 4},
        "compiled": {
            "compile": True,
            "micro_batch_tokens": 128,
            "model": "support.training:small_model",
        },
    }
    runs: list[Run] = []
    for name, more in cases.items():
        settings = settings_of("lm packed", every_task, tmp_path / name / "one") | more
        runs += [(1, settings), (2, settings | {"run_dir": tmp_path / name / "two"})]
        runs += [(2, settings | {"run_dir": tmp_path / name / "shares", "shard_model": True})]
    codes, errors = train(runs)
    assert not any(map(any, codes)), errors
    for name in cases:
        one = read_metrics(tmp_path / name / "one", "loss")
        for folder in (tmp_path / name).iterdir():
            assert read_metrics(folder, "loss") == pytest.approx(one, rel=1e-5), folder


@pytest.mark.slow
def test_phases_and_several_data_sets_are_the_same_on_any_number_of_ranks(
    every_task: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more"
    shutil.copytree(every_task / "lm", more)
    both = {str(every_task / "lm"): 0.5, str(more): 0.5}
    phases: list[dict[str, Any]] = [
        {"steps": 2, "trainable": "norm", "warmup_steps": 0},
        {"steps": 2, "trainable": "norm|embed"},
        {"steps": 2},
    ]
    settings = SETTINGS | {"shards": both, "phases": phases}
    runs: list[Run] = [(1, settings | {"run_dir": tmp_path / "1"})]
    going = settings | {"run_dir": tmp_path / "going"}
    runs += [(2, going | {"ends": ("stop", 1, 3)}), (1, going | {"resume": True})]
    runs += [(2, settings | {"run_dir": tmp_path / "shares", "shard_model": True})]
    codes, errors = train(runs)
    assert not any(map(any, codes)), errors
    assert_alike(tmp_path / "shares", tmp_path / "1")
    assert_alike(tmp_path / "going", tmp_path / "1")
