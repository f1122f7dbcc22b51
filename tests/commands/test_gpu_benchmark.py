"""benchmarks/gpu/, as far as it goes without a GPU: what was not measured is not claimed."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from support import ROOT, warm
from support.training import write_labelled

from benchmarks.gpu.data import TASKS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`make gpu` is for this machine")


def run_gpu(*options: object) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "benchmarks.gpu", *options], cwd=ROOT, timeout=600)


def test_without_a_gpu_one_line_says_that_nothing_was_measured() -> None:
    ended = run_gpu()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("no CUDA device")
    assert ended.stderr.count("\n") == 1


def test_what_the_sanitizer_watches_runs(tmp_path: Path) -> None:
    write_labelled(tmp_path / "lm", "lm")
    command = ["-m", "benchmarks.gpu.case", "races", tmp_path, "--device", "cpu", "--small"]
    ended = warm.run(command, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["batches"] > 0


def outcomes(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "gpu-cpu.json").read_text())
    assert found["environment"]["device"] == "cpu"
    assert {"commit", "date", "torch", "cpu"} <= set(found["environment"])
    for entry in found["results"]:
        assert ("tokens_per_s" in entry) == (entry["outcome"] == "passed")
    return {entry["part"]: entry["outcome"] for entry in found["results"]}


@pytest.mark.long
@pytest.mark.slow
def test_parts_that_need_no_gpu_are_measured_and_the_others_skipped(tmp_path: Path) -> None:
    ended = run_gpu("--device", "cpu", "--small", "--results", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = outcomes(tmp_path)
    measured = {part for part, outcome in found.items() if outcome == "passed"}
    skipped = {part for part, outcome in found.items() if outcome == "skipped: no CUDA"}
    assert skipped | measured == set(found)
    assert {"tests", "races", *(f"waits {task}" for task in TASKS)} <= skipped
    assert {"loader", "speed", *(f"train {task}" for task in TASKS)} <= measured


@pytest.mark.slow
def test_a_part_that_fails_says_why_and_the_others_are_kept(tmp_path: Path) -> None:
    for task in TASKS:  # damaged, so it is not made
        (tmp_path / task).mkdir()
        (tmp_path / task / "manifest.json").write_text("{}")
    options = ("--device", "cpu", "--small", "--results", tmp_path, "--data", tmp_path)
    ended = run_gpu(*options, "--parts", "train tag", "races")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "failed: train tag"
    found = outcomes(tmp_path)
    assert found["races"] == "skipped: no CUDA"
    assert re.fullmatch(r"failed: .*tag/manifest\.json.*", found["train tag"])
