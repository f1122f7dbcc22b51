"""`train --dry-run`: what it says, to people and to programs, and that it leaves nothing behind."""

import json
from pathlib import Path

import pytest
from support.commands import call
from support.training import write_labelled

from tokenfeed.tools import train as command
from tokenfeed.trainer.sizing.dry_run import DryRun

SETTINGS = (
    *("--model", "support.training:one_layer_model", "--sequence-length", "32"),
    *("--micro-batch-tokens", "128", "--step-tokens", "512"),
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("lm") / "shards", "lm")


def words(shards: Path, *more: str) -> tuple[str, ...]:
    run_dir = str(shards.parent / "run")
    return "--shards", str(shards), "--run-dir", run_dir, *SETTINGS, "--dry-run", *more


@pytest.mark.slow
def test_programs_and_people_read_what_a_run_will_take(shards: Path) -> None:
    asked = ("--gpu", "H100", "--steps", "50", "--json")
    said = call(command.main, *words(shards, *asked))
    found = json.loads(said.stdout)
    assert found["steps"] == 50
    assert found["micro_batches_per_step"] == 4
    assert found["fits"]
    assert found["fitting_micro_batch_tokens"] == 512
    assert found["tokens_per_s_bound"] == pytest.approx(989e12 / found["flops_per_token"])
    assert found["tokens"] <= 50 * 4 * 128
    assert found["checkpoint_gib"] > 0
    assert not (shards.parent / "run").exists()
    lines = DryRun(**found).summary().splitlines()
    named = [line.split()[0] for line in lines]
    assert named == ["steps", "padding", "model", "memory", "fits", "speed", "disk"]
    assert "6 N + 12 L C T" in lines[2]
    assert "79 GiB on H100" in lines[3]


@pytest.mark.slow
def test_too_little_memory_is_said_with_a_remedy(shards: Path) -> None:
    said = call(command.main, *words(shards, "--gpu", "0.0005")).stdout
    assert "fits     no micro-batch: try --recompute" in said
    assert "speed" not in said, "of a GPU that only its memory is known of"


@pytest.mark.slow
def test_without_a_gpu_memory_is_that_of_the_host(shards: Path) -> None:
    found = json.loads(call(command.main, *words(shards, "--device", "cpu", "--json")).stdout)
    assert found["precision"] == "fp32"
    assert found["gpu"] is found["fits"] is found["fitting_micro_batch_tokens"] is None
    assert found["peak_gib"] > 0


def test_dry_run_counts_epochs_with_short_steps(tmp_path: Path) -> None:
    shards = write_labelled(tmp_path / "shards", "classify", count=300)
    options = ("--epochs", "10", "--step-tokens", "2048", "--micro-batch-tokens", "256")
    more = ("--sequence-length", "32", "--model", "words", "--device", "cpu")
    said = call(command.main, "--shards", shards, *options, *more, "--dry-run", "--json")
    assert json.loads(said.stdout)["epochs"] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--dry-run", "--gpu", "H1000"), "`--gpu`=H1000: expected one of B200, H200"),
        (("--gpu", "H100"), "`--gpu`=H100: is for --dry-run. Add it"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    shards: Path, more: tuple[str, ...], line: str
) -> None:
    result = call(command.main, "--shards", shards, *SETTINGS, *more, expect=2)
    assert line in result.stderr.splitlines()[-1]
