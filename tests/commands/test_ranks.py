"""Training on several ranks is training on one: the same rows in every step, the same losses."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import PROGRAMS, warm
from support.commands import call
from support.programs.ranked_training import BEGINS
from support.training import RUNS, load_weights, read_metrics

from tokenfeed.tools import report as report_command

PROGRAM = PROGRAMS / "ranked_training.py"
SETTINGS: dict[str, Any] = {
    "model": "support.training:double_model",
    "sequence_length": 32,
    "micro_batch_tokens": 64,
    "step_tokens": 256,  # four micro-batches: three ranks need fillers
    "steps": 6,
    "save_every": 2,
    "eval_every": 6,
    "eval_tokens": 256,
    "keep": 9,
}
IN_FP32 = {"classify padded": {"model": "support.training:small_model"}}
LATE_S = 0.1
KILLS = 100
KEYS = ("loss", "gradient_norm", "validation_loss", "tokens", "learning_rate")

Run = tuple[int, dict[str, Any]]


class Ended(NamedTuple):
    """How a run ended."""

    codes: list[int]
    """Exit codes of its ranks."""
    errors: str
    """What its ranks printed to stderr."""


def train(runs: list[Run]) -> list[Ended]:
    """Train the runs one after the other, in forks of one process."""
    given = json.dumps(runs, default=str)
    result = warm.run([PROGRAM, given], timeout=900)
    assert result.returncode == 0, result.stderr
    codes = json.loads(result.stdout.splitlines()[-1])
    errors = result.stderr.split(BEGINS)[1:]
    return [Ended(*each) for each in zip(codes, errors, strict=True)]


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


SHARDED = {
    "complete packed": (3, {"recompute": True, "in_chunks": True}),
    "tag padded": (2, {"model": "support.training:frozen_model"}),
}
REFUSED_WITH_SHARES = {"optimizer": "muon", "micro_batch_tokens": "auto"}
SHARES = {"shard_model": True}
FP16 = {"model": "support.training:overflowing_model", "precision": "fp16"}


def runs_in(folder: Path, every_task: Path) -> dict[str, Run]:
    """All runs, by name; a run that goes on with a folder comes after the run that began there."""

    def of(place: str, data: str = "lm packed", **more: Any) -> dict[str, Any]:
        settings = SETTINGS | RUNS[data] | IN_FP32.get(data, {}) | {"run_dir": folder / place}
        return settings | {"shards": every_task / settings["shards"]} | more

    resumed: dict[str, Any] = {"resume": True}
    dropping = {"model": "support.training:dropping_double_model"}
    often = SHARES | {"save_every": 1}
    begun = {"model": "shallow", "init_from": folder / "first", "learning_rate": 1e-4}
    begun |= {"trainable": "blocks.1.*,norm.*"}
    small = {"compress_checkpoints": True}
    part, larger = {"eval_tokens": 64}, {"micro_batch_tokens": 128}
    runs: dict[str, Run] = {
        "1": (1, of("1")),
        "2": (2, of("2", late=(1, LATE_S))),
        "classes 1": (1, of("classes 1", "classify padded")),
        "classes 3": (3, of("classes 3", "classify padded")),
        "shares": (2, of("shares", late=(1, LATE_S), **SHARES)),
        "other shares, stopped": (2, of("other shares", ends=("stop", 1, 2), **SHARES, **small)),
        "other shares, whole": (1, of("other shares", ends=("stop", 0, 1), **resumed)),
        "other shares": (3, of("other shares", **SHARES, **resumed, **small)),
        "dropping": (1, of("dropping", **dropping)),
        "changing, stopped": (2, of("changing", ends=("stop", 1, 1), **dropping)),
        "changing, on three": (3, of("changing", ends=("stop", 2, 2), **dropping, **resumed)),
        "changing": (1, of("changing", **dropping, **resumed)),
        "part": (1, of("part", **part)),
        "same part, stopped": (2, of("same part", **part, **larger, ends=("stop", 0, 2))),
        "same part": (1, of("same part", **part, **resumed, micro_batch_tokens=32)),
        "classes, part": (1, of("classes, part", "classify padded", **part)),
        "classes, same part": (2, of("classes, same part", "classify padded", **part, **larger)),
        "muon 1": (1, of("muon 1", optimizer="muon", model="support.training:small_model")),
        "muon 3": (3, of("muon 3", optimizer="muon", model="support.training:small_model")),
        "killed": (2, of("killed", ends=("kill", 1, 3), **often)),
        "killed again": (3, of("killed", ends=("kill", 0, 2), **often, **resumed)),
        "after kills": (2, of("killed", **often, **resumed)),
        "first": (2, of("first", model="shallow", steps=2, **SHARES)),
        "begun": (1, of("begun", **begun)),
        "begun shares": (2, of("begun shares", **begun, **SHARES)),
        "fading 1": (1, of("fading 1", model="support.training:fading_model")),
        "fading 2": (2, of("fading 2", model="support.training:fading_model")),
        "fp16": (2, of("fp16", **FP16)),
        "fp16 shares": (2, of("fp16 shares", **FP16, **SHARES)),
        "too many": (2, of("too many", step_tokens=64)),
    }
    for name, value in REFUSED_WITH_SHARES.items():
        runs[f"refused {name}"] = 2, of("refused", **SHARES, **{name: value})
    for data, (size, more) in SHARDED.items():
        runs[f"{data} whole"] = 1, of(f"{data} whole", data, **more)
        runs[f"{data} shares"] = size, of(f"{data} shares", data, **more, **SHARES)
    return runs


class Trained(NamedTuple):
    """All runs, and their folders."""

    folder: Path
    ended: dict[str, Ended]


@pytest.fixture(scope="module")
def trained(every_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    runs = runs_in(folder, every_task)
    return Trained(folder, dict(zip(runs, train([*runs.values()]), strict=True)))


def assert_like(trained: Trained, name: str, other: str) -> None:
    """Two runs trained alike to their end."""
    for each in (name, other):
        assert not any(trained.ended[each].codes), trained.ended[each].errors
    assert_alike(trained.folder / name, trained.folder / other)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        pytest.param("2", "1", id="two ranks"),
        pytest.param("classes 3", "classes 1", id="three ranks"),
        pytest.param("changing", "dropping", id="two, three and one, with dropout"),
        pytest.param("shares", "1", id="shares"),
        pytest.param("other shares", "1", id="shares, whole weights and other shares"),
        pytest.param("same part", "part", id="evaluations of a part, other micro-batches"),
        pytest.param("begun shares", "begun", id="shares of part of the weights of another run"),
        *(
            pytest.param(f"{data} shares", f"{data} whole", id=f"shares of {data}")
            for data in SHARDED
        ),
    ],
)
def test_any_ranks_train_as_one(name: str, other: str, trained: Trained) -> None:
    assert_like(trained, name, other)


def test_part_of_labelled_rows_is_the_same_for_any_micro_batch(trained: Trained) -> None:
    names = ("classes, part", "classes, same part", "classes 1")
    found = [read_metrics(trained.folder / name, "validation_loss")[0] for name in names]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] != pytest.approx(found[2], rel=1e-3), "all rows"


@pytest.mark.parametrize("name", ["2", "shares"])
def test_report_names_the_late_rank(name: str, trained: Trained) -> None:
    report = json.loads((trained.folder / name / "report.json").read_text())
    stall = report["stall"]
    assert (stall["slowest_rank"]["rank"], stall["slowest_rank"]["cause"]) == (1, "data")
    slept = 2 * LATE_S * stall["steps"]  # before each of two micro-batches
    assert stall["ranks"][0]["waited_seconds"] == pytest.approx(slept, rel=1e-3)
    said = call(report_command.main, trained.folder / name).stdout
    assert "ranks    rank 1 keeps the others waiting: data" in said
    assert re.search(r"^next +rank 1: raise `--num-workers`", said, re.MULTILINE)
    assert "<th>1 (late)</th>" in (trained.folder / name / "report.html").read_text()


def test_a_wish_of_one_rank_ends_all_after_the_same_step(trained: Trained) -> None:
    saved = (trained.folder / "changing" / "checkpoints").glob("step-*")
    steps = sorted(int(path.name.removeprefix("step-")) for path in saved)
    assert steps == [1, 2, 3, 4, 6], "those of the wishes, those that are due"


def test_a_rank_that_dies_ends_the_others_with_one_line(trained: Trained) -> None:
    codes, errors = trained.ended["killed again"]
    assert codes == [-signal.SIGKILL, 1, 1], errors
    lines = [line for line in errors.splitlines() if line.startswith("rank ")]
    assert sorted(line.split(":")[0] for line in lines) == ["rank 1", "rank 2"]
    assert all("another rank is gone (" in line for line in lines), lines


def test_more_ranks_than_micro_batches_are_refused_in_one_line(trained: Trained) -> None:
    codes, errors = trained.ended["too many"]
    assert codes == [1, 1]
    assert "`--micro-batch-tokens`=64: 2 ranks share 1 micro-batch of a step" in errors


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_shares_of_a_step_take_16_bytes_per_parameter_and_no_whole_weight_stays(
    size: int, every_task: Path, tmp_path: Path
) -> None:
    """Between forward and backward pass."""
    program = [PROGRAMS / "sharded_memory.py", str(every_task / "lm"), str(tmp_path), str(size)]
    result = warm.run(program)
    assert result.returncode == 0, result.stderr
    ranks = json.loads(result.stdout.splitlines()[-1])
    assert [rank["kept"] for rank in ranks] == [0] * size
    for rank in ranks:
        assert rank["stored"] == pytest.approx(16 * rank["parameters"] / size, rel=0.01)


def test_killed_ranks_with_shares_leave_checkpoints_to_resume(trained: Trained) -> None:
    killed = -signal.SIGKILL
    assert trained.ended["killed"].codes == [1, killed]
    assert trained.ended["after kills"].codes == [0, 0], trained.ended["after kills"].errors
    assert_alike(trained.folder / "killed", trained.folder / "shares")


def test_what_shares_cannot_do_is_refused_with_the_remedy(trained: Trained) -> None:
    for name, value in REFUSED_WITH_SHARES.items():
        codes, errors = trained.ended[f"refused {name}"]
        assert codes == [1, 1]
        assert re.search(rf"`--{name.replace('_', '-')}`={value}\b.* with --shard-model", errors)


def test_muon_on_ranks_trains_as_on_one(trained: Trained) -> None:
    """Three ranks share stacks of eight and of four matrices."""
    for name in ("muon 1", "muon 3"):
        assert not any(trained.ended[name].codes), trained.ended[name].errors
    one = read_metrics(trained.folder / "muon 1", "loss")
    assert read_metrics(trained.folder / "muon 3", "loss") == pytest.approx(one, rel=1e-4)


def test_a_weight_that_only_the_first_step_uses_then_stays(trained: Trained) -> None:
    assert_alike(trained.folder / "fading 1", trained.folder / "fading 2")


def test_an_overflow_on_one_rank_is_skipped_by_all(trained: Trained) -> None:
    losses = []
    for name in ("fp16", "fp16 shares"):
        folder = trained.folder / name
        skipped = read_metrics(folder, "skipped_steps")
        assert skipped == {2: 1, 3: 1, 5: 1}
        assert [*read_metrics(folder, "loss_scale").values()] == [
            65536 / 2 ** sum(each <= step for each in skipped) for step in range(1, 7)
        ]
        losses.append(read_metrics(folder, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_ranks_use_no_deprecated_option(trained: Trained) -> None:
    assert "deprecated" not in trained.ended["2"].errors


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
        "adapters in fp16": {"model": f"hf:{folder}", "lora": 4, "precision": "fp16"},
        "hub in fp16": {"model": f"hf:{folder}", "precision": "fp16"},
        "compiled": {
            "compile": True,
            "micro_batch_tokens": 128,
            "model": "support.training:small_model",
        },
    }
    runs: list[Run] = []
    shards = {"shards": every_task / "lm", "batching": "packed"}
    for name, more in cases.items():
        settings = SETTINGS | shards | {"run_dir": tmp_path / name / "one"} | more
        runs += [(1, settings), (2, settings | {"run_dir": tmp_path / name / "two"})]
        runs += [(2, settings | {"run_dir": tmp_path / name / "shares", "shard_model": True})]
    for codes, errors in train(runs):
        assert not any(codes), errors
    for name in cases:
        one = read_metrics(tmp_path / name / "one", "loss")
        for folder in (tmp_path / name).iterdir():
            near = pytest.approx(one, rel=1e-4 if "fp16" in name else 1e-5)
            assert read_metrics(folder, "loss") == near, folder
